"""A cache with tokens in it and forward batches over it, for the backend's unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_glm53.backends.torch_dsa import TorchDsaBackend
from sglang_glm53.memory.pool import GlmTokenToKVPool

PAGE = 64


@pytest.fixture(autouse=True)
def single_rank() -> Iterator[None]:
    """What a server publishes before it builds a pool. Import it into the test module."""
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False):
        yield


@pytest.fixture(autouse=True, params=["layer", "page"])
def both_modes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Layer-major and page-major pools: every test of a module that imports it runs with both."""
    monkeypatch.setenv("GLM53_POOL", request.param)
    return request.param


def stored_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[n, 1, values] of a pool's key or value buffer, whichever way its pages lie."""
    return buffer[slots] if buffer.dim() == 3 else buffer[slots // PAGE, slots % PAGE]


def make_pool(
    pages: int,
    dtype: torch.dtype,
    *,
    layers: int = 2,
    skip: list[bool] | None = None,
    rank: int = 512,
    rope: int = 64,
    start: int = 0,
    **more: Any,
) -> GlmTokenToKVPool:
    """A pool of `pages` pages (page 0 is the one for padding)."""
    width = rank + rope
    if dtype == torch.float8_e4m3fn:
        width = rank + rank // 128 * 4 + 2 * rope
    return GlmTokenToKVPool(
        (pages - 1) * PAGE,
        page_size=PAGE,
        dtype=dtype,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        layer_num=layers,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=width,
        start_layer=start,
        end_layer=start + layers,
        skip_topk_layers=skip,
        **more,
    )


class World:
    """Requests with shuffled pages, and their latents and index keys, known per position."""

    def __init__(
        self,
        lengths: list[int],
        *,
        dtype: torch.dtype = torch.float32,
        index_topk: int = 8,
        heads: int = 2,
        room: int = 16,
        seed: int = 0,
        ordered: bool = False,
        rank: int = 512,
        rope: int = 64,
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.lengths, self.heads, self.index_topk = lengths, heads, index_topk
        self.rank, self.rope, self.dtype = rank, rope, dtype
        needed = [-(-(length + room) // PAGE) for length in lengths]
        total = sum(needed)
        self.pool = make_pool(total + 1, dtype, rank=rank, rope=rope)
        pages = torch.arange(total) if ordered else torch.randperm(total, generator=self.random)
        pages = pages + 1
        # Requests stand in lines 1, 2, … of req_to_token, in an order of their own.
        self.lines = [len(lengths) - i for i in range(len(lengths))]
        self.table = torch.zeros(len(lengths) + 1, max(needed) * PAGE, dtype=torch.int32)
        for line, count in zip(self.lines, needed, strict=True):
            own, pages = pages[:count], pages[count:]
            slots = (own.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
            self.table[line, : slots.numel()] = slots.int()
        self.keys = [self.normal(length + room, 128) for length in lengths]
        self.latents = [self.normal(length + room, rank + rope) for length in lengths]
        for line, keys, latents in zip(self.lines, self.keys, self.latents, strict=True):
            slots = self.table[line, : keys.shape[0]]
            self.pool.set_index_k(0, slots, keys)
            self.write_latents(slots, latents)
        runner = SimpleNamespace(
            device="cpu",
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool,
            model_config=SimpleNamespace(hf_config=SimpleNamespace(index_topk=index_topk)),
        )
        self.runner: Any = runner
        self.backend = TorchDsaBackend(runner)
        self.layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=heads,
            tp_k_head_num=1,
            qk_head_dim=rank + rope,
            v_head_dim=rank,
            scaling=0.0625,
        )

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def write_latents(self, slots: torch.Tensor, latents: torch.Tensor) -> None:
        nope, rope = latents.unsqueeze(1).split([self.rank, self.rope], dim=-1)
        self.pool.set_mla_kv_buffer(SimpleNamespace(layer_id=0), slots, nope, rope)

    def batch(
        self, mode: str, new: list[int], *, padded: int = 0, draft_decode: bool = False
    ) -> Any:
        """The last `new[i]` of request i's tokens as the rows of a forward pass.

        Fields are what SGLang sets in that mode: `seq_lens` counts the new tokens in EXTEND,
        DECODE and DRAFT_EXTEND_V2, not in TARGET_VERIFY nor in the draft model's DECODE.
        `padded` rows of padding are appended as SGLang does for attention data parallelism.
        """
        forward_mode = ForwardMode[mode]
        ends = torch.tensor(self.lengths)
        starts = ends - torch.tensor(new)
        positions = torch.cat(
            [torch.arange(int(s), int(e)) for s, e in zip(starts, ends, strict=True)]
        )
        line = torch.tensor(self.lines)
        slots = torch.cat(
            [
                self.table[n, int(s) : int(e)]
                for n, s, e in zip(self.lines, starts, ends, strict=True)
            ]
        ).long()
        without_new = mode == "TARGET_VERIFY" or draft_decode
        batch = SimpleNamespace(
            forward_mode=forward_mode,
            batch_size=len(new),
            req_pool_indices=line,
            seq_lens=starts.clone() if without_new else ends.clone(),
            positions=positions,
            out_cache_loc=slots,
            spec_info=None,
            extend_seq_lens=None,
            extend_seq_lens_cpu=None,
            _original_num_tokens=None,
        )
        if mode == "TARGET_VERIFY":
            assert len(set(new)) == 1
            batch.spec_info = SimpleNamespace(draft_token_num=new[0])
        elif mode == "DRAFT_EXTEND_V2":
            batch.spec_info = SimpleNamespace(num_tokens_per_req=new[0])
            batch.extend_seq_lens = torch.tensor(new, dtype=torch.int32)
        elif mode in ("EXTEND", "MIXED"):
            batch.extend_seq_lens = torch.tensor(new, dtype=torch.int32)
            batch.extend_seq_lens_cpu = list(new)
        elif draft_decode:
            batch.spec_info = SimpleNamespace(num_tokens_per_req=1)
        if padded:
            batch._original_num_tokens = positions.shape[0]
            batch.positions = torch.cat([positions, torch.zeros(padded, dtype=torch.int64)])
            batch.out_cache_loc = torch.cat([slots, torch.zeros(padded, dtype=torch.int64)])
            if mode not in ("EXTEND", "MIXED"):
                requests = padded // new[0]
                batch.batch_size += requests
                batch.req_pool_indices = torch.cat([line, line.new_zeros(requests)])
                batch.seq_lens = torch.cat([batch.seq_lens, line.new_ones(requests)])
                if mode == "DRAFT_EXTEND_V2":
                    batch.extend_seq_lens = torch.tensor(
                        new + [new[0]] * requests, dtype=torch.int32
                    )
        return batch

    def rows(self, new: list[int]) -> list[tuple[int, int]]:
        """(request, position) of every row of `batch(mode, new)`."""
        return [
            (request, position)
            for request, (length, count) in enumerate(zip(self.lengths, new, strict=True))
            for position in range(length - count, length)
        ]


def reference_topk(
    q: torch.Tensor, gates: torch.Tensor, keys: torch.Tensor, seen: int, k: int
) -> list[int]:
    """Selection of one row, head by head: q [heads, 128], gates [heads], keys [tokens, 128]."""
    score = torch.zeros(seen, dtype=torch.float64)
    for head in range(q.shape[0]):
        product = keys[:seen].double() @ q[head].double()
        score += gates[head].double() * product.clamp_min(0)
    # Python's sort is stable: equal scores keep the order of their positions.
    order = sorted(range(seen), key=lambda s: -score[s].item())
    return sorted(order[:k])


def reference_attention(
    q: torch.Tensor, q_rope: torch.Tensor, latents: torch.Tensor, chosen: list[int], scaling: float
) -> torch.Tensor:
    """Absorbed attention of one row: q [heads, rank], latents [tokens, rank + rope]."""
    rank = q.shape[1]
    picked = latents[chosen].double()
    query = torch.cat([q, q_rope], dim=-1).double()
    weights = (query @ picked.T * scaling).softmax(dim=-1)
    return weights @ picked[:, :rank]
