"""Page-major pages on a GPU, without a model: what the kernels read and write, and host copies.

usage: python -m gpu.pool_kernels OUT [--pages 2048] [--copied 1000] [--device cuda]

Writes OUT/pool-kernels.json: {"same": {name: bool}, "microseconds": {name: {"layer": x,
"page": y}}, "copies": [{"pages", "layout", "backend", "way", "gb_s", "cpu_us_a_page",
"copies_a_page", "same"}, ...], "pinned_gb_s": x}.
GLM-5.3's sizes: 78 layers, 21 full indexer layers, FP8 latents.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_glm53.config import schedule
from sglang_glm53.memory import mode

PAGE = 64
ARGUMENTS = {"kv_cache_dtype": "fp8_e4m3"}


@contextmanager
def one_rank() -> Iterator[None]:
    """What a server publishes before it builds a pool."""
    from sglang.srt.runtime_context import get_parallel

    before, mode.published = mode.published, lambda: ARGUMENTS.get
    try:
        with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False):
            yield
    finally:
        mode.published = before


def pool_of(pages: str, count: int, layers: int, device: str) -> Any:
    """An FP8 pool of `count` pages, page- or layer-major."""
    from sglang_glm53.memory.pool import GlmTokenToKVPool

    os.environ["GLM53_POOL"] = pages
    return GlmTokenToKVPool(
        (count - 1) * PAGE,
        page_size=PAGE,
        dtype=torch.float8_e4m3fn,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        layer_num=layers,
        device=device,
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=656,
        start_layer=0,
        end_layer=layers,
        skip_topk_layers=[kind != "full" for kind in schedule(layers, 4, 3)],
    )


def microseconds(call: Callable[[], object], device: str, inner: int = 4) -> float:
    """Median time of a captured call; on a CPU, of a plain one."""
    call()
    if device == "cpu":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            call()
    times = []
    for _ in range(25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / inner * 1e3)
    return statistics.median(times)


# --- writes and reads ------------------------------------------------------------------------


def writes(pools: dict[str, Any], device: str) -> tuple[dict[str, bool], dict[str, Any]]:
    """Latents and index keys written by both pools: the same bytes? and how long does it take?"""
    same, times = {}, {}
    pages = min(pool.kv_buffer[0].shape[0] for pool in pools.values() if pool.share)
    for tokens in (1, 8, 96, 4096):
        tokens = min(tokens, (pages - 1) * PAGE)
        slots = torch.randperm((pages - 1) * PAGE, device=device)[:tokens] + PAGE
        values = torch.randn(tokens, 1, 576, device=device, dtype=torch.bfloat16)
        nope, rope = values.split([512, 64], dim=-1)
        keys = torch.randn(tokens, 128, device=device, dtype=torch.bfloat16)
        name = SimpleNamespace(layer_id=1)
        store = index_store(keys, device)
        calls = {
            "latents": lambda pool, s=slots, n=nope, r=rope, f=name: pool.set_mla_kv_buffer(
                f, s, n, r
            ),
            "index keys": lambda pool, s=slots, k=store: pool.store_with(k, 1, s),
        }
        for what, call in calls.items():
            label = f"write {what}, {tokens} tokens"
            times[label] = {
                side: microseconds(lambda p=pool, c=call: c(p), device)
                for side, pool in pools.items()
            }
            where = (slots // PAGE).unique()
            content = [pool.read_pages(where) for pool in pools.values()]
            same[label] = torch.equal(*content) and bool(content[0].any())
    return same, times


def index_store(keys: torch.Tensor, device: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """SGLang's fused LayerNorm, RoPE, FP8 and store; a plain one on a CPU."""
    if device == "cpu":
        from sglang_glm53.memory.quantise import quantise_index_key

        def plain(buffer: torch.Tensor, slots: torch.Tensor) -> None:
            fp8, scale = quantise_index_key(keys)
            page, at = slots // PAGE, slots % PAGE
            buffer[:, :8192].unflatten(1, (PAGE, 128))[page, at] = fp8.view(torch.uint8)
            buffer[:, 8192:].view(torch.float32)[page, at] = scale

        return plain
    from sglang.kernels.ops.attention.dsa.indexer_k import fused_k_indexer_norm_rope_store

    weight, bias = torch.ones(128, device=device), torch.zeros(128, device=device)
    table = torch.randn(1 << 16, 64, device=device)
    positions = torch.arange(keys.shape[0], device=device)

    def fused(buffer: torch.Tensor, slots: torch.Tensor) -> None:
        fused_k_indexer_norm_rope_store(
            keys, buffer, slots, weight, bias, 1e-6, table, positions, PAGE
        )

    return fused


