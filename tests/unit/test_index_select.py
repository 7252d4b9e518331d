"""Scores and selection on SGLang's kernels: rows, pages, blocks and padding, with torch in the
place of DeepGEMM's two kernels and of SGLang's top-k."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dsa_fakes import PAGE, World, both_modes, reference_topk, single_rank  # noqa: F401
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_glm53.kernels.fp8 import dequantise_blocks
from sglang_glm53.layers import index_select
from sglang_glm53.memory.quantise import fp8_values

HEADS = 4
TOPK = 8


class Metadata:
    """What the attention backend tells the indexer about one pass, and its selection."""

    def __init__(self, world: World, new: list[int], *, offsets: bool = False) -> None:
        self.world, self.new = world, new
        rows = world.rows(new)
        self.rows = rows
        ends = torch.tensor([position + 1 for _, position in rows], dtype=torch.int32)
        requests = torch.tensor([request for request, _ in rows])
        starts = torch.tensor([0, *world.lengths]).cumsum(0)[:-1].int()
        self.expanded = ends
        self.requests = requests
        self.table = world.table[world.lines][:, ::PAGE] // PAGE
        self.first = starts[requests]
        self.paged_mqa_ctx_lens_2d = ends.view(-1, 1)
        self.paged_mqa_schedule_metadata = "planned"
        self.attn_metadata = SimpleNamespace(
            topk_indices_offset=self.first if offsets else None,
        )
        self.transforms: list[int] = []  # rows of each call

    def get_seqlens_expanded(self) -> torch.Tensor:
        return self.expanded

    def get_dsa_extend_len_cpu(self) -> list[int]:
        return self.new

    def get_page_table_64(self) -> torch.Tensor:
        """A line for each row, as in verify."""
        return self.table[self.requests]

    def get_logical_page_table(self) -> torch.Tensor:
        return self.table

    def get_indexer_kvcache_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first, self.first + self.expanded

    def get_indexer_seq_len_cpu(self) -> torch.Tensor:
        return torch.tensor(self.world.lengths)

    def get_indexer_seq_len(self) -> torch.Tensor:
        return torch.tensor(self.world.lengths, dtype=torch.int32)

    def get_token_to_batch_idx(self) -> torch.Tensor:
        return self.requests

    def topk_transform(
        self,
        scores: torch.Tensor,
        topk: int,
        ks: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        ke_offset: torch.Tensor | None = None,
        batch_idx_list: torch.Tensor | None = None,
        topk_indices_offset_override: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Positions inside the request (or with the row's offset added), -1 padded."""
        rows = scores.shape[0]
        self.transforms.append(rows)
        lengths = self.expanded if ke_offset is None else ke_offset
        offset = topk_indices_offset_override
        if offset is None and self.attn_metadata.topk_indices_offset is not None:
            offset = self.attn_metadata.topk_indices_offset
        if cu_seqlens_q is not None:
            assert cu_seqlens_q.tolist() == [1] * rows
            assert batch_idx_list is not None and batch_idx_list.shape[0] == rows
        assert lengths.shape[0] == rows
        out = torch.full((rows, topk), -1, dtype=torch.int32)
        for row, length in enumerate(lengths.tolist()):
            start = 0 if ks is None else int(ks[row])
            seen = scores[row, start : start + length]
            best = seen.sort(descending=True, stable=True).indices[:topk].sort().values
            out[row, : best.numel()] = best.int() + (0 if offset is None else int(offset[row]))
        return out


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Torch twins of `fp8_paged_mqa_logits` and `fp8_mqa_logits`; counts of their calls."""
    seen: dict[str, Any] = {"paged": [], "ragged": [], "planned": 0}

    def plan(lengths: torch.Tensor, page: int, sms: int) -> str:
        seen["planned"] += 1
        return "planned"

    def paged(q, cache, gates, lengths, table, schedule, width, clean_logits):
        assert schedule == "planned" and not clean_logits and width == table.shape[1] * PAGE
        assert q.shape[1] == 1 and lengths.shape == (q.shape[0], 1)
        seen["paged"].append(q.shape[0])
        flat = cache.view(cache.shape[0], -1)
        keys = fp8_values(flat[:, : PAGE * 128]).view(-1, PAGE, 128)
        keys = keys * flat[:, PAGE * 128 :].contiguous().view(torch.float32).unsqueeze(-1)
        scores = torch.full((q.shape[0], width), float("nan"))
        for row in range(q.shape[0]):
            own = keys[table[row].long()].flatten(0, 1)
            scores[row] = gates[row] @ (q[row, 0] @ own.T).clamp_min(0)
            scores[row, int(lengths[row]) :] = float("nan")  # must not be looked at
        return scores

    def ragged(q, keys, gates, first, end, clean_logits):
        assert not clean_logits
        seen["ragged"].append(q.shape[0])
        values = keys[0].float() * keys[1].unsqueeze(-1)
        scores = torch.einsum("th,ths->ts", gates, torch.einsum("thd,sd->ths", q, values).relu())
        places = torch.arange(values.shape[0])
        outside = (places < first.unsqueeze(1)) | (places >= end.unsqueeze(1))
        return scores.masked_fill(outside, float("nan"))

    monkeypatch.setattr(index_select, "resolve_num_sms", lambda: 5)
    monkeypatch.setattr(index_select, "resolve_paged_mqa_logits_metadata_fn", lambda: plan)
    monkeypatch.setattr(index_select, "resolve_fp8_paged_mqa_logits_fn", lambda: paged)
    monkeypatch.setattr(index_select, "resolve_fp8_mqa_logits_fn", lambda: ragged)
    alone = SimpleNamespace(world_size=1, is_last_rank=True)
    with get_parallel().override(pp_group=alone):
        yield seen


def setup(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], new: list[int], **options: Any
) -> tuple[World, Metadata, torch.Tensor, torch.Tensor]:
    world = World(lengths, dtype=torch.bfloat16, index_topk=TOPK)
    pool = world.pool

    def gathered(layer: int, seq_lens, table, total: int, longest: int):
        assert total == sum(lengths) and longest == max(lengths)
        slots = [
            world.table[line, :length].long()
            for line, length in zip(world.lines, lengths, strict=True)
        ]
        slots = torch.cat(slots)
        cache = pool.index_key_cache
        page, offset = slots // PAGE, slots % PAGE
        scales = cache.scales(layer)[page, offset].unsqueeze(-1).contiguous()
        return cache.keys(layer)[page, offset], scales.view(torch.uint8)

    pool.get_index_k_scale_buffer = gathered
    monkeypatch.setattr(index_select, "get_token_to_kv_pool", lambda: pool)
    metadata = Metadata(world, new, **options)
    rows = len(metadata.rows)
    return world, metadata, world.normal(rows + 3, HEADS, 128), world.normal(rows + 3, HEADS)


def expected(world: World, metadata: Metadata, q: torch.Tensor, gates: torch.Tensor):
    for row, (request, position) in enumerate(metadata.rows):
        slots = world.table[world.lines[request], : world.keys[request].shape[0]]
        keys = world.pool.get_index_k(0, slots)
        yield reference_topk(q[row], gates[row], keys, position + 1, TOPK)


def check(selection: torch.Tensor, wanted: Iterator[list[int]], offsets: list[int]) -> None:
    for row, (own, offset) in enumerate(zip(wanted, offsets, strict=True)):
        assert selection[row].tolist() == [p + offset for p in own] + [-1] * (TOPK - len(own))
    assert selection.shape == (len(offsets), TOPK)


@pytest.mark.parametrize(
    ("lengths", "new", "calls"),
    [
        ([200, 65, 3], [1, 1, 1], [3]),  # decode: the planned schedule serves
        ([140, 70], [4, 4], [5, 3]),  # verify, more rows than multiprocessors
        ([131], [1], [1]),  # one row
    ],
    ids=["decode", "verify-in-blocks", "one-row"],
)
def test_paged(monkeypatch, kernels, lengths, new, calls) -> None:
    world, metadata, q, gates = setup(monkeypatch, lengths, new)
    selection = index_select.paged(0, q, gates, metadata, TOPK)
    check(selection, expected(world, metadata, q, gates), [0] * len(metadata.rows))
    assert kernels["paged"] == calls
    assert kernels["planned"] == (len(calls) if len(calls) > 1 else 0)
    assert metadata.transforms == [len(metadata.rows)]


def test_a_single_row_keeps_a_stride_of_sixteen_bytes(monkeypatch, kernels) -> None:
    world, metadata, q, gates = setup(monkeypatch, [131], [1])
    metadata.topk_transform = lambda scores, topk: scores  # type: ignore[method-assign]
    original = index_select.resolve_fp8_paged_mqa_logits_fn()

    def packed(*args, **kwargs):
        scores = original(*args, **kwargs)
        return scores.as_strided(scores.shape, (1, 1))  # what DLPack makes of one row

    monkeypatch.setattr(index_select, "resolve_fp8_paged_mqa_logits_fn", lambda: packed)
    scores = index_select.paged(0, q, gates, metadata, TOPK)
    assert scores.stride(0) % 4 == 0 and scores.shape[0] == 1
    assert torch.isfinite(scores[0, :131]).all()


@pytest.mark.parametrize("offsets", [False, True], ids=["positions", "offsets"])
@pytest.mark.parametrize("budget", [None, 2 * 1024, 1], ids=["whole", "two-rows", "one-row"])
def test_ragged(monkeypatch, kernels, offsets: bool, budget: int | None) -> None:
    lengths, new = [150, 70], [5, 3]
    world, metadata, q, gates = setup(monkeypatch, lengths, new, offsets=offsets)
    if budget is not None:
        monkeypatch.setattr(index_select, "SMALL", 0)
        monkeypatch.setattr(index_select, "_measured_budget", lambda device: budget)
    selection = index_select.ragged(0, q, gates, metadata, TOPK)
    first = metadata.first.tolist() if offsets else [0] * 8
    check(selection, expected(world, metadata, q, gates), first)
    assert kernels["ragged"] == {None: [8], 2 * 1024: [2] * 4, 1: [1] * 8}[budget]


def test_a_single_prefill_row_keeps_a_stride_of_sixteen_bytes(monkeypatch, kernels) -> None:
    """131 columns at a stride of 131: padded, and selected from as before."""
    world, metadata, q, gates = setup(monkeypatch, [131], [1], offsets=True)
    strides = []
    transform = metadata.topk_transform

    def watched(scores, *args, **kwargs):
        strides.append(scores.stride(0))
        return transform(scores, *args, **kwargs)

    metadata.topk_transform = watched  # type: ignore[method-assign]
    selection = index_select.ragged(0, q, gates, metadata, TOPK)
    check(selection, expected(world, metadata, q, gates), [0])
    assert strides == [132]


def test_the_budget_is_not_measured_while_graphs_are_captured(monkeypatch, kernels) -> None:
    def asked(device: int) -> int:
        raise AssertionError("the free memory was asked for")

    monkeypatch.setattr(index_select, "SMALL", 0)
    monkeypatch.setattr(index_select, "get_is_capture_mode", lambda: True)
    monkeypatch.setattr(index_select, "_measured_budget", asked)
    monkeypatch.setattr(
        index_select, "mqa_logits_static_budget_bytes", lambda device_index: 3 * 1024
    )
    _, metadata, q, gates = setup(monkeypatch, [150, 70], [5, 3])
    index_select.ragged(0, q, gates, metadata, TOPK)
    assert kernels["ragged"] == [3, 3, 2]


def test_rows_that_see_little_are_selected_without_a_score(monkeypatch, kernels) -> None:
    _, metadata, _, _ = setup(monkeypatch, [5, 8], [5, 8])
    selection = index_select.everything(metadata, TOPK)
    for row, (_, position) in enumerate(metadata.rows):
        assert selection[row].tolist() == [
            *range(position + 1),
            *[-1] * (TOPK - position - 1),
        ]
    assert not kernels["paged"] and not kernels["ragged"]


def test_what_needs_no_score_is_a_short_prefill() -> None:
    def batch(mode: ForwardMode, lengths: list[int]) -> Any:
        return SimpleNamespace(
            forward_mode=mode,
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
        )

    short = index_select.sees_no_more_than
    assert short(2048, batch(ForwardMode.EXTEND, [2048, 3]))
    assert not short(2048, batch(ForwardMode.EXTEND, [2049, 3]))
    assert not short(2048, batch(ForwardMode.DECODE, [3]))
    assert not short(2048, batch(ForwardMode.TARGET_VERIFY, [3]))
    assert not short(2048, batch(ForwardMode.DRAFT_EXTEND_V2, [3]))
    assert not short(2048, batch(ForwardMode.EXTEND, []))
    assert index_select.has_requests(batch(ForwardMode.DECODE, [3]))
    assert not index_select.has_requests(batch(ForwardMode.IDLE, [3]))
    assert not index_select.has_requests(batch(ForwardMode.DECODE, []))


def test_padding_selects_nothing() -> None:
    selection = torch.arange(6, dtype=torch.int32).view(2, 3)
    padded = index_select.pad_rows(selection, 4)
    assert padded[:2].equal(selection) and (padded[2:] == -1).all()
    assert index_select.pad_rows(selection, 2) is selection


def test_a_weight_in_blocks_is_dequantised_with_its_own_scales() -> None:
    weight = torch.randn(200, 130).clamp(-3, 3).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.5
    values = dequantise_blocks(weight, scale, torch.float32)
    for row, col in ((0, 0), (127, 127), (128, 0), (199, 129), (5, 128)):
        wanted = weight[row, col].float() * scale[row // 128, col // 128]
        assert values[row, col] == wanted
