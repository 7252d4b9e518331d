"""The torch DSA backend against one-row-at-a-time references, in every forward mode."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from dsa_fakes import (  # noqa: F401
    World,
    both_modes,
    reference_attention,
    reference_topk,
    single_rank,
)

from sglang_glm53.backends import torch_dsa
from sglang_glm53.backends.torch_dsa import TorchDsaBackend, TorchDsaMultiStepBackend, top_positions
from sglang_glm53.errors import Glm53Error

INDEX_HEADS = 4

# mode, lengths of the requests, how many of the last tokens are the rows
CASES = {
    "whole prefill": ("EXTEND", [150], [150]),
    "ragged prefill": ("EXTEND", [70, 3, 130, 1], [70, 3, 130, 1]),
    "prefill with prefix": ("EXTEND", [200, 90, 65], [50, 1, 64]),
    "mixed": ("MIXED", [100, 40, 129], [60, 1, 1]),
    "decode": ("DECODE", [5, 64, 65, 200], [1, 1, 1, 1]),
    "verify": ("TARGET_VERIFY", [140, 9, 70], [6, 6, 6]),
    "draft extend": ("DRAFT_EXTEND_V2", [140, 9, 70], [4, 4, 4]),
    "draft decode": ("DRAFT DECODE", [140, 9, 70], [1, 1, 1]),
}


def build(world: World, mode: str, new: list[int], padded: int = 0):
    draft = mode == "DRAFT DECODE"
    batch = world.batch(mode.split()[-1], new, padded=padded, draft_decode=draft)
    world.backend.init_forward_metadata(batch)
    return batch


def inputs(world: World, rows: int):
    return (
        world.normal(rows, INDEX_HEADS, 128),
        world.normal(rows, INDEX_HEADS),
        world.normal(rows, world.heads, world.rank),
        world.normal(rows, world.heads, world.rope),
    )


def stored(world: World, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index keys and latents of a request as the cache gives them back."""
    slots = world.table[world.lines[request], : world.keys[request].shape[0]]
    latents = world.pool.get_mla_kv_buffer(SimpleNamespace(layer_id=0), slots, torch.float32)
    return world.pool.get_index_k(0, slots), torch.cat(latents, dim=-1).squeeze(1)


def check(world: World, mode: str, new: list[int], padded: int) -> None:
    batch = build(world, mode, new, padded)
    rows = world.rows(new)
    q, gates, q_nope, q_rope = inputs(world, len(rows) + padded)
    chosen = world.backend.select_topk(0, q, gates, batch)
    out = world.backend.forward(
        q_nope, None, None, world.layer, batch, q_rope=q_rope, topk_indices=chosen
    )
    assert chosen.dtype == torch.int32
    assert chosen.shape == (len(rows) + padded, world.index_topk)
    assert out.shape == (len(rows) + padded, world.heads * world.rank)
    for row, (request, position) in enumerate(rows):
        keys, latents = stored(world, request)
        expected = reference_topk(q[row], gates[row], keys, position + 1, world.index_topk)
        padding = [-1] * (world.index_topk - len(expected))
        assert chosen[row].tolist() == expected + padding
        attended = reference_attention(
            q_nope[row], q_rope[row], latents, expected, world.layer.scaling
        )
        torch.testing.assert_close(
            out[row].view(world.heads, -1).double(), attended, rtol=2e-5, atol=2e-5
        )
    assert (chosen[len(rows) :] == -1).all()
    assert (out[len(rows) :] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["exact", "real"])
@pytest.mark.parametrize("case", CASES, ids=lambda name: name.replace(" ", "-"))
def test_selection_and_attention(case: str, dtype: torch.dtype) -> None:
    mode, lengths, new = CASES[case]
    check(World(lengths, dtype=dtype), mode, new, padded=0)


@pytest.mark.parametrize(
    ("case", "padded"),
    [("prefill with prefix", 3), ("decode", 4), ("verify", 12), ("draft extend", 8)],
)
def test_padded_rows_give_nothing(case: str, padded: int) -> None:
    mode, lengths, new = CASES[case]
    check(World(lengths), mode, new, padded)


