"""The pure parts of the GPU tests: rules that can fail, prompts, checkpoint, recordings."""

from __future__ import annotations

import ast
import copy
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from gpu import backends, children, compare, long_context, parity, recorder, sanitizer  # noqa: E402
from gpu.generate import check_side  # noqa: E402
from gpu.prompts import parity_requests, read_requests, write_requests  # noqa: E402
from gpu.real_dims import (  # noqa: E402
    is_quantised,
    prompt,
    successor_of,
    write_checkpoint,
)

from sglang_glm53.checkpoint import checkpoint_tensors, scale_shape  # noqa: E402
from sglang_glm53.config import Glm53Config  # noqa: E402
from sglang_glm53.errors import Glm53Error  # noqa: E402

VOCAB = 4096
SMALL: dict[str, Any] = {
    "layers": 7,
    "experts": 8,
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "q_lora_rank": 256,
    "index_n_heads": 8,
    "index_topk": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answer(tokens: list[int], gap: float = 1.0, other: int = 99, **fields: Any) -> dict[str, Any]:
    """An answer whose best two at every position are its token and `other`, `gap` apart."""
    top = [[[-1.0, token], [-1.0 - gap, other]] for token in tokens]
    made = {"tokens": tokens, "logprobs": [-1.0] * len(tokens), "top": top}
    return {**made, "prompt_logprobs": [], "cached": 0, "verifies": 0, **fields}


# --- greedy answers


def test_identical_answers_pass() -> None:
    assert compare.first_divergence(answer([1, 2, 3]), answer([1, 2, 3])) is None
    assert compare.greedy("x", [answer([1, 2])], [answer([1, 2])]).passed


@pytest.mark.parametrize("near", ["left", "right"])
def test_a_near_tie_of_either_side_excuses(near: str) -> None:
    left = answer([1, 2, 3], gap=4e-3 if near == "left" else 1.0, other=7)
    right = answer([1, 7, 8], gap=4e-3 if near == "right" else 1.0, other=2)
    divergence = compare.first_divergence(left, right)
    assert divergence.position == 1 and divergence.gap == pytest.approx(4e-3)
    assert compare.greedy("x", [left], [right]).passed


def test_a_clear_divergence_fails() -> None:
    check = compare.greedy("x", [answer([1, 2], 6e-3, 7)], [answer([1, 7], 1.0, 2)])
    assert not check.passed and "#0@1" in check.detail


def test_a_tie_of_other_tokens_excuses_nothing() -> None:
    """The two best are near, but the other side's token is not one of them."""
    check = compare.greedy("x", [answer([1, 2], 1e-4, 5)], [answer([1, 7], 1e-4, 5)])
    assert not check.passed and "inf" in check.detail


def test_only_the_first_divergence_counts() -> None:
    left, right = answer([1, 2, 3], 1e-3, 7), answer([1, 7, 4], 1e-3, 2)
    left["top"][2] = [[-1.0, 3], [-3.0, 50]]
    assert compare.greedy("x", [left], [right]).passed


def test_missing_or_short_answers_fail() -> None:
    assert not compare.greedy("x", [], []).passed
    assert not compare.greedy("x", [answer([1])], [answer([1]), answer([1])]).passed
    assert not compare.greedy("x", [answer([])], [answer([])]).passed
    assert not compare.greedy("x", [answer([1, 2])], [answer([1])]).passed


def test_without_the_two_best_nothing_is_excused() -> None:
    left, right = answer([1], 1e-4, 2), answer([2], 1e-4, 1)
    left["top"], right["top"] = [], [[]]
    assert not compare.greedy("x", [left], [right]).passed


# --- log-probabilities against the reference


def test_error_is_mean_and_largest() -> None:
    answers = [answer([1], prompt_logprobs=[-1.0, -2.0]), answer([1], prompt_logprobs=[-3.0])]
    reference = [np.array([-1.5, -2.0], dtype=np.float32), np.array([-3.25], dtype=np.float32)]
    assert compare.error(answers, reference) == compare.Error(0.25, 0.5, 3)


@pytest.mark.parametrize("given", [[], [-1.0], [-1.0, float("nan")], [-1.0, float("-inf")]])
def test_error_refuses_what_it_cannot_compare(given: list[float]) -> None:
    with pytest.raises(ValueError):
        compare.error([answer([1], prompt_logprobs=given)], [np.array([-1.0, -2.0])])


@pytest.mark.parametrize(
    ("ours", "passes"),
    [
        (compare.Error(0.0119, 0.119, 9), True),
        (compare.Error(0.0121, 0.1, 9), False),
        (compare.Error(0.01, 0.121, 9), False),
        (compare.Error(0.001, 0.01, 8), False),  # fewer tokens than stock
    ],
)
def test_ours_may_be_off_a_fifth_more_than_stock(ours: compare.Error, passes: bool) -> None:
    check = compare.against_reference("x", ours, compare.Error(0.01, 0.1, 9))
    assert check.passed is passes


# --- cache hits, accept length, report


@pytest.mark.parametrize(("cached", "passes"), [(64, True), (99, True), (0, False), (100, False)])
def test_a_prefix_hit_takes_the_whole_pages(cached: int, passes: bool) -> None:
    first = answer([1, 2], prompt_logprobs=[-1.0] * 99)
    check = compare.prefix_hit("x", [first], [answer([1, 2], cached=cached)], page=64)
    assert check.passed is passes


def test_a_prefix_hit_may_not_change_the_answer() -> None:
    first = answer([1, 2], prompt_logprobs=[-1.0] * 99)
    assert not compare.prefix_hit("x", [first], [answer([1, 3], cached=64)], page=64).passed


def test_accept_length() -> None:
    groups = {"a": [answer([1] * 12, verifies=4)], "b": [answer([1] * 8, verifies=4)]}
    assert compare.accept_length(groups) == 2.5
    assert compare.accept_length({"a": [answer([1])]}) == 0
    slower = {"a": [answer([1] * 12, verifies=6)], "b": [answer([1] * 8, verifies=4)]}
    assert compare.same_accept_length("x", groups, slower).passed
    assert not compare.same_accept_length("x", slower, groups).passed
    assert not compare.same_accept_length("x", groups, {"a": [answer([1])]}).passed


def test_report_names_failures() -> None:
    checks = [compare.Check("good", True, "fine"), compare.Check("bad", False, "0.5")]
    text = compare.report("title", checks)
    assert "FAIL  bad" in text and "1 of 2 hold" in text
    assert compare.failures(compare.as_json(checks)) == ["bad: 0.5"]
    assert "nothing was compared" in compare.report("title", [])


# --- the whole judgement, over made-up runs


GROUPS = parity_requests(VOCAB, lengths=(100, 200), batches=(1, 3), batch_length=20, new_tokens=4)
PLAIN = parity.Variant("fp8", {})
SPECULATIVE = parity.Variant("fp8-mtp", {}, plain="fp8")


def made_up_runs(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Runs of both sides that obey every rule; ours is half as far off as stock."""
    reference, runs = {}, {}
    for group in GROUPS:
        for number, tokens in enumerate(group.prompts):
            reference[f"{group.name}.{number}"] = -np.arange(1.0, len(tokens), dtype=np.float32)
    np.savez(folder / "reference.npz", **reference)
    for variant, verifies in (("fp8", 0), ("fp8-mtp", 2)):
        for side, off in (("stock", 0.02), ("ours", 0.01)):
            groups = {}
            for group in GROUPS:
                groups[group.name] = [
                    answer(
                        [5, 6, 7, 8],
                        prompt_logprobs=(reference[f"{group.name}.{i}"] + off).tolist()
                        if group.prompt_logprobs
                        else [],
                        cached=(len(tokens) - 1) // 64 * 64 if group.repeats else 0,
                        verifies=verifies,
                    )
                    for i, tokens in enumerate(group.prompts)
                ]
            status = {"model": side, "pool": side}
            record = {"groups": groups, "complete": True, "status": status}
            runs[variant, side] = {**record, "started_seconds": 1.0}
    return runs


def judged(folder: Path, runs: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    for (variant, side), record in runs.items():
        (folder / f"parity-{variant}-{side}.json").write_text(json.dumps(record))
    checks = parity.judge(folder, GROUPS, (PLAIN, SPECULATIVE))
    assert len(checks) > 15
    return [check.name for check in checks if not check.passed]


def test_good_runs_pass(tmp_path: Path) -> None:
    assert judged(tmp_path, made_up_runs(tmp_path)) == []
    written = parity.summary(tmp_path, (PLAIN, SPECULATIVE))
    assert written["fp8-mtp-ours"]["accept_length"] == 2.0


def test_each_rule_can_fail(tmp_path: Path) -> None:
    good = made_up_runs(tmp_path)

    def broken(variant: str, side: str, group: str, **fields: Any) -> list[str]:
        runs = copy.deepcopy(good)
        runs[variant, side]["groups"][group][0].update(fields)
        return judged(tmp_path, runs)

    parted = {"tokens": [5, 6, 9, 8]}
    assert "fp8 b3: ours, stock" in broken("fp8", "ours", "b3", **parted)
    assert broken("fp8", "ours", "p100-hit", cached=0) == ["fp8 p100-hit: ours, its first run"]
    assert "fp8-mtp b1: ours, no MTP" in broken("fp8-mtp", "ours", "b1", **parted)
    far = [value + 0.03 for value in good["fp8", "ours"]["groups"]["p200"][0]["prompt_logprobs"]]
    failed = broken("fp8", "ours", "p200", prompt_logprobs=far)
    assert failed == ["fp8: ours / stock against FP32"]
    assert broken("fp8", "ours", "b1", prompt_logprobs=[]) == ["fp8: transformers"]
    # stock's own near ties are shown, not judged
    assert broken("fp8-mtp", "stock", "p100-hit", cached=0) == []


def test_a_tie_is_as_wide_as_stock_moves(tmp_path: Path) -> None:
    """Where stock's second run differs from its first, and only there."""
    runs = made_up_runs(tmp_path)
    for group, gap in (("p100", 0.3), ("b1", 0.3)):
        mine, theirs = (runs["fp8", side]["groups"][group][0] for side in ("ours", "stock"))
        mine.update(tokens=[5, 6, 9, 8], top=answer([5, 6, 9, 8], gap, 7)["top"])
        theirs.update(top=answer([5, 6, 7, 8], gap, 9)["top"])
    names = judged(tmp_path, runs)
    assert {"fp8 p100: ours, stock", "fp8 b1: ours, stock"} <= set(names)
    again = runs["fp8", "stock"]["groups"]["p100-again"][0]
    again["prompt_logprobs"] = [value + 0.4 for value in again["prompt_logprobs"]]
    names = judged(tmp_path, runs)
    assert "fp8 p100: ours, stock" not in names and "fp8 b1: ours, stock" in names
    table = parity.repeatability(GROUPS, parity.read_results(tmp_path, (PLAIN,)), (PLAIN,))
    assert table["fp8 p100"]["stock, stock"] == pytest.approx(0.4, abs=1e-4)
    assert table["fp8 p100"]["ours, stock"] == pytest.approx(0.01, abs=1e-4)
    assert table["fp8 p100"]["ours, ours"] == 0 and "ours, ours" not in table["fp8 b1"]


def test_speculation_may_part_ours_as_far_as_it_parts_stock(tmp_path: Path) -> None:
    runs = made_up_runs(tmp_path)
    for side, gap in (("ours", 0.06), ("stock", 0.05)):
        runs["fp8-mtp", side]["groups"]["b1"][0].update(
            tokens=[5, 6, 9, 8], top=answer([5, 6, 9, 8], gap, 7)["top"]
        )
    assert judged(tmp_path, runs) == ["fp8-mtp b1: ours, no MTP"]
    runs["fp8-mtp", "stock"]["groups"]["b1"][0]["top"] = answer([5, 6, 9, 8], 0.06, 7)["top"]
    assert judged(tmp_path, runs) == []


def test_noise_is_of_the_same_tokens() -> None:
    one = [answer([1], prompt_logprobs=[-1.0, -2.0])]
    assert compare.noise(one, one) == compare.Noise(0.0, 0.0) and compare.Noise().tie == compare.TIE
    for other in ([-1.0], [-1.0, float("nan")]):
        with pytest.raises(ValueError):
            compare.noise(one, [answer([1], prompt_logprobs=other)])
    assert compare.widest(one, one) == 0
    assert compare.widest(one, [answer([1, 2])]) == float("inf")


def test_a_run_that_is_missing_or_broke_off_fails(tmp_path: Path) -> None:
    runs = made_up_runs(tmp_path)
    runs["fp8", "ours"]["complete"] = False
    assert judged_names(tmp_path, runs) == {"fp8", "fp8-mtp: no speculation"}
    (tmp_path / "reference.npz").unlink()
    runs["fp8", "ours"]["complete"] = True
    assert "fp8: transformers" in judged_names(tmp_path, runs)


def judged_names(folder: Path, runs: dict[tuple[str, str], dict[str, Any]]) -> set[str]:
    for (variant, side), record in runs.items():
        (folder / f"parity-{variant}-{side}.json").write_text(json.dumps(record))
    checks = parity.judge(folder, GROUPS, (PLAIN, SPECULATIVE))
    return {check.name for check in checks if not check.passed}


# --- prompts


def test_successor_is_one_cycle() -> None:
    successor = successor_of(64, 0).tolist()
    assert sorted(successor) == list(range(64))
    token, seen = 0, set()
    while token not in seen:
        seen.add(token)
        token = successor[token]
    assert len(seen) == 64
    assert successor != successor_of(64, 1).tolist()


def test_prompts_walk_and_jump() -> None:
    tokens, successor = prompt(VOCAB, 2000, 3), successor_of(VOCAB, 0).tolist()
    assert tokens == prompt(VOCAB, 2000, 3) != prompt(VOCAB, 2000, 4)
    assert len(tokens) == 2000 and max(tokens) < VOCAB - 1
    walked = sum(successor[a] == b for a, b in zip(tokens, tokens[1:], strict=False))
    assert 0.7 < walked / 1999 < 0.8


def test_requests_round_trip(tmp_path: Path) -> None:
    assert read_requests(write_requests(GROUPS, tmp_path / "a" / "requests.json")) == GROUPS
    by_name = {group.name: group for group in GROUPS}
    assert by_name["p100-hit"].prompts == by_name["p100"].prompts
    assert [len(by_name[f"b{n}"].prompts) for n in (1, 3)] == [1, 3]
    assert by_name["p100-again"].prompts == by_name["p100"].prompts
    assert by_name["p100-again"].prompt_logprobs and by_name["p100-again"].repeats is None
    first = [g for g in GROUPS if g.repeats is None and not g.name.endswith("-again")]
    alone = [tuple(p) for group in first for p in group.prompts]
    assert len(set(alone)) == len(alone)


# --- the checkpoint, at small sizes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("real") / "small", device="cpu", **SMALL)


def test_checkpoint_holds_what_the_config_asks_for(checkpoint: Path) -> None:
    from reference.hf import read_tensors

    config = json.loads((checkpoint / "config.json").read_text())
    stored = read_tensors(checkpoint)
    kept = set(config["quantization_config"]["modules_to_not_convert"])
    wanted: dict[str, tuple[int, ...]] = {}
    for name, shape in checkpoint_tensors(Glm53Config.from_hf(config)):
        wanted[name] = shape
        fp8 = stored[name].dtype == torch.float8_e4m3fn
        assert fp8 == is_quantised(name) == (name.removesuffix(".weight") not in kept), name
        if fp8:
            wanted[name + "_scale_inv"] = scale_shape(shape)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == wanted
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys()
    for name in ("indexer.wk", "indexer.wq_b", "kv_b_proj"):
        assert stored[f"model.layers.0.self_attn.{name}.weight"].dtype == torch.float8_e4m3fn
    for name in ("model.layers.7.eh_proj.weight", "model.layers.3.mlp.gate.weight"):
        assert stored[name].dtype == torch.bfloat16
    bias = stored["model.layers.3.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32 and bias.std() > 0.01


def test_checkpoint_is_the_same_again(checkpoint: Path, tmp_path: Path) -> None:
    again = write_checkpoint(tmp_path / "again", device="cpu", **SMALL)
    for file in sorted(checkpoint.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_checkpoint_spares_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(Glm53Error, match="something else"):
        write_checkpoint(tmp_path, device="cpu", **SMALL)
    assert (tmp_path / "letter.txt").exists()


def test_reference_has_margins_and_chunks_change_nothing(checkpoint: Path) -> None:
    pytest.importorskip("transformers")
    from gpu.reference import load, logprobs

    model = load(checkpoint, "cpu")
    tokens = prompt(VOCAB, 300, 5)
    chunked = logprobs(model, tokens, chunk=64)
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    whole = scores[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    assert chunked.shape == (299,) and (chunked - whole).abs().max() < 1e-3
    best = scores.topk(2, dim=-1)
    follows = best.indices[:, 0] == successor_of(VOCAB, 0)[torch.tensor(tokens)]
    assert 0.6 < follows.float().mean() < 0.98, "drafts would always, or never, be right"
    margin = best.values[:, 0] - best.values[:, 1]
    assert (margin > 0.05).float().mean() > 0.95


def test_reference_refuses_a_checkpoint_with_a_gap(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from gpu.reference import load
    from reference.hf import read_tensors
    from safetensors.torch import save_file

    stored = read_tensors(checkpoint)
    del stored["model.layers.4.mlp.experts.3.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(AssertionError, match="gate_up_proj"):
        load(tmp_path, "cpu")


@pytest.mark.server
def test_our_engine_answers_as_the_reference(checkpoint: Path, tmp_path: Path) -> None:
    """The request code against a real engine, on a CPU: our classes, MTP, a prefix hit."""
    pytest.importorskip("sglang")
    from gpu.reference import load, logprobs

    groups = parity_requests(VOCAB, lengths=(100,), batches=(3,), batch_length=40, new_tokens=6)
    requests = write_requests(groups, tmp_path / "requests.json")
    options = {
        "device": "cpu",
        "dtype": "bfloat16",
        "max_total_tokens": 4096,
        "mem_fraction_static": 0.3,
        **parity.MTP,
    }
    out = tmp_path / "ours.json"
    arguments = ["ours", str(checkpoint), str(requests), str(out), json.dumps(options)]
    log = tmp_path / "log"
    ended = children.run(children.Child("ours", "gpu.generate", arguments, log, timeout=400))
    assert ended.ok, f"{ended.reason}\n{log.read_text()[-3000:]}"
    record = json.loads(out.read_text())
    answers = record["groups"]
    assert record["complete"] and record["status"]["serving"] == "ours"
    assert answers["p100-hit"][0]["cached"] == 64
    assert compare.accept_length(answers) > 1.2
    model = load(checkpoint, "cpu")
    wanted = [logprobs(model, tokens, 512).numpy() for tokens in groups[-1].prompts]
    off = compare.error(answers["b3"], wanted)
    assert off.count == sum(len(tokens) - 1 for tokens in groups[-1].prompts)
    assert off.mean < 0.1
    for given in answers["b3"]:
        assert len(given["tokens"]) == 6
        assert [best[0][1] for best in given["top"]] == given["tokens"]


# --- the recorder


def cached_keys(pages: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """(pages, keys, scales): a cache of index keys in SGLang's layout, and what it holds."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(pages * 64, 128, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(pages * 64, generator=generator) + 0.5
    rows = torch.empty(pages, 64 * 132, dtype=torch.uint8)
    rows[:, : 64 * 128] = keys.view(torch.uint8).view(pages, -1)
    rows[:, 64 * 128 :] = scales.view(torch.uint8).view(pages, -1)
    return rows, keys.float(), scales


def test_keys_and_scores_of_slots() -> None:
    pages, keys, scales = cached_keys(3)
    slots = torch.tensor([130, 3, 64, 191])
    found, factors = recorder.keys_of(pages, slots)
    assert torch.equal(found, keys[slots]) and torch.equal(factors, scales[slots])
    query, gates = torch.randn(4, 128), torch.randn(4)
    wanted = [
        sum(float(gates[h]) * max(0.0, float(query[h] @ keys[s])) for h in range(4))
        * float(scales[s])
        for s in slots
    ]
    scored = recorder.scores_of(query, gates, found, factors)
    assert torch.allclose(scored, torch.tensor(wanted), rtol=1e-4, atol=1e-4)


def test_figures_count_what_is_missed() -> None:
    scores = torch.arange(1000.0)
    best = torch.arange(800, 1000)
    exact = recorder.figures(scores, best, scores, topk=200)
    assert (exact["recall"], exact["needles"], exact["shortfall"]) == (1.0, 64, 0.0)
    assert exact["logit_error"] == 0 and exact["needle_positions"] == list(range(936, 1000))
    wrong = torch.cat([torch.arange(799, 999), torch.tensor([5])])[1:]
    missed = recorder.figures(scores, wrong, scores + 1, topk=200)
    assert missed["needles"] == 63 and missed["recall"] == 199 / 200
    assert missed["shortfall"] > 2 and missed["logit_error"] > 0
    tied = recorder.figures(torch.zeros(50), torch.arange(10), torch.zeros(50), topk=10)
    assert tied["recall"] == 1.0, "any ten of fifty equal scores are the best ten"


@pytest.mark.parametrize("ragged", [False, True])
def test_recorder_maps_selections_to_positions(tmp_path: Path, ragged: bool) -> None:
    """A request in scattered slots; the row's true best are selected, but one."""
    pages, keys, scales = cached_keys(4)
    slots = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:200]
    query, gates = torch.randn(2, 4, 128), torch.randn(2, 4)
    scores = recorder.scores_of(query[1], gates[1], keys[slots], scales[slots])
    positions = scores.topk(32).indices
    given = torch.cat([positions[:31], scores.argmin()[None]])
    offset = 7
    kept = recorder.Recorder(tmp_path, start=200)
    kept.query, kept.gates, kept.layer = query, gates, 6
    kept.batch = SimpleNamespace(
        seq_lens=torch.tensor([50, 200]),
        req_pool_indices=torch.tensor([0, 1]),
        forward_mode=SimpleNamespace(name="DECODE"),
    )
    table = torch.zeros(2, 300, dtype=torch.int32)
    table[1, :200] = slots.int()
    pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda layer: pages)
    kept.backend = SimpleNamespace(req_to_token=table, token_to_kv_pool=pool)
    metadata = SimpleNamespace(
        topk_transform_method=SimpleNamespace(name="RAGGED" if ragged else "PAGED"),
        attn_metadata=SimpleNamespace(topk_indices_offset=torch.tensor([0, offset])),
        get_seqlens_expanded=lambda: torch.tensor([50, 200]),
    )
    logits = torch.zeros(2, 300)
    logits[1, offset : offset + 200] = scores
    chosen = torch.full((2, 64), -1, dtype=torch.int32)
    chosen[1, :32] = (given + offset if ragged else slots[given]).int()
    kept._record(metadata, logits, 32, chosen, {"ks": torch.tensor([0, offset])})
    (line,) = long_context.rows_of(tmp_path)
    assert (line["layer"], line["mode"], line["length"]) == (6, "DECODE", 200)
    assert line["recall"] == 31 / 32 and line["distinct"] == 32
    assert line["logit_error"] < 1e-5
    with pytest.raises(ValueError, match="not the request's"):
        chosen[1, 0] = 9999
        kept._record(metadata, logits, 32, chosen, {"ks": torch.tensor([0, offset])})


def test_recorder_hooks_what_sglang_has() -> None:
    """Each target is a method of SGLang's source, with the parameters that the recorder names."""
    root = Path(pytest.importorskip("sglang").__file__).parent
    for target, method in recorder.HOOKS.items():
        module, owner, function = target.rsplit(".", 2)
        file = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
        tree = ast.parse(file.read_text())
        (owner_node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner)
        (node,) = (
            n for n in owner_node.body if isinstance(n, ast.FunctionDef) and n.name == function
        )
        names = [argument.arg for argument in node.args.args]
        if method == "transform":
            assert names == ["self", "logits", "topk", *recorder.TRANSFORM]
        if method == "metadata":
            assert names == ["self", "layer_id", "forward_batch"]
        assert callable(getattr(recorder.Recorder, method))


def row(**fields: Any) -> dict[str, Any]:
    made = {"layer": 0, "mode": "EXTEND", "recall": 1.0, "needles": 64, "logit_error": 1e-6}
    return {**made, **fields}


def test_long_context_rules_can_fail() -> None:
    rows = {
        side: [row(layer=layer, mode=mode) for layer in (0, 1) for mode in ("EXTEND", "DECODE")]
        for side in ("stock", "ours")
    }
    memory = {side: {"peak": 50.0} for side in rows}

    def failed(change: dict[str, Any] | None = None, side: str = "ours", **more: Any) -> list[str]:
        mine = copy.deepcopy(rows)
        mine[side][1].update(change or {})
        checks = long_context.judge(mine, more.get("memory", memory), (0, 1))
        return [check.name for check in checks if not check.passed]

    assert failed() == []
    assert failed({"needles": 63}) == ["decode rows: needles selected"]
    assert failed({"needles": 63}, side="stock") == []
    assert failed({"recall": 0.9}) == ["decode rows: recall of the true top-k"]
    assert failed({"logit_error": 0.5}) == ["decode rows: logits against FP32 scores"]
    assert failed({"layer": 2}) == ["decode rows"]
    assert failed({"error": "broke"}) == ["ours: recording"]
    assert failed(memory={"stock": {"peak": 50.0}, "ours": {"peak": 52.0}}) == ["peak memory, GiB"]
    assert failed(memory={"stock": {"peak": 50.0}, "ours": {}}) == ["peak memory, GiB"]


# --- backends, children, sanitizer


def test_every_backend_of_sglang_is_a_setting() -> None:
    """The list is complete: SGLang's own choices for the two options, each over both KV dtypes."""
    fields = pytest.importorskip("sglang.srt.arg_groups.fields.exec_")
    listed = backends.settings()
    names = [setting.name for setting in listed]
    assert len(set(names)) == len(names)
    source = Path(fields.__file__).read_text()
    for option in ("prefill", "decode"):
        body = source.split(f"dsa_{option}_backend: A[")[1].split("choices=[")[1].split("]")[0]
        choices = {part.strip().strip('"') for part in body.split(",") if part.strip()}
        for kv in ("bfloat16", "fp8_e4m3"):
            tried = {getattr(setting, option) for setting in listed if setting.kv == kv}
            missing = choices - tried
            # fa3 reads no FP8 cache; where FlashAttention 3 is missing it is not run at all
            assert missing <= ({"fa3"} if (kv, option) == ("fp8_e4m3", "decode") else set()), (
                kv,
                option,
                missing,
            )


def test_both_sides_must_do_the_same(tmp_path: Path) -> None:
    setting = backends.settings()[0]
    log = tmp_path / "log"
    log.write_text("noise\nValueError: not on this GPU\n")
    child = children.Child("x", "x", [], log)
    good, bad = children.Ended(child, 0, 1.0), children.Ended(child, 1, 1.0)
    assert not backends.judge_one(setting, good, bad, tmp_path).passed
    assert not backends.judge_one(setting, bad, good, tmp_path).passed
    assert not backends.judge_one(setting, bad, bad, tmp_path).passed, "it is known to run"
    other = next(s for s in backends.settings() if s.expected == backends.CONSTRUCTOR)
    late = children.Ended(child, None, 1.0)
    assert not backends.judge_one(other, bad, late, tmp_path).passed
    refused = backends.judge_one(other, bad, bad, tmp_path)
    assert refused.passed and "not on this GPU" in refused.detail
    for side, off in (("stock", 0.0), ("ours", 0.01)):
        groups = {"p": [answer([1, 2], prompt_logprobs=[-1.0 - off])]}
        file = tmp_path / f"backend-{setting.name}-{side}.json"
        status = {"serving": side, "stood_down": []}
        file.write_text(json.dumps({"groups": groups, "status": status}))
    assert backends.judge_one(setting, good, good, tmp_path).passed
    status = {"serving": "stock", "stood_down": [{"reason": "not ours"}]}
    file.write_text(json.dumps({"groups": groups, "status": status}))
    assert "stands down (not ours)" in backends.judge_one(setting, good, good, tmp_path).detail
    groups["p"][0]["prompt_logprobs"] = [-2.0]
    file.write_text(json.dumps({"groups": groups, "status": status}))
    assert not backends.judge_one(setting, good, good, tmp_path).passed


def test_the_side_that_serves_is_checked() -> None:
    ours = {"serving": "ours", "model": "m", "error": None, "stood_down": []}
    stock = {**ours, "serving": "stock"}
    down = {**stock, "stood_down": [{"reason": "x"}]}
    for block, side in ((ours, "ours"), (stock, "stock"), (ours, "default"), (down, "default")):
        check_side(block, side)
    for block, side in ((ours, "stock"), (stock, "ours"), (down, "ours"), (stock, "default")):
        with pytest.raises(AssertionError, match="serves"):
            check_side(block, side)


def test_children_tell_why_they_failed(tmp_path: Path) -> None:
    def child(*arguments: str, timeout: float = 60) -> children.Ended:
        return children.run(
            children.Child("c", arguments[0], arguments[1:], tmp_path / "log", timeout=timeout)
        )

    assert child("platform").ok
    broken = child("gpu.generate", "neither", "a", "b", "c", "{}")
    assert not broken.ok and "AssertionError: neither" in broken.reason
    late = child("http.server", "0", timeout=1.0)
    assert late.code is None and not late.ok
    assert children.side_environment("stock") == {"GLM53_SERVE": "stock"}


def test_failure_line_finds_the_first_error() -> None:
    log = "a warning\n[2026-01-01] ValueError: first\nTraceback\nRuntimeError: second\n"
    assert children.failure_line(log) == "ValueError: first"
    assert children.failure_line("sglang-glm53: refused; do this\n").startswith("sglang-glm53")
    assert children.failure_line("all is well\n") == ""


def test_sanitizer_covers_every_kernel() -> None:
    """Each kernel module brings its cases; without kernels the reason is told."""
    if not sanitizer.kernel_modules():
        assert "no GPU kernel" in sanitizer.skip_reason()
    for name in sanitizer.kernel_modules():
        source = Path(__import__("importlib").util.find_spec(name).origin).read_text()
        assert "def sanitizer_cases" in source, name


# --- the programs, with made-up engines


def pretend(monkeypatch: pytest.MonkeyPatch, module: Any, spoil: str | None = None) -> list[Any]:
    """Replace a program's children by ones that answer everything alike; `spoil` names one that
    fails. Returns the children asked for."""
    asked: list[Any] = []

    def fake(child: children.Child) -> children.Ended:
        asked.append(child)
        child.log.parent.mkdir(parents=True, exist_ok=True)
        child.log.write_text("RuntimeError: spoiled\n" if child.name == spoil else "")
        if child.module == "gpu.reference":
            groups = [g for g in read_requests(Path(child.arguments[1])) if g.prompt_logprobs]
            arrays = {
                f"{group.name}.{i}": np.zeros(len(tokens) - 1, dtype=np.float32)
                for group in groups
                for i, tokens in enumerate(group.prompts)
            }
            np.savez(child.arguments[2], **arrays)
        elif child.name != spoil:
            write_answers(child)
        return children.Ended(child, 1 if child.name == spoil else 0, 1.0)

    def fakes(given: Any, at_once: int, told: Any = None) -> list[children.Ended]:
        ended = [fake(child) for child in given]
        for one in ended if told is not None else ():
            told(one)
        return ended

    monkeypatch.setattr(module, "ensure_checkpoint", lambda folder, out, **sizes: VOCAB)
    monkeypatch.setattr(module, "run_all", fakes, raising=False)
    monkeypatch.setattr(module, "run", fake, raising=False)
    return asked


def write_answers(child: children.Child) -> None:
    side, _, requests, out, options = child.arguments
    assert (child.environment.get("GLM53_SERVE") == "stock") == (side == "stock")
    speculative = "speculative_algorithm" in json.loads(options)
    groups = {
        group.name: [
            answer(
                [1] * group.new_tokens,
                prompt_logprobs=[-0.01] * (len(tokens) - 1) if group.prompt_logprobs else [],
                cached=(len(tokens) - 1) // 64 * 64 if group.repeats else 0,
                verifies=group.new_tokens // 4 if speculative else 0,
            )
            for tokens in group.prompts
        ]
        for group in read_requests(Path(requests))
    }
    serving = "stock" if side == "stock" else "ours"
    status = {"serving": serving, "model": side, "pool": side, "stood_down": []}
    record = {"groups": groups, "complete": True, "status": status, "started_seconds": 1.0}
    Path(out).write_text(json.dumps(record))


def test_parity_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = pretend(monkeypatch, parity)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    place = ["--checkpoint", str(checkpoint)]
    assert parity.main([str(tmp_path), "--only", "fp8", "fp8-mtp", *place]) == 0
    names = [child.name for child in asked]
    assert sorted(names) == sorted(
        ["fp8-stock", "fp8-ours", "fp8-mtp-stock", "fp8-mtp-ours", "transformers"]
    )
    written = json.loads((tmp_path / "parity.json").read_text())
    assert written["runs"]["fp8-mtp-ours"]["accept_length"] == 4.0
    assert parity.main([str(tmp_path), "--only", "fp8", "fp8-mtp", "--judge"]) == 0
    assert parity.main([str(tmp_path), "--judge"]) == 1, "bf16 was not run"
    asked.clear()
    assert parity.main([str(tmp_path), "--only", "fp8", *place]) == 0
    assert len(asked) == 2, "the reference is computed once"
    os.utime(checkpoint / "config.json", (time.time() + 60,) * 2)  # another checkpoint
    assert parity.main([str(tmp_path), "--only", "fp8", *place]) == 0
    assert len(asked) == 5


def test_parity_program_fails_with_an_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, parity, spoil="fp8-ours")
    assert parity.main([str(tmp_path), "--only", "fp8"]) == 1
    checks = json.loads((tmp_path / "parity.json").read_text())["checks"]
    assert "fp8-ours finishes: RuntimeError: spoiled" in compare.failures(checks)


@pytest.mark.parametrize("spoil", [None, "fp8.flashmla_kv.flashmla_kv-ours"])
def test_backends_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spoil: str | None
) -> None:
    asked = pretend(monkeypatch, backends, spoil)
    assert backends.main([str(tmp_path), "--quick"]) == (1 if spoil else 0)
    assert len(asked) == len({child.name for child in asked}) >= 16
    written = json.loads((tmp_path / "backends.json").read_text())
    checks = written["checks"]
    tried = {child.name.rpartition("-")[0] for child in asked}
    assert tried.isdisjoint(written["not_run"])
    assert len(checks) * 2 == len(asked)
    assert len(compare.failures(checks)) == (1 if spoil else 0)


@pytest.mark.parametrize("needles", [64, 10])
def test_long_context_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, needles: int
) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"indexer_types": ["full", "shared"]}))
    pretend(monkeypatch, long_context)
    inner = long_context.run

    def run(child: children.Child) -> children.Ended:
        folder = Path(child.environment["GLM53_RECORD_DIR"])
        assert (Path(child.environment["PYTHONPATH"]) / "glm53_recorder.py").exists()
        assert child.environment["GLM53_RECORD_FROM"] == "199"
        found = needles if "ours" in child.name else 64
        lines = [row(mode=mode, needles=found) for mode in ("EXTEND", "DECODE")]
        (folder / "rows.1.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        (folder / "memory.1.json").write_text(json.dumps({"peak": 2**32}))
        return inner(child)

    monkeypatch.setattr(long_context, "run", run)
    arguments = [str(tmp_path / "out"), "--tokens", "200", "--checkpoint", str(checkpoint)]
    assert long_context.main(arguments) == (0 if needles == 64 else 1)
    written = json.loads((tmp_path / "out" / "long.json").read_text())
    assert written["memory"]["ours"]["peak"] == 4.0
    assert len(compare.failures(written["checks"])) == (0 if needles == 64 else 2)


def test_sanitizer_program_tells_why_it_does_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitizer, "kernel_modules", lambda: [])
    assert sanitizer.main([str(tmp_path)]) == 0
    assert "no GPU kernel of its own" in capsys.readouterr().out