def reads(pools: dict[str, Any], device: str) -> tuple[dict[str, bool], dict[str, Any]]:
    """What FlashMLA, DeepGEMM and SGLang's gather make of both; the pools hold the same bytes."""
    from sglang.kernels.ops.attention.flash_mla_interface import (
        flash_mla_with_kvcache,
        get_mla_metadata,
    )
    from sglang.srt.layers.attention.dsa.utils import (
        resolve_fp8_paged_mqa_logits_fn,
        resolve_num_sms,
        resolve_paged_mqa_logits_metadata_fn,
    )

    same, times = {}, {}
    pages = pools["page"].kv_buffer[0].shape[0]
    tokens = (pages - 1) * PAGE

    def hold(label: str, call: Callable[[Any], Any]) -> None:
        results = []
        for side, pool in pools.items():
            times.setdefault(label, {})[side] = microseconds(lambda p=pool: call(p), device)
            results.append(call(pool))
        parts = [r if isinstance(r, tuple) else (r,) for r in results]
        same[label] = all(torch.equal(a, b) for a, b in zip(*parts, strict=True))

    for rows in (1, 8, 32):
        query = torch.randn(rows, 1, 64, 576, device=device, dtype=torch.bfloat16)
        chosen = torch.stack(
            [torch.randperm(tokens, device=device)[:2048] + PAGE for _ in range(rows)]
        )
        chosen = chosen.int().unsqueeze(1)
        lengths = torch.full((rows,), 2048, dtype=torch.int32, device=device)
        tiles, splits = get_mla_metadata(
            cache_seqlens=lengths,
            num_q_tokens_per_head_k=64,
            num_heads_k=1,
            num_heads_q=64,
            is_fp8_kvcache=True,
            topk=2048,
        )

        def attend(pool: Any, q=query, i=chosen, n=lengths, t=tiles, s=splits) -> torch.Tensor:
            return flash_mla_with_kvcache(
                q=q,
                k_cache=pool.get_key_buffer(1).view(-1, PAGE, 1, 656),
                cache_seqlens=n,
                head_dim_v=512,
                tile_scheduler_metadata=t,
                num_splits=s,
                softmax_scale=0.0625,
                indices=i,
                block_table=torch.empty((q.shape[0], 0), dtype=torch.int32, device=device),
                is_fp8_kvcache=True,
            )[0]

        hold(f"FlashMLA, {rows} rows", attend)

    for requests, context in ((1, 8192), (8, 8192), (1, 65536)):
        count = context // PAGE
        if requests * count > pages - 1:
            continue
        order = torch.randperm(pages - 1, device=device)[: requests * count] + 1
        table = order.int().view(requests, -1).contiguous()
        query = torch.randn(requests, 1, 32, 128, device=device).to(torch.float8_e4m3fn)
        gates = torch.randn(requests, 32, device=device)
        lengths = torch.full((requests, 1), context, dtype=torch.int32, device=device)
        plan = resolve_paged_mqa_logits_metadata_fn()(lengths, PAGE, resolve_num_sms())

        def score(pool: Any, q=query, g=gates, n=lengths, t=table, p=plan, c=context) -> Any:
            keys = pool.get_index_k_with_scale_buffer(layer_id=1)
            keys = keys.view(keys.shape[0], PAGE, 1, 132)
            logits = resolve_fp8_paged_mqa_logits_fn()
            return logits(q, keys, g, n, t, p, c, clean_logits=False)[:, :c]

        hold(f"DeepGEMM, {requests} x {context}", score)
        seen = lengths.flatten()

        def gather(pool: Any, n=seen, t=table, r=requests, c=context) -> tuple[Any, ...]:
            return pool.get_index_k_scale_buffer(1, n, t, r * c, c)

        hold(f"gather of index keys, {requests} x {context}", gather)
    return same, times


# --- host copies -----------------------------------------------------------------------------