@pytest.mark.parametrize("ordered", [True, False], ids=["adjacent pages", "scattered pages"])
def test_pages_in_any_order(ordered: bool) -> None:
    check(World([300, 200], ordered=ordered), "EXTEND", [40, 1], padded=0)


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for values in (1 << 23, 5_000, 1):
        monkeypatch.setattr(torch_dsa, "SCORE_VALUES", values)
        monkeypatch.setattr(torch_dsa, "LATENT_VALUES", values)
        world = World([90, 70])
        batch = build(world, "EXTEND", [90, 33])
        q, gates, q_nope, q_rope = inputs(world, 123)
        chosen = world.backend.select_topk(0, q, gates, batch)
        out = world.backend.forward_extend(
            q_nope, None, None, world.layer, batch, q_rope=q_rope, topk_indices=chosen
        )
        results.append((chosen, out))
    for chosen, out in results[1:]:
        assert torch.equal(chosen, results[0][0])
        torch.testing.assert_close(out, results[0][1], rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_smaller_position() -> None:
    # Few distinct values, so that the boundary is tied in almost every row.
    random = torch.Generator().manual_seed(3)
    for tokens in (9, 10, 64, 500):
        score = torch.randint(0, 4, (200, tokens), generator=random).float()
        score[:, -1] = 0.0
        chosen = top_positions(score, 8)
        for row in range(score.shape[0]):
            values = score[row].tolist()
            order = sorted(range(tokens), key=lambda s, v=values: -v[s])
            assert chosen[row].tolist() == sorted(order[:8])


def test_equal_keys_through_the_cache() -> None:
    world = World([120], index_topk=8)
    same = world.keys[0][:1].expand(120, 128)
    world.pool.set_index_k(0, world.table[world.lines[0], :120], same)
    batch = build(world, "EXTEND", [120])
    q, gates, *_ = inputs(world, 120)
    chosen = world.backend.select_topk(0, q, gates, batch)
    for row in range(120):
        expected = list(range(min(8, row + 1)))
        assert chosen[row].tolist() == expected + [-1] * (8 - len(expected))


def test_unwritten_slots_are_never_chosen() -> None:
    # Whatever lies in the cache behind a row's own position must not matter.
    world = World([100, 40])
    batch = build(world, "TARGET_VERIFY", [4, 4])
    q, gates, q_nope, q_rope = inputs(world, 8)
    before = world.backend.select_topk(0, q, gates, batch)
    for line, length in zip(world.lines, world.lengths, strict=True):
        behind = world.table[line, length : length + 10]
        world.pool.set_index_k(0, behind, torch.full((10, 128), 1e4))
        world.write_latents(behind, torch.full((10, world.rank + world.rope), float("nan")))
    after = world.backend.select_topk(0, q, gates, batch)
    assert torch.equal(before, after)
    out = world.backend.forward(
        q_nope, None, None, world.layer, batch, q_rope=q_rope, topk_indices=after
    )
    assert out.isfinite().all()


def test_attention_writes_the_new_latents() -> None:
    world = World([100, 70])
    batch = build(world, "DECODE", [1, 1])
    _, _, q_nope, q_rope = inputs(world, 2)
    new = world.normal(2, 1, world.rank + world.rope)
    chosen = torch.full((2, world.index_topk), -1, dtype=torch.int32)
    chosen[:, 0] = torch.tensor([99, 69])
    k, k_rope = new.split([world.rank, world.rope], dim=-1)
    out = world.backend.forward(
        q_nope, k, k, world.layer, batch, q_rope=q_rope, k_rope=k_rope, topk_indices=chosen
    )
    # One selected token: attention returns its latent.
    torch.testing.assert_close(out.view(2, world.heads, -1), k.expand(2, world.heads, -1))
    for request, position in ((0, 99), (1, 69)):
        torch.testing.assert_close(stored(world, request)[1][position], new[request, 0])


def test_index_keys_are_stored_at_the_rows_slots() -> None:
    world = World([100, 70])
    batch = build(world, "TARGET_VERIFY", [3, 3], padded=3)
    key = world.normal(9, 128)
    world.backend.store_index_k(0, key, batch)
    for row, (request, position) in enumerate(world.rows([3, 3])):
        torch.testing.assert_close(stored(world, request)[0][position], key[row])


def test_a_shared_selection_is_used_again_and_a_new_one_is_not() -> None:
    world = World([150])
    batch = build(world, "EXTEND", [20])
    q, gates, q_nope, q_rope = inputs(world, 20)
    chosen = world.backend.select_topk(0, q, gates, batch)

    def attend(indices: torch.Tensor) -> torch.Tensor:
        return world.backend.forward(
            q_nope, None, None, world.layer, batch, q_rope=q_rope, topk_indices=indices
        )

    first = attend(chosen)
    torch.testing.assert_close(attend(chosen), first)
    other = (chosen - 1).clamp_min(0)
    assert not torch.allclose(attend(other), first)
    torch.testing.assert_close(attend(chosen.clone()), first)


def test_selections_of_another_batch_are_refused() -> None:
    world = World([150])
    batch = build(world, "EXTEND", [20])
    *_, q_nope, q_rope = inputs(world, 20)
    with pytest.raises(Glm53Error, match="20 rows"):
        world.backend.forward(
            q_nope,
            None,
            None,
            world.layer,
            batch,
            q_rope=q_rope,
            topk_indices=torch.zeros(19, 8, dtype=torch.int32),
        )


# Dense attention in expanded form


def test_when_the_expanded_form_is_offered() -> None:
    def offered(lengths: list[int], mode: str, new: list[int], **options) -> bool:
        world = World(lengths, index_topk=64, room=16)
        batch = world.batch(mode, new, **options)
        world.backend.init_forward_metadata(batch)
        return world.backend.use_mha

    assert offered([64, 3], "EXTEND", [64, 3])
    assert offered([64, 30], "EXTEND", [4, 2])
    assert not offered([65, 3], "EXTEND", [65, 3])
    assert not offered([65, 3], "EXTEND", [1, 3])
    assert not offered([30, 3], "DECODE", [1, 1])
    assert not offered([30, 9], "TARGET_VERIFY", [4, 4])
    assert not offered([30, 9], "DRAFT_EXTEND_V2", [4, 4])
    assert not offered([30, 9], "EXTEND", [4, 4], padded=2)


@pytest.mark.parametrize("new", [[60, 1, 17], [20, 1, 5]], ids=["whole", "prefix"])
def test_expanded_attention(new: list[int]) -> None:
    world = World([60, 1, 17], index_topk=64)
    batch = build(world, "EXTEND", new)
    slots = world.backend.mha_kv_slots(batch)
    assert slots.dtype == torch.int64
    expected = [world.table[line, :n] for line, n in zip(world.lines, world.lengths, strict=True)]
    assert slots.tolist() == torch.cat(expected).tolist()

    heads, dim, v_dim = 3, 24, 16
    layer = SimpleNamespace(tp_q_head_num=heads, qk_head_dim=dim, v_head_dim=v_dim, scaling=0.2)
    q = world.normal(sum(new), heads, dim)
    k = world.normal(sum(world.lengths), heads, dim)
    v = world.normal(sum(world.lengths), heads, v_dim)
    out = world.backend.forward(q, k, v, layer, batch).view(-1, heads, v_dim)
    starts = [0, 60, 61]
    for row, (request, position) in enumerate(world.rows(new)):
        seen = slice(starts[request], starts[request] + position + 1)
        for head in range(heads):
            weights = (k[seen, head].double() @ q[row, head].double() * 0.2).softmax(dim=0)
            torch.testing.assert_close(
                out[row, head].double(), weights @ v[seen, head].double(), rtol=2e-5, atol=2e-5
            )


# Batches that SGLang changes after planning


def test_padding_after_planning() -> None:
    world = World([140, 70])
    world.backend.init_forward_metadata(world.batch("DRAFT_EXTEND_V2", [4, 4]))
    batch = world.batch("DRAFT_EXTEND_V2", [4, 4], padded=4)
    q, gates, *_ = inputs(world, 12)
    chosen = world.backend.select_topk(0, q, gates, batch)
    assert (chosen[:8] >= 0).all() and (chosen[8:] == -1).all()


def test_draft_steps_see_their_own_token() -> None:
    world = World([140, 70], room=16)
    steps = TorchDsaMultiStepBackend(world.runner, topk=1, speculative_num_steps=4)
    assert len(steps.attn_backends) == 3

    def check_step(backend: TorchDsaBackend, seen: list[int]) -> None:
        # The last visible token scores best, so that missing it cannot go unnoticed.
        q = torch.stack(
            [keys[n - 1].expand(2, -1) for keys, n in zip(world.keys, seen, strict=True)]
        )
        gates = torch.ones(2, 2)
        chosen = backend.select_topk(0, q, gates, batch)
        for row, last in enumerate(seen):
            expected = reference_topk(q[row], gates[row], world.keys[row], last, 8)
            assert expected[-1] == last - 1
            assert chosen[row].tolist() == expected

    # SGLang plans once, then moves the same tensor of positions on.
    batch = world.batch("DECODE", [1, 1], draft_decode=True)
    steps.init_forward_metadata(batch)
    for step, backend in enumerate(steps.attn_backends):
        check_step(backend, [length + step for length in world.lengths])
        batch.positions.add_(1)
    # The next round of drafts, three tokens on, must not see the rows of this one.
    steps.init_forward_metadata(batch)
    check_step(steps.attn_backends[0], [length + 3 for length in world.lengths])


def test_a_batch_that_changes_its_mode_is_planned_again() -> None:
    # SGLang turns a decode batch into an extend of one token a request where another rank of a
    # data-parallel group extends, and an empty one into padding.
    world = World([140, 70])
    batch = build(world, "DECODE", [1, 1])
    batch.forward_mode = torch_dsa_mode("EXTEND")
    batch.positions = torch.zeros(4, dtype=torch.int64)
    batch.req_pool_indices = torch.zeros(1, dtype=torch.int64)
    batch.extend_seq_lens_cpu = [4]
    batch._original_num_tokens = 0
    q, gates, *_ = inputs(world, 4)
    assert (world.backend.select_topk(0, q, gates, batch) == -1).all()


def test_draft_trees_are_refused() -> None:
    with pytest.raises(Glm53Error, match="chain drafts only"):
        TorchDsaMultiStepBackend(World([9]).runner, topk=2, speculative_num_steps=3)


@pytest.mark.parametrize("rows", [0, 4])
def test_idle_batches(rows: int) -> None:
    world = World([100])
    # Rows of the last forward pass must not leak into the idle one.
    build(world, "DECODE", [1])
    batch = SimpleNamespace(
        forward_mode=torch_dsa_mode("IDLE"),
        positions=torch.zeros(rows, dtype=torch.int64),
        req_pool_indices=torch.zeros(rows, dtype=torch.int64),
        out_cache_loc=torch.zeros(rows, dtype=torch.int64),
        spec_info=None,
        _original_num_tokens=0,
    )
    q, gates, q_nope, q_rope = inputs(world, rows)
    chosen = world.backend.select_topk(0, q, gates, batch)
    assert chosen.shape == (rows, 8) and (chosen == -1).all()
    world.backend.store_index_k(0, world.normal(rows, 128), batch)
    assert world.backend.mha_kv_slots(batch).numel() == 0
    out = world.backend.forward(
        q_nope, None, None, world.layer, batch, q_rope=q_rope, topk_indices=chosen
    )
    assert out.shape == (rows, world.heads * world.rank) and (out == 0).all()


def torch_dsa_mode(name: str):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode[name]


def test_a_row_that_selects_nothing_gives_zeros() -> None:
    world = World([100, 50])
    batch = build(world, "DECODE", [1, 1])
    *_, q_nope, q_rope = inputs(world, 2)
    chosen = torch.full((2, 8), -1, dtype=torch.int32)
    chosen[1, :3] = torch.tensor([0, 20, 49])
    out = world.backend.forward(
        q_nope, None, None, world.layer, batch, q_rope=q_rope, topk_indices=chosen
    )
    assert (out[0] == 0).all()
    broken = q_nope.clone()
    broken[1, 0, 0] = float("nan")
    assert (
        world.backend.forward(
            broken, None, None, world.layer, batch, q_rope=q_rope, topk_indices=chosen
        )[1]
        .isnan()
        .any()
    )
    expected = reference_attention(
        q_nope[1], q_rope[1], world.latents[1], [0, 20, 49], world.layer.scaling
    )
    torch.testing.assert_close(
        out[1].view(world.heads, -1).double(), expected, rtol=2e-5, atol=2e-5
    )


def test_large_prefill_stays_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2,000 rows by 2,000 tokens by 4 heads would be 16 M values in one piece.
    monkeypatch.setattr(torch_dsa, "SCORE_VALUES", 1 << 20)
    monkeypatch.setattr(torch_dsa, "LATENT_VALUES", 1 << 20)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    world = World([2000], index_topk=16)
    batch = build(world, "EXTEND", [2000])
    q, gates, q_nope, q_rope = inputs(world, 2000)
    with Watch():
        chosen = world.backend.select_topk(0, q, gates, batch)
        world.backend.forward(
            q_nope, None, None, world.layer, batch, q_rope=q_rope, topk_indices=chosen
        )
    inputs_and_cache = max(q_nope.numel(), world.pool.kv_buffer[0].numel())
    assert largest <= max(1 << 20, inputs_and_cache)


def test_backend_answers_what_sglang_asks() -> None:
    backend = World([5]).backend
    assert isinstance(backend, TorchDsaBackend)
    assert backend.get_cpu_graph_seq_len_fill_value() == 1
    assert not backend.support_triton()
