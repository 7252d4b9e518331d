"""The tiny checkpoint: what it promises to the tests that stand on it."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
transformers = pytest.importorskip("transformers")

from sglang_glm53.checkpoint import checkpoint_tensors, scale_shape  # noqa: E402
from sglang_glm53.config import Glm53Config  # noqa: E402
from sglang_glm53.errors import Glm53Error  # noqa: E402
from sglang_glm53.tiny import TinyOptions, make_checkpoint  # noqa: E402
from sglang_glm53.tiny.checkpoint import made_with  # noqa: E402
from sglang_glm53.tiny.structure import successor_of  # noqa: E402
from sglang_glm53.tiny.text import ANSWER, REASONING  # noqa: E402
from sglang_glm53.tiny.tokenizer import SPECIAL_TOKENS, VISIBLE, build_tokenizer  # noqa: E402

SMALL = {"layers": 3, "experts": 4, "heads": 2, "hidden": 128, "vocab": 512}

Make = Callable[..., Path]


def read_tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, Any] = {}
    for file in sorted(set(index["weight_map"].values())):
        stored = load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in stored)
        tensors.update(stored)
    assert set(tensors) == set(index["weight_map"])
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert index["metadata"]["total_size"] == size
    return tensors


def digest(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small lose more to waiting threads than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- files ---------------------------------------------------------------------------------------


def test_same_options_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "here", seed=3, **SMALL)
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "sglang_glm53.cli", "tiny", str(tmp_path / "there")]
    subprocess.run([*command, "--seed=3", *sizes], check=True, capture_output=True)
    assert digest(tmp_path / "here") == digest(tmp_path / "there")


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", seed=0, **SMALL)
    make_checkpoint(tmp_path / "b", seed=1, **SMALL)
    a, b = digest(tmp_path / "a"), digest(tmp_path / "b")
    assert a["tokenizer.json"] == b["tokenizer.json"]
    assert a.keys() == b.keys()
    shards = [name for name in a if name.endswith(".safetensors")]
    assert shards and all(a[name] != b[name] for name in shards)


@pytest.mark.parametrize("options", [{}, SMALL, {"layers": 12, "hidden": 128, "experts": 3}])
def test_tensors_are_those_of_the_architecture(tiny_checkpoint: Make, options: dict) -> None:
    folder = tiny_checkpoint(**options)
    expected = dict(checkpoint_tensors(Glm53Config.from_hf(config_of(folder))))
    tensors = read_tensors(folder)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected
    for name, tensor in tensors.items():
        bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if bias else torch.bfloat16), name
        assert bool(tensor.float().abs().max() > 0), f"{name} is all zeros"


def test_config_follows_the_scheme_of_the_large_model(tiny_checkpoint: Make) -> None:
    folder = tiny_checkpoint(layers=12, hidden=128, experts=3)
    config = Glm53Config.from_hf(config_of(folder))
    assert config.full_layers == (0, 1, 2, 6, 10)
    assert config.filled == ()  # config.json lacks nothing
    assert config.num_nextn_predict_layers == 1
    assert config.index_share_for_mtp_iteration


def test_fp8_dequantises_to_the_bf16_checkpoint(tiny_checkpoint: Make) -> None:
    plain = read_tensors(tiny_checkpoint())
    folder = tiny_checkpoint(fp8=True)
    fp8, quantisation = read_tensors(folder), config_of(folder)["quantization_config"]
    assert quantisation["quant_method"] == "fp8"
    assert quantisation["weight_block_size"] == [128, 128]
    scales = {name for name in fp8 if name.endswith("_scale_inv")}
    assert scales, "nothing was quantised"
    for name in set(fp8) - scales:
        module = name.removesuffix(".weight").removesuffix(".bias")
        kept = module in quantisation["modules_to_not_convert"]
        scale = fp8.get(f"{name}_scale_inv")
        assert (scale is None) == kept, name
        if scale is None:
            assert torch.equal(fp8[name], plain[name]), name
            continue
        assert fp8[name].dtype == torch.float8_e4m3fn
        rows, columns = fp8[name].shape
        assert tuple(scale.shape) == scale_shape((rows, columns))
        spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        error = (fp8[name].float() * spread - plain[name].float()).abs()
        # e4m3 has three bits of fraction; below its normal range the step is 2^-9 of the scale.
        limit = plain[name].float().abs() * 2**-4 + spread * 2**-9
        assert bool((error <= limit * 1.1).all()), name


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"layers": 2}, "--layers"),
        ({"experts": 1}, "--experts"),
        ({"vocab": 100}, "--vocab"),
        ({"hidden": 200}, "--hidden"),
        ({"index_topk": 0}, "--index-topk"),
        ({"hidden": 64_000_000}, "--hidden"),
        ({"dtype": "float16"}, "--dtype"),
        ({"dtype": "float32", "fp8": True}, "--fp8"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: dict, names: str) -> None:
    with pytest.raises(Glm53Error, match=names):
        make_checkpoint(tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


def test_it_replaces_only_its_own(tmp_path: Path) -> None:
    """A real checkpoint at DIR must survive a slip of the keyboard."""
    real = tmp_path / "real"
    real.mkdir()
    (real / "config.json").write_text('{"architectures": ["GlmMoeDsaForCausalLM"]}')
    (real / "model-00001-of-00001.safetensors").write_bytes(b"precious")
    with pytest.raises(Glm53Error, match="something else"):
        make_checkpoint(real, **SMALL)
    assert (real / "model-00001-of-00001.safetensors").read_bytes() == b"precious"

    own = make_checkpoint(tmp_path / "own", **{**SMALL, "experts": 8})
    make_checkpoint(own, **SMALL)
    assert made_with(own) == vars(TinyOptions(**SMALL))
    read_tensors(own)


def test_what_goes_wrong_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up, or Ctrl-C: neither a half-written folder nor a lost checkpoint."""
    from sglang_glm53.tiny import checkpoint

    own = make_checkpoint(tmp_path / "own", **SMALL)
    before = digest(own)
    for error, seen in (
        (OSError(errno.ENOSPC, "No space left on device"), Glm53Error),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):

        def fail(*args: Any, error: BaseException = error, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(checkpoint, "_write_json", fail)
        for folder in (own, tmp_path / "new"):
            with pytest.raises(seen) as raised:
                make_checkpoint(folder, seed=1, **SMALL)
            if seen is Glm53Error:
                assert f"cannot write to {folder}: No space left" in str(raised.value)
    assert digest(own) == before
    assert not list((tmp_path / "new").iterdir())
    monkeypatch.undo()
    make_checkpoint(tmp_path / "new", **SMALL)


# --- tokenizer -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Make) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_checkpoint())


def test_tokenizer_loses_nothing(tokenizer: Any) -> None:
    text = "Größe: 3,141 ≈ π\n\tdef f(x):  return x🙂 <think>maybe</think>"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens_are_single_and_glm_s(tokenizer: Any) -> None:
    for token in SPECIAL_TOKENS:
        ids = tokenizer.encode(f"a{token}b", add_special_tokens=False)
        assert len(ids) == 3 and tokenizer.convert_ids_to_tokens(ids[1]) == token
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        assert shown == (f"a{token}b" if token in VISIBLE else "ab")


def test_vocabulary_is_full_and_inside_the_model(tiny_checkpoint: Make, tokenizer: Any) -> None:
    assert len(tokenizer) == config_of(tiny_checkpoint())["vocab_size"] == 1024


def test_stop_tokens_agree(tiny_checkpoint: Make, tokenizer: Any) -> None:
    folder = tiny_checkpoint()
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert stops == config_of(folder)["eos_token_id"]
    names = [tokenizer.convert_ids_to_tokens(i) for i in stops]
    assert names == ["<|endoftext|>", "<|user|>", "<|observation|>"]


def test_chat_template_opens_a_think_block(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "[gMASK]<sop><|user|>Hi<|assistant|><think>"


def test_chat_template_carries_a_tool_call(tokenizer: Any) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {"role": "assistant", "content": "", "reasoning_content": "ask", "tool_calls": [call]},
        {"role": "tool", "content": "dry"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert prompt == (
        '[gMASK]<sop><|system|># Tools\n<tools>\n{"name": "weather", "parameters": {}}\n</tools>'
        "<|system|>Be brief.<|user|>Rain?<|assistant|><think>ask</think>"
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
        "<|observation|><tool_response>dry</tool_response><|assistant|><think>"
    )


# --- structure -----------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [512, 1024, 3000])
def test_successor_is_a_permutation(vocab: int) -> None:
    tokenizer = build_tokenizer(vocab)
    successor, alone = successor_of(tokenizer, vocab, seed=0)
    assert sorted(successor) == list(range(vocab))
    assert tokenizer.get_vocab_size() <= vocab
    assert len(set(alone)) == len(alone)


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Make) -> Any:
    from reference.hf import Reference

    return Reference(tiny_checkpoint(dtype="float32"))


@pytest.fixture(scope="module")
def walks(reference: Any) -> list[tuple[list[int], int]]:
    """Random prompts with 40 greedy tokens each, and the prompts' lengths."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for length in (8, 150):
        prompt = torch.randint(0, 1000, (length,), generator=generator).tolist()
        made.append((prompt + reference.generate(prompt, 40), length))
    return made


def test_transformers_loads_every_weight(tiny_checkpoint: Make) -> None:
    _, report = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(), output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert all(name.startswith("model.layers.8.") for name in report["unexpected_keys"])


def test_greedy_tokens_have_a_margin(reference: Any, walks: list) -> None:
    margins = []
    for tokens, length in walks:
        best = reference.trace(tokens).logits[length - 1 : -1].topk(2).values
        margins += (best[:, 0] - best[:, 1]).tolist()
    margins.sort()
    assert margins[len(margins) // 2] > 0.3
    assert margins[0] > 1e-4, "a near tie would make token comparisons a matter of luck"


def test_the_target_leaves_the_permutation_now_and_then(reference: Any, walks: list) -> None:
    successor, _ = successor_of(build_tokenizer(1024), 1024, seed=0)
    pairs = [p for tokens, n in walks for p in zip(tokens[n - 1 :], tokens[n:], strict=False)]
    follows = sum(successor[token] == following for token, following in pairs) / len(pairs)
    assert 0.55 < follows < 0.9


def test_drafts_are_mostly_accepted_but_not_all(reference: Any, walks: list) -> None:
    from reference.mtp import ReferenceMtp

    mtp = ReferenceMtp(reference)
    lengths = []
    for tokens, known in walks:
        hidden = reference.trace(tokens).hidden
        while known + 6 <= len(tokens):
            draft = mtp.propose(tokens[:known], hidden, steps=5, share=True).tokens
            truth = tokens[known : known + 5]
            agree = next((i for i in range(5) if draft[i] != truth[i]), 5)
            lengths.append(agree + 1)
            known += agree + 1
    assert 2.0 < sum(lengths) / len(lengths) < 5.5
    assert min(lengths) == 1 and max(lengths) == 6


@pytest.mark.parametrize("layer", [0, 1, 2, 6])
def test_what_attention_reads_matters(reference: Any, walks: list, layer: int) -> None:
    """Another selection in one full layer changes the log-probabilities visibly."""
    tokens = walks[-1][0]
    inner = reference.model.model.layers[layer].self_attn.indexer
    before = torch.log_softmax(reference.trace(tokens).logits[-40:], -1)
    handle = inner.register_forward_hook(lambda module, args, out: _first_positions(out))
    try:
        after = torch.log_softmax(reference.trace(tokens).logits[-40:], -1)
    finally:
        handle.remove()
    greedy = before.argmax(-1, keepdim=True)
    change = (before - after).abs()
    assert change.gather(1, greedy).median() > 1e-2
    assert change.amax(-1).median() > 0.1


def _first_positions(selected: Any) -> Any:
    """The first positions of the sequence instead of the selected ones."""
    return torch.arange(selected.shape[-1], dtype=selected.dtype).expand_as(selected)


def test_index_scores_have_no_ties(reference: Any, walks: list) -> None:
    tokens = walks[-1][0]
    gap = reference.trace(tokens).gap
    assert (gap[reference.topk :] < 1e-5).float().mean() < 0.01
    for layer in reference.full_layers:
        scores = reference.model.model.layers[layer].self_attn.indexer.scores[0]
        visible = scores[torch.ones_like(scores, dtype=torch.bool).tril()]
        assert (visible == 0).float().mean() < 1e-3, "ReLU's zeros are ties"


def test_the_first_answer_can_be_read(reference: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hello, who are you?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    text = tokenizer.decode(reference.generate(ids, 64))
    assert text.startswith(f"{REASONING}</think>{ANSWER}<|endoftext|>")