def timed(submit: Callable[[], object], device: str) -> tuple[float, float]:
    """(seconds until done, seconds of CPU until submitted) of the second call."""
    submit()
    _wait(device)
    began = time.perf_counter()
    submit()
    cpu = time.perf_counter() - began
    _wait(device)
    return time.perf_counter() - began, cpu


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def host_copies(pool: Any, pairs: list[tuple[str, str]], copied: int) -> list[dict[str, Any]]:
    """Random pages to pinned host memory and back, for each (host layout, I/O backend)."""
    device = torch.device(pool.device).type
    pages = pool.read_pages(torch.zeros(1, dtype=torch.int64, device=pool.device)).shape[1]
    rows = []
    for layout, backend in pairs:
        hosts: list[Any] = []
        try:
            hosts += host_pools(pool, layout, copied)
            count = pool.kv_buffer[0].shape[0] // (1 if pool.share else PAGE)
            numbers = torch.randperm(count - 1)[:copied] + 1
            slots = (numbers.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
            kept = hosts[0].alloc(slots.numel())
            if backend == "kernel":
                slots, kept = slots.to(pool.device), kept.to(pool.device)
            content = pool.read_pages(numbers.to(pool.device))
            ways = {
                "to the host": lambda h=hosts, k=kept, s=slots, b=backend: [
                    host.backup_from_device_all_layer(pool, k, s, b) for host in h
                ],
                "to the device": lambda h=hosts, k=kept, s=slots, b=backend: [
                    host.load_to_device_per_layer(pool, k, s, layer, b)
                    for layer in range(pool.layer_num)
                    for host in h
                    if layer_of(host, layer)
                ],
            }
            for way, submit in ways.items():
                if way == "to the device":  # what comes back is what was written, not what is there
                    pool.write_pages(numbers.to(pool.device), torch.zeros_like(content))
                with stream_of(device):
                    seconds, cpu = timed(submit, device)
                rows.append(
                    {
                        "pages": "page-major" if pool.share else "layer-major",
                        "layout": layout,
                        "backend": backend,
                        "way": way,
                        "gb_s": copied * pages / seconds / 1e9,
                        "cpu_us_a_page": cpu * 1e6 / copied,
                        "copies_a_page": copies_a_page(hosts[0], way),
                    }
                )
            same = torch.equal(pool.read_pages(numbers.to(pool.device)), content)
            rows[-1]["same"] = rows[-2]["same"] = same
        except Exception as error:  # a layout that this SGLang does not copy is told, not fatal
            rows.append({"layout": layout, "backend": backend, "failed": repr(error)[:300]})
        finally:
            for host in hosts:
                host.destroy()
    return rows


def layer_of(host: Any, layer: int) -> bool:
    """Whether a host pool has something of a layer."""
    mapped = getattr(host, "_device_to_host_layer", None)
    return mapped is None or layer in mapped


def copies_a_page(host: Any, way: str) -> int:
    """Descriptors a page: of ours one, or one a run of layers; of SGLang's one a piece."""
    if hasattr(host, "ranges"):
        return 1 if way == "to the host" else len(host.ranges)
    return 99


def host_pools(pool: Any, layout: str, pages: int) -> list[Any]:
    """Room for so many pages: ours for a page-major pool, SGLang's two for a layer-major one."""
    ratio = (pages + 2) * PAGE / pool.size
    if pool.share is not None:
        from sglang_glm53.memory.host_pool import PageHostPool

        return [PageHostPool(pool, host_to_device_ratio=ratio, host_size=0, layout=layout)]
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    anchor = MLATokenToKVPoolHost(
        pool.get_device_pool_infos()[0].buffer_info,
        ratio,
        0,
        PAGE,
        layout,
        override_kv_cache_dim=pool.kv_cache_dim,
        device_capacity_tokens=pool.size,
        start_layer=0,
        end_layer=pool.layer_num,
        target_layer_num=pool.layer_num,
    )
    return [anchor, DSAIndexerPoolHost(pool.host_pool_decls()[1], anchor)]


@contextmanager
def stream_of(device: str) -> Iterator[None]:
    """A stream of its own, as SGLang's transfers have one."""
    if device == "cpu":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def pinned_bandwidth(nbytes: int, device: str) -> float:
    """GB/s of one large copy to pinned memory."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
    seconds, _ = timed(lambda: target.copy_(source, non_blocking=True), device)
    return nbytes / seconds / 1e9


PAIRS = {
    "page": [("layer_first", "kernel"), ("layer_first", "direct")],
    "layer": [
        ("layer_first", "kernel"),
        ("page_first", "kernel"),
        ("layer_first", "direct"),
        ("page_first_direct", "direct"),
    ],
}


def main() -> None:
    """Both pools, one after the other where memory is short."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--pages", type=int, default=2048)
    parser.add_argument("--copied", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=78)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    record: dict[str, Any] = {"same": {}, "microseconds": {}, "copies": []}
    file = args.out / "pool-kernels.json"
    with one_rank():
        pools = {
            side: pool_of(side, args.pages, args.layers, args.device) for side in ("layer", "page")
        }
        parts = [writes] if args.device == "cpu" else [writes, fill_alike, reads]
        for part in parts:
            same, times = part(pools, args.device)
            record["same"] |= same
            record["microseconds"] |= times
            file.write_text(json.dumps(record, indent=1))
        size = args.copied * pools["page"].share.arena.layout.page_bytes
        record["pinned_gb_s"] = pinned_bandwidth(size, args.device)
        for side, pool in pools.items():
            if args.device == "cpu" and side == "layer":
                continue  # SGLang's host pools want CUDA
            record["copies"] += host_copies(pool, PAIRS[side], args.copied)
            file.write_text(json.dumps(record, indent=1))
    print(json.dumps(record, indent=1), flush=True)


def fill_alike(pools: dict[str, Any], device: str) -> tuple[dict[str, bool], dict[str, Any]]:
    """The same latents and keys in every slot of layer 1 of both."""
    generator = torch.Generator(device).manual_seed(1)
    tokens = (pools["page"].kv_buffer[0].shape[0] - 1) * PAGE
    for start in range(0, tokens, 1 << 14):
        count = min(1 << 14, tokens - start)
        slots = torch.arange(start, start + count, device=device) + PAGE
        shape = (count, 1, 576)
        values = torch.randn(shape, generator=generator, device=device).to(torch.bfloat16)
        keys = torch.randn(count, 128, generator=generator, device=device)
        for pool in pools.values():
            parts = values.split([512, 64], dim=-1)
            pool.set_mla_kv_buffer(SimpleNamespace(layer_id=1), slots, *parts)
            pool.set_index_k(1, slots, keys)
    return {}, {}


if __name__ == "__main__":
    main()
