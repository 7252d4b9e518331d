"""Another architecture starts and answers as without us: SGLang's class, pool and backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .harness import Server

pytestmark = pytest.mark.server

VOCABULARY = 512


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, with weights large enough for clear greedy tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="t1", eos_token="t2", unk_token="t0"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory):
    """No option of ours: SGLang's defaults for a machine without a GPU."""
    running = Server(
        llama,
        ("--dtype", "float32", "--max-total-tokens", "8192"),
        tmp_path_factory.mktemp("server"),
        probe=False,
    )
    running.start()
    yield running
    try:
        assert running.stop() == 0
    finally:
        running.kill()


def test_tokens_and_logprobs_equal_transformers(server: Server, llama: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    for length in (1, 17, 100):
        prompt = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        (answer,) = server.generate([prompt], 16)
        ids = torch.tensor([prompt])
        for _ in range(16):
            with torch.no_grad():
                logits = model(ids).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        assert answer.tokens == ids[0, length:].tolist()
        with torch.no_grad():
            expected = model(ids).logits.log_softmax(-1)[0]
        for position, value in answer.logprobs.items():
            if position > 0:
                target = float(expected[position - 1, ids[0, position]])
                assert value == pytest.approx(target, abs=1e-4), position


def test_nothing_of_ours_serves_it(server: Server) -> None:
    block = server.get("/server_info")["internal_states"][0]["glm53"]
    assert block["serving"] == "other model"
    for part in ("model", "pool", "backend"):
        assert block[part].startswith("sglang.srt."), block
    assert block["stood_down"] == [] and block["error"] is None
