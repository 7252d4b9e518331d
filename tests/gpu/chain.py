"""The decode chain's kernels on a GPU: equal to their twins, and their times beside stock's chain.

usage: python -m gpu.chain OUT [--rows 1 8 16 32] [--only products rows absorbed] [--short]

Each time is a CUDA graph of many launches over weights that do not fit into the L2 cache together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

PARTS = ("products", "rows", "absorbed", "experts", "index")
# out, in of a rank whose attention is not split (attention DP): GLM-5.3.
PRODUCTS = {
    "qkv_a": (2624, 6144),
    "q_b": (16384, 2048),
    "index wq_b": (4096, 2048),
    "o_proj": (6144, 16384),
    "shared gate_up": (4096, 6144),
    "shared down": (6144, 2048),
}
TILES, SPLITS, STAGES, WARPS = (32, 64, 128), (1, 2, 3, 4, 6, 8, 12), (4, 6), (4, 8)
COLD = 400e6  # bytes of weights that take turns: eight times the L2 cache
BLOCK = 128


def time_graph(launches: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Microseconds a launch: a captured graph of all of them, median of some replays."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def cold(outer: int, inner: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """FP8 weights and scales, enough of them that none stays in the L2 cache."""
    count = max(2, min(32, round(COLD / (outer * inner))))
    shape = -(-outer // BLOCK), -(-inner // BLOCK)
    return [
        (
            torch.randn(outer, inner, device="cuda").to(torch.float8_e4m3fn),
            torch.rand(shape, device="cuda") * 0.02 + 0.01,
        )
        for _ in range(count)
    ]


def taking_turns(weights: Sequence[Any]) -> list[Any]:
    """Weights for the launches of one graph: about 48, all equally often."""
    return list(weights) * -(-48 // len(weights))


def spread(run: Callable[..., object]) -> Callable[..., object]:
    """A product that takes a weight and its scales as one argument."""
    return lambda x, pair, **how: run(x, *pair, **how)


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (time_graph([lambda: target.copy_(source)]) * 1e-6)


def products(rows: int, speed: float, short: bool) -> list[dict[str, Any]]:
    """Every product by DeepGEMM, and by ours with all settings; the best of ours."""
    from sglang.srt.layers.deep_gemm_wrapper import gemm_nt_f8f8bf16

    from sglang_glm53.kernels.few_rows import FewRows, gate_up_torch, matmul_torch
    from sglang_glm53.kernels.fp8 import dequantise_groups, quantise_groups

    few, found = FewRows("cuda"), []
    for name, (outer, inner) in PRODUCTS.items():
        weights = cold(outer, inner)
        x = quantise_groups(torch.randn(rows, inner, device="cuda").bfloat16())
        output = torch.empty(rows, outer, dtype=torch.bfloat16, device="cuda")
        gated = name == "shared gate_up"
        run = few.gate_up if gated else few.matmul

        def launches(run: Callable[..., object], *more: Any, **how: Any) -> list[Callable]:
            return [partial(run, x, pair, *more, **how) for pair in taking_turns(weights)]  # noqa: B023

        stock = time_graph(launches(gemm_nt_f8f8bf16, output))
        times: dict[str, float] = {}
        settings = itertools.product(TILES if not gated else (BLOCK,), SPLITS, STAGES, WARPS)
        for tile, split, stages, warps in settings:
            programs = outer // (2 if gated else 1) / tile * split
            if outer % tile or not 80 <= programs <= 800 or (short and warps == 8):
                continue
            how = {"split": split, "stages": stages, "warps": warps}
            how |= {} if gated else {"tile": tile}
            try:
                times[f"{tile}/{split}/{stages}/{warps}"] = time_graph(
                    launches(spread(run), **how), repeats=3
                )
            except Exception as error:  # a setting that needs more shared memory than there is
                times[f"{tile}/{split}/{stages}/{warps}"] = float("inf")
                print(f"chain: {name} {how}: {' '.join(str(error).split())[:120]}", flush=True)
        best = min(times, key=times.__getitem__)
        if gated:
            mine, twin = few.gate_up(x, *weights[0], split=4), gate_up_torch(x, *weights[0])
            mine, twin = dequantise_groups(*mine), dequantise_groups(*twin)
        else:
            mine, twin = few.matmul(x, *weights[0], split=4), matmul_torch(x, *weights[0])
        apart = float((mine.float() - twin.float()).abs().max() / twin.float().abs().max())
        bound = outer * inner / speed * 1e6
        found.append(
            {
                "name": name,
                "rows": rows,
                "stock_us": stock,
                "ours_us": times[best],
                "setting": best,
                "bound_us": bound,
                "apart": apart,
                "times": times,
            }
        )
        told = f"{name}, {rows} rows: DeepGEMM {stock:.1f} us, ours {times[best]:.1f} ({best}), "
        print(f"chain: {told}bound {bound:.1f}, apart {apart:.1e}", flush=True)
    return found


def row_kernels(rows: int, speed: float, short: bool) -> list[dict[str, Any]]:
    """Norm, activation and latents beside the launches that they replace."""
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm

    from sglang_glm53.kernels.act_quant import silu_mul_quant
    from sglang_glm53.kernels.latents import latents
    from sglang_glm53.kernels.norm_quant import add_norm_quant

    def quantised(x: torch.Tensor) -> object:
        return sglang_per_token_group_quant_fp8(
            x, BLOCK, column_major_scales=True, scale_tma_aligned=True
        )

    norm = RMSNorm(6144, eps=1e-5).cuda().bfloat16()
    x, residual = (torch.randn(rows, 6144, device="cuda").bfloat16() for _ in range(2))
    gate_up, act = torch.randn(rows, 4096, device="cuda").bfloat16(), SiluAndMul()
    joined = torch.randn(rows, 2624, device="cuda").bfloat16()
    gains = [torch.ones(width, device="cuda").bfloat16() for width in (2048, 512)]
    norms = [RMSNorm(width, eps=1e-5).cuda().bfloat16() for width in (2048, 512)]
    table = torch.rand(4096, 64, device="cuda")
    cache = torch.zeros(64, 64, 656, dtype=torch.uint8, device="cuda")
    slots = torch.arange(rows, device="cuda")
    pairs = {
        "add + RMSNorm + FP8": (
            lambda: quantised(norm(x, residual)[0]),
            lambda: add_norm_quant(x, residual, norm.weight, 1e-5, bf16=True),
        ),
        "silu * up + FP8": (lambda: quantised(act(gate_up)), lambda: silu_mul_quant(gate_up)),
        "latents (stock: two norms, one quantisation)": (
            lambda: (
                quantised(norms[0](joined[:, :2048].contiguous())),
                norms[1](joined[:, 2048:2560].contiguous()),
            ),
            lambda: latents(joined, *gains, 1e-5, table, slots, cache, slots),
        ),
    }
    found = []
    for name, (stock, ours) in pairs.items():
        times = [time_graph([run] * 48) for run in (stock, ours)]
        found.append({"name": name, "rows": rows, "stock_us": times[0], "ours_us": times[1]})
        print(f"chain: {name}, {rows} rows: {times[0]:.1f} us, ours {times[1]:.1f}", flush=True)
    return found


def absorbed(rows: int, speed: float, short: bool) -> list[dict[str, Any]]:
    """W_UK and W_UV in FP8 beside stock's bf16 products."""
    from sglang_glm53.kernels.absorb import (
        fold_queries,
        fold_queries_torch,
        unfold_values,
        unfold_values_torch,
    )
    from sglang_glm53.kernels.fp8 import dequantise_groups

    heads, nope, v, kv = 64, 192, 256, 512
    weights = cold(heads * (nope + v), kv)
    table, at = torch.rand(4096, 64, device="cuda"), torch.arange(rows, device="cuda")
    q = torch.randn(rows, heads * 256, device="cuda").bfloat16()
    attended = torch.randn(rows, heads, kv, device="cuda").bfloat16()
    w_uk = [torch.randn(heads, nope, kv, device="cuda").bfloat16() for _ in range(16)]
    w_uv = [torch.randn(heads, kv, v, device="cuda").bfloat16() for _ in range(16)]
    shape = {"heads": heads, "v_head_dim": v}
    parts = q.view(rows, heads, 256)[..., :nope].transpose(0, 1)
    pairs = {
        "q W_UK (stock: the product alone)": (
            [partial(torch.bmm, parts, w) for w in taking_turns(w_uk)],
            [partial(fold_queries, q, *w, table, at, **shape) for w in taking_turns(weights)],
            lambda: (fold_queries(q, *weights[0], table, at, **shape),
                     fold_queries_torch(q, *weights[0], table, at, **shape)),
        ),
        "W_UV + FP8 (stock: the product alone)": (
            [partial(torch.bmm, attended.transpose(0, 1), w) for w in taking_turns(w_uv)],
            [partial(unfold_values, attended, *w, v_head_dim=v) for w in taking_turns(weights)],
            lambda: (dequantise_groups(*unfold_values(attended, *weights[0], v_head_dim=v)),
                     dequantise_groups(*unfold_values_torch(attended, *weights[0], v_head_dim=v))),
        ),
    }  # fmt: skip
    found = []
    for name, (stock, ours, check) in pairs.items():
        times = [time_graph(run) for run in (stock, ours)]
        mine, twin = (part.float() for part in check())
        apart = float((mine - twin).abs().max() / twin.abs().max())
        row = {"name": name, "rows": rows, "stock_us": times[0], "ours_us": times[1]}
        found.append({**row, "apart": apart})
        told = f"{name}, {rows} rows: {times[0]:.1f} us, ours {times[1]:.1f}"
        print(f"chain: {told}, apart {apart:.1e}", flush=True)
    return found


