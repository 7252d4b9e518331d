"""What the trainer runs is what transformers defines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference.hf import Reference
from reference.mtp import ReferenceMtp

from sglang_glm53.tiny import make_checkpoint

from . import model as training
from .export import checkpoint_tensors, make_model, write_checkpoint
from .indexer import Selection
from .model import Miniature, Watch

LENGTH = 300  # more than twice what a selection holds


@pytest.fixture(scope="module")
def model() -> Miniature:
    """First weights, made less regular, as a bf16 checkpoint stores them."""
    torch.set_num_threads(1)
    made = make_model(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1 and "k_norm" not in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16())
    return made.eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 617, (2, LENGTH), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def reference(model: Miniature, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The exported checkpoint in transformers."""
    folder = tmp_path_factory.mktemp("miniature")
    write_checkpoint(model, folder)
    return Reference(folder)


@torch.no_grad()
def test_sparse_forward_is_transformers(
    model: Miniature, tokens: torch.Tensor, reference: Reference
) -> None:
    """Up to the first row whose selection hangs on the last bits."""
    ours = model(tokens, sparse=True)
    for sequence, hidden in zip(tokens, ours, strict=True):
        trace = reference.trace(sequence.tolist())
        close = (trace.gap < 3e-6).nonzero()
        rows = int(close[0]) if len(close) else LENGTH
        assert rows > 180
        assert (hidden - trace.hidden)[:rows].abs().max() < 3e-4
    assert (model(tokens) - ours)[:, 128:].abs().max() > 1e-2, "the selection changes nothing"


@torch.no_grad()
def test_dense_forward_is_transformers(
    model: Miniature, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in model.layers:
        if layer.self_attn.indexer is not None:
            monkeypatch.setattr(layer.self_attn.indexer, "index_topk", LENGTH)
    theirs = model.target.model(input_ids=tokens, use_cache=False).last_hidden_state
    assert (model(tokens) - theirs).abs().max() < 2e-4


@torch.no_grad()
def test_draft_is_the_reference(
    model: Miniature, tokens: torch.Tensor, reference: Reference
) -> None:
    """The exported checkpoint, read by the reference, drafts what the trainer's forward drafts."""
    mtp = ReferenceMtp(reference)
    sequence = tokens[0].tolist()
    hidden = reference.trace(sequence).hidden
    logits, _, _ = mtp.run(sequence[1:], hidden[:-1])
    drafts = model.draft(tokens[:1], hidden[None], 5, sparse=True, greedy=True)
    ours = model.logits(drafts[0])[0, :-1]
    assert (ours - logits).abs().max() < 5e-4
    proposal = mtp.propose(sequence, hidden, 5, share=True)
    assert proposal.margin > 1e-3 and proposal.gap > 1e-5
    row = LENGTH - 2
    assert [int(model.logits(d)[0, row].argmax()) for d in drafts] == proposal.tokens


@torch.no_grad()
def test_window(model: Miniature) -> None:
    """Blocks of a window give what a mask over everything gives."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(2, 3, 50, 8, generator=generator) for _ in range(3))
    distance = torch.arange(50)[:, None] - torch.arange(50)[None]
    mask = (distance >= 0) & (distance < 16)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    assert (training.local_attention(q, k, v, 16, 0.3) - whole).abs().max() < 1e-5


@torch.no_grad()
def test_watched_attention_is_transformers(
    model: Miniature, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the indexers learn from: attention of transformers, mean over heads and layers."""
    short = tokens[:, :64]
    rows = torch.tensor([[5, 60], [0, 33]])
    watch = Watch(rows)
    model(short, watch=watch)
    output = model.target.model(input_ids=short, use_cache=False, output_attentions=True)
    weights = torch.stack(output.attentions).mean(2)  # [layers, B, S, S]
    for full, layers in training.GROUPS.items():
        expected = torch.stack([weights[i] for i in layers]).mean(0)
        expected = expected.gather(1, rows[..., None].expand(-1, -1, 64))
        assert (watch.attention[full] - expected).abs().max() < 1e-5


@torch.no_grad()
def test_faults_change_the_output(model: Miniature, tokens: torch.Tensor) -> None:
    """Each planted fault is one: hidden states move."""
    healthy = model(tokens, sparse=True)
    for fault in (
        Selection(neox=True),
        Selection(first_set_everywhere=True),
        Selection(shift=64),
        Selection(topk=64),
        Selection(gate_bias=False),
    ):
        assert (model(tokens, sparse=True, how=fault) - healthy).abs().max() > 1e-3, fault


def test_checkpoint_names(model: Miniature, tmp_path: Path) -> None:
    """The names and shapes that the tiny checkpoint of the same sizes has."""
    from reference.hf import read_tensors

    make_checkpoint(
        tmp_path, layers=4, experts=4, heads=4, index_heads=32, index_topk=128, vocab=640
    )
    tiny = {name: tuple(t.shape) for name, t in read_tensors(tmp_path).items()}
    ours = {name: tuple(t.shape) for name, t in checkpoint_tensors(model).items()}
    # The tiny scheme has two dense layers and three full ones first.
    other = ("layers.1.mlp", "layers.2.self_attn.indexer")
    assert {n: s for n, s in ours.items() if not any(o in n for o in other)} == {
        n: s for n, s in tiny.items() if not any(o in n for o in other)
    }
    moe = {n.replace("layers.2", "layers.1") for n in tiny if "layers.2.mlp" in n}
    assert {n for n in ours if "layers.1.mlp" in n} == moe
    assert not any("layers.2.self_attn.indexer" in name for name in ours)
