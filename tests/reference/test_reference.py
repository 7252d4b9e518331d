"""The reference against itself: a wrong oracle would make every other test worthless."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .hf import Reference, dequantised_copy, read_tensors, stable_topk_mask, topk_gap
from .mtp import ReferenceMtp

K = 16
LENGTH = 50


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path]) -> Reference:
    torch.set_num_threads(1)
    return Reference(tiny_checkpoint(layers=8, experts=4, index_topk=K))


@pytest.fixture(scope="module")
def tokens(model: Reference) -> list[int]:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, model.config.vocab_size, (LENGTH,), generator=generator).tolist()


def test_chunks_equal_the_whole(model: Reference, tokens: list[int]) -> None:
    """Through transformers' cache in chunks, and as one forward: the same greedy tokens."""
    whole = model.generate(tokens, 8)
    assert whole == model.generate(tokens, 8, chunk=K)
    trace = model.trace(tokens + whole)
    assert trace.logits[LENGTH - 1 : -1].argmax(-1).tolist() == whole


def test_sets(model: Reference, tokens: list[int]) -> None:
    """Full layers select at most k visible positions; shared layers use the set above."""
    trace = model.trace(tokens)
    assert model.full_layers == [0, 1, 2, 6]
    rows = torch.arange(1, LENGTH + 1)
    for layer in range(model.config.num_hidden_layers):
        used = trace.used[layer]
        assert torch.equal(used, trace.selected[model.layer_above(layer)])
        assert torch.equal(used.sum(1), rows.clamp(max=K))
        assert not used.triu(1).any()
    different = trace.selected[0] != trace.selected[6]
    assert different.any(), "all layers select the same: the tiny model tests nothing here"


def test_the_selection_matters(model: Reference, tokens: list[int]) -> None:
    """A model with everything selected has other log-probabilities."""
    wide = Reference(model.path)
    for layer in wide.model.model.layers:
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.index_topk = LENGTH
    sparse, dense = model.trace(tokens).logprobs, wide.trace(tokens).logprobs
    assert (sparse - dense).abs()[: K - 1].max() < 1e-4
    assert (sparse - dense).abs()[K:].max() > 1e-2


def test_norm_eps_is_the_configs(model: Reference) -> None:
    for layer in model.model.model.layers:
        assert layer.self_attn.q_a_layernorm.variance_epsilon == 1e-5
        assert layer.self_attn.kv_a_layernorm.variance_epsilon == 1e-5


def test_ties_go_to_the_smaller_position() -> None:
    scores = torch.tensor([[5.0, 0, 0, 0], [5, 5, 0, 0], [1, 3, 1, 0], [2, 1, 1, 1]])
    mask = stable_topk_mask(scores, 2)
    assert mask.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, False, False],
        [True, True, False, False],
    ]
    gap = topk_gap(scores, 2)
    assert gap[:2].isinf().all() and gap[2] == 0 and gap[3] == 0


def test_mtp_with_sharing_reads_the_seed_only(model: Reference, tokens: list[int]) -> None:
    """With sharing, draft steps attend the last committed row's set; without, their own."""
    mtp = ReferenceMtp(model)
    hidden = model.trace(tokens).hidden
    shared = mtp.propose(tokens, hidden, 3, share=True)
    assert shared.tokens == mtp.propose(tokens, hidden, 3, share=True).tokens
    own = mtp.propose(tokens, hidden, 3, share=False)
    assert shared.tokens[0] == own.tokens[0]
    # what one more row computes depends on the set it is given
    inputs = [*tokens[1:], shared.tokens[0]]
    states = torch.cat((hidden[: LENGTH - 1], hidden[-1:]))
    free, _, _ = mtp.run(inputs, states)
    forced, _, _ = mtp.run(inputs, states, {LENGTH - 1: torch.tensor([0])})
    assert torch.equal(free[:-1], forced[:-1])
    assert (free[-1] - forced[-1]).abs().max() > 1e-3


def test_dequantised_copy(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Block scales are applied, nothing is lost, and transformers loads the copy."""
    source = tiny_checkpoint(layers=3, experts=2, fp8=True)
    stored = read_tensors(source)
    scaled = [name for name in stored if name + "_scale_inv" in stored]
    assert scaled
    plain = read_tensors(dequantised_copy(source, tmp_path / "plain"))
    assert plain.keys() == {name for name in stored if not name.endswith("_scale_inv")}
    name = scaled[0]
    first_block = stored[name][:128, :128].float() * stored[name + "_scale_inv"][0, 0]
    assert torch.equal(plain[name][:128, :128], first_block)
    assert Reference(tmp_path / "plain").trace([3, 1, 4, 1, 5]).logprobs.isfinite().all()