def routed(rows: int, speed: float, short: bool) -> list[dict[str, Any]]:
    """A rank's 32 experts beside SGLang's Triton experts: round-robin choices, as in the bench."""
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts_impl

    from sglang_glm53.kernels.experts import (
        expert_parts,
        expert_parts_torch,
        sum_parts,
        sum_parts_torch,
    )
    from sglang_glm53.kernels.fp8 import quantise_groups

    count, hidden, width, choices = 32, 6144, 2048, 8
    chosen = torch.arange(rows * choices, device="cuda").view(rows, choices).int() % count
    weight = torch.rand(rows, choices, device="cuda")
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    shared, quantised = torch.randn_like(x), quantise_groups(x)
    layers = []
    for _ in range(3):
        pairs = []
        for outer, inner in ((2 * width, hidden), (hidden, width)):
            values = torch.empty(count, outer, inner, dtype=torch.float8_e4m3fn, device="cuda")
            for expert in range(count):
                values[expert] = torch.randn(outer, inner, device="cuda").to(values.dtype)
            scale = torch.rand(count, outer // BLOCK, inner // BLOCK, device="cuda") * 0.02 + 0.01
            pairs.append((values, scale))
        layers.append(pairs)

    def stock(gate_up: Any, down: Any) -> torch.Tensor:
        total = fused_experts_impl(
            x, gate_up[0], down[0], weight, chosen, use_fp8_w8a8=True, w1_scale=gate_up[1],
            w2_scale=down[1], block_shape=[BLOCK, BLOCK], routed_scaling_factor=2.5,
        )  # fmt: skip
        return total.add_(shared)

    def ours(gate_up: Any, down: Any, **how: Any) -> torch.Tensor:
        parts = expert_parts(quantised, gate_up, down, chosen, weight, **how)
        return sum_parts(parts, chosen, count, shared, factor=2.5)

    times = {"stock": time_graph([partial(stock, *pairs) for pairs in layers * 4])}
    for stages, warps in itertools.product((3, 4, 5), (4, 8)):
        try:
            how = {"stages": stages, "warps": warps}
            times[f"{stages}/{warps}"] = time_graph(
                [partial(ours, *pairs, **how) for pairs in layers * 4]
            )
        except Exception as error:
            print(f"chain: experts {stages}/{warps}: {' '.join(str(error).split())[:120]}")
    best = min((name for name in times if name != "stock"), key=times.__getitem__)
    parts = expert_parts_torch(quantised, *layers[0], chosen, weight)
    twin = sum_parts_torch(parts, chosen, count, shared, factor=2.5).float()
    apart = [float((run(*layers[0]).float() - twin).norm() / twin.norm()) for run in (stock, ours)]
    read = min(count, rows * choices) * 3 * hidden * width
    row = {"name": "experts", "rows": rows, "stock_us": times["stock"], "ours_us": times[best]}
    row |= {"setting": best, "bound_us": read / speed * 1e6, "apart": apart[1], "times": times}
    told = f"{times['stock']:.1f} us, ours {times[best]:.1f} ({best}), bound {row['bound_us']:.1f}"
    print(f"chain: experts, {rows} rows: {told}; from the twin {apart[0]:.1e}, ours {apart[1]:.1e}")
    return [row]


INDEX_ROWS = (1, 6)
# context, requests
INDEX = ((8192, 32), (32768, 8), (131072, 1), (131072, 8), (131072, 32), (1048512, 4))


def index(rows: int, speed: float, short: bool) -> list[dict[str, Any]]:
    """Scores of `rows` rows a request beside DeepGEMM's, which takes them one by one."""
    import deep_gemm

    from sglang_glm53.kernels.index_scores import paged_scores, paged_scores_torch

    heads, page, processors = 32, 64, 132
    found = []
    for context, requests in INDEX:
        each = -(-context // page)
        pages = requests * each + 1
        cache = torch.randint(0, 120, (pages, page * 132), dtype=torch.uint8, device="cuda")
        cache[:, page * 128 :] = torch.rand(pages, page, device="cuda").view(torch.uint8)
        table = (torch.randperm(pages - 1, device="cuda") + 1).int().view(requests, each)
        lengths = (context - rows + 1 + torch.arange(rows, device="cuda")).int()
        lengths = lengths.expand(requests, rows).contiguous()
        q = torch.randn(requests, rows, heads, 128, device="cuda").to(torch.float8_e4m3fn)
        gates = torch.randn(requests, rows, heads, device="cuda")
        scores = torch.empty(requests * rows, each * page, device="cuda")
        single = lengths.view(-1, 1)
        repeated = table.repeat_interleave(rows, 0).contiguous()
        keys = cache.view(pages, page, 1, 132)
        plan = deep_gemm.get_paged_mqa_logits_metadata(single, page, processors)

        def stock(
            q=q, gates=gates, keys=keys, single=single, repeated=repeated, plan=plan, width=each
        ) -> torch.Tensor:
            return deep_gemm.fp8_paged_mqa_logits(
                q.view(-1, 1, heads, 128), keys, gates.view(-1, heads), single, repeated, plan,
                width * page, clean_logits=False,
            )  # fmt: skip

        times: dict[str, float] = {}
        try:
            times["stock"] = time_graph([stock] * 8)
        except Exception as error:
            print(f"chain: DeepGEMM's scores: {' '.join(str(error).split())[:200]}", flush=True)
        for programs, stages, warps in itertools.product((132, 264, 396, 792), (2, 3), (4, 8)):
            how = {"programs": programs, "stages": stages, "warps": warps}
            run = partial(paged_scores, q, gates, cache, table, lengths, scores, **how)
            times[f"{programs}/{stages}/{warps}"] = time_graph([run] * 8, repeats=3)
        best = min((name for name in times if name != "stock"), key=times.__getitem__)
        bound = requests * context * 132 / speed * 1e6
        row = {"name": "index scores", "rows": rows, "context": context, "requests": requests}
        row |= {"stock_us": times.get("stock"), "ours_us": times[best], "setting": best}
        if context <= 8192:
            twin = torch.zeros_like(scores)
            scores.zero_()
            paged_scores(q, gates, cache, table, lengths, scores)
            paged_scores_torch(q, gates, cache, table, lengths, twin)
            row["apart"] = float((scores - twin).abs().max() / twin.abs().max())
        found.append({**row, "bound_us": bound, "times": times})
        print(
            f"chain: index scores, {requests} x {context}, {rows} rows: stock "
            f"{times.get('stock', float('nan')):.1f} us, ours {times[best]:.1f} ({best}), "
            f"keys once {bound:.1f}, apart {row.get('apart', float('nan')):.1e}",
            flush=True,
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="kernels of the decode chain on a GPU")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--short", action="store_true", help="fewer settings")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    speed = bandwidth()
    print(f"chain: a large copy reads and writes {speed / 1e12:.2f} TB/s", flush=True)
    runs = {
        "products": products,
        "rows": row_kernels,
        "absorbed": absorbed,
        "experts": routed,
        "index": index,
    }
    record: dict[str, Any] = {"bytes_per_second": speed, "rows": []}
    for part in args.only:
        for rows in args.rows if part != "index" else INDEX_ROWS:
            record["rows"] += runs[part](rows, speed, args.short)
            (args.out / "chain.json").write_text(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
