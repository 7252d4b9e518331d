"""The kernels of the decode chain on a CPU, in Triton's interpreter, against their twins.

Prints "ok". A process of its own (see test_chain_kernels.py).
"""

from __future__ import annotations

import torch
import triton_on_cpu  # noqa: F401  (before anything that imports Triton)

from sglang_glm53.kernels import (
    absorb,
    act_quant,
    experts,
    few_rows,
    index_scores,
    latents,
    norm_quant,
)
from sglang_glm53.kernels.fp8 import dequantise_groups, quantise_groups

# What rows may hold: scales of the values, zeros, and the largest that bf16 sums bear.
SCALES = (1.0, 0.0, 1e-20, 1e15)
PAGE = 64


def rows_of(rows: int, width: int) -> torch.Tensor:
    """Random rows, each of another size; a zero row among four or more."""
    sizes = torch.tensor([SCALES[i % len(SCALES)] for i in range(rows)])
    return (torch.randn(rows, width) * sizes[:, None]).bfloat16()


def same(left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> None:
    """Equal in every bit, and laid out alike."""
    for a, b in zip(left, right, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        assert torch.equal(*(t.flatten().clone().view(torch.uint8) for t in (a, b)))


def near(left: torch.Tensor, right: torch.Tensor, limit: float) -> None:
    """Rows apart by at most `limit` times the row's largest value."""
    apart = (left.float() - right.float()).abs().amax(-1)
    assert bool((apart <= limit * right.float().abs().amax(-1)).all()), apart


def poisoned_empty() -> None:
    """What a kernel does not write stays NaN (e4m3 and bf16 alike) and would differ."""
    plain = torch.empty

    def empty(*shape: object, **options: object) -> torch.Tensor:
        made = plain(*shape, **options)
        made.view(torch.uint8).fill_(0xFF)
        return made

    torch.empty = empty
    torch.empty_like = lambda like, **options: empty(
        like.shape, **{"dtype": like.dtype, "device": like.device, **options}
    )


def check_norm() -> None:
    for rows, width in ((1, 6144), (5, 384), (4, 2048), (0, 256)):
        x, weight = rows_of(rows, width), torch.randn(width).bfloat16()
        for residual in (None, rows_of(rows, width)):
            for bf16 in (True, False):
                results, sums = [], []
                for run in (norm_quant.add_norm_quant, norm_quant.add_norm_quant_torch):
                    own = None if residual is None else residual.clone()
                    normed = run(x, own, weight, 1e-5, bf16=bf16)
                    results.append((normed.fp8, normed.scales, normed.bf16))
                    sums.append((own,))
                same(*results)
                same(*sums)


def check_activation() -> None:
    for rows, width in ((1, 2048), (6, 384), (0, 128)):
        gate_up = rows_of(rows, 2 * width).clamp(-1e15, 1e15)
        for row_major in (False, True):
            same(
                act_quant.silu_mul_quant(gate_up, row_major=row_major),
                act_quant.silu_mul_quant_torch(gate_up, row_major=row_major),
            )


def check_latents() -> None:
    table = torch.rand(128, 64)
    for rows, page in ((1, PAGE * 656), (5, PAGE * 656 + 8448), (0, PAGE * 656)):
        joined = rows_of(rows, 2048 + 576)
        gains = [torch.randn(width).bfloat16() for width in (2048, 512)]
        positions, slots = torch.randint(128, (rows,)), torch.randperm(3 * PAGE)[:rows]
        before = torch.randint(0, 256, (3 * page,), dtype=torch.uint8)
        results = []
        for run in (latents.latents, latents.latents_torch):
            memory = before.clone()
            cache = memory.as_strided((3, PAGE, 656), (page, 656, 1))
            query = run(joined, *gains, 1e-5, table, positions, cache, slots)
            results.append((*query, memory))
        same(*results)
        assert rows == 0 or not torch.equal(results[0][2], before)


def check_absorb() -> None:
    table = torch.rand(128, 64)
    for heads, nope, v, rows in (
        (3, 192, 256, 1),
        (8, 192, 256, 17),
        (2, 64, 128, 5),
        (2, 64, 128, 0),
    ):
        weight = torch.randn(heads * (nope + v), 512).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-heads * (nope + v) // 128), 4)
        q, positions = rows_of(rows, heads * (nope + 64)), torch.randint(128, (rows,))
        shape = {"heads": heads, "v_head_dim": v}
        folded = [
            run(q, weight, scale, table, positions, **shape)
            for run in (absorb.fold_queries, absorb.fold_queries_torch)
        ]
        near(*folded, 2**-7)  # a rounding of bf16 may fall to the other side
        same(*((part[..., 512:],) for part in folded))
        attended = rows_of(rows * heads, 512).view(rows, heads, 512)
        values = [
            run(attended, weight, scale, v_head_dim=v)
            for run in (absorb.unfold_values, absorb.unfold_values_torch)
        ]
        near(*(dequantise_groups(*part) for part in values), 2**-3)  # of e4m3, likewise
        assert (
            float((values[0][0].float() != values[1][0].float()).float().mean() if rows else 0)
            < 0.01
        )


def check_few_rows() -> None:
    for rows, outer, inner, tile, split in (
        (1, 512, 1024, 64, 1),
        (3, 320, 1024, 64, 3),
        (17, 256, 1152, 128, 9),
        (32, 128, 256, 128, 2),
        (0, 128, 256, 64, 2),
    ):
        weight = torch.randn(outer, inner).to(torch.float8_e4m3fn)
        scale = torch.rand(-(-outer // 128), inner // 128)
        x = quantise_groups(rows_of(rows, inner))
        few = few_rows.FewRows("cpu")
        first = few.matmul(x, weight, scale, tile=tile, split=split)
        near(first, few_rows.matmul_torch(x, weight, scale), 2**-7)
        same((first,), (few.matmul(x, weight, scale, tile=tile, split=split),))  # counters are back
        if outer % 256 == 0:
            gated = few.gate_up(x, weight, scale, split=split)
            near(
                dequantise_groups(*gated),
                dequantise_groups(*few_rows.gate_up_torch(x, weight, scale)),
                2**-3,
            )
            same(gated, few.gate_up(x, weight, scale, split=split))
    for bad in ({"split": 3}, {"tile": 96}):
        try:
            few.matmul(quantise_groups(torch.ones(1, 256).bfloat16()), weight, scale, **bad)
        except ValueError:
            continue
        raise AssertionError(f"{bad} was taken")


def check_experts() -> None:
    count, hidden, width = 5, 384, 256
    pairs = [
        (torch.randn(count, *shape).to(torch.float8_e4m3fn), torch.rand(count, *scale))
        for shape, scale in (
            ((2 * width, hidden), (2 * width // 128, hidden // 128)),
            ((hidden, width), (hidden // 128, width // 128)),
        )
    ]
    for rows, choices in ((1, 2), (3, 4), (17, 2), (0, 2)):
        # Experts of other ranks, -1 and one past the end: such choices count nothing.
        chosen = torch.rand(rows, count + 2).argsort(1)[:, :choices].int() - 1
        inputs = quantise_groups(rows_of(rows, hidden).clamp(-1e3, 1e3)), *pairs, chosen
        weight = torch.rand(rows, choices)
        here = (chosen >= 0) & (chosen < count)
        parts = [run(*inputs, weight) for run in (experts.expert_parts, experts.expert_parts_torch)]
        near(parts[0][here], parts[1][here], 2**-6)
        assert bool(parts[0][~here].isnan().all())  # left as they were
        for shared in (None, torch.randn(rows, hidden).bfloat16()):
            more = parts[0], chosen, count, shared
            same(
                (experts.sum_parts(*more, factor=2.5),),
                (experts.sum_parts_torch(*more, factor=2.5),),
            )


def check_index_scores() -> None:
    heads = 4
    for rows, page in ((1, 8448), (6, 8448), (7, 8448 + 4096), (8, 8448)):
        memory = torch.randint(0, 120, (13 * page,), dtype=torch.uint8)  # e4m3, positive and small
        cache = memory.as_strided((13, 8448), (page, 1))
        cache[:, 8192:] = torch.rand(13, PAGE).view(torch.uint8)
        table = (torch.randperm(12)[:10] + 1).view(2, 5).int()
        lengths = (torch.tensor([[64 - rows + 1], [230]]) + torch.arange(rows)).int()
        q = torch.randn(2, rows, heads, 128).to(torch.float8_e4m3fn)
        gates = torch.randn(2, rows, heads)
        ours, twin = (torch.full((2 * rows, 320), float("nan")) for _ in range(2))
        index_scores.paged_scores(q, gates, cache, table, lengths, ours, programs=6)
        index_scores.paged_scores_torch(q, gates, cache, table, lengths, twin)
        seen = ~twin.isnan()
        assert torch.equal(seen, ~ours.isnan())  # and nothing written beyond what a row sees
        assert bool(((ours - twin)[seen].abs() <= 1e-5 * twin[seen].abs().max()).all())


if __name__ == "__main__":
    torch.manual_seed(0)
    poisoned_empty()
    check_norm()
    check_activation()
    check_latents()
    check_absorb()
    check_few_rows()
    check_experts()
    check_index_scores()
    print("ok")
