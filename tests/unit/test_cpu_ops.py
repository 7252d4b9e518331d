"""The torch versions of SGLang's CPU ops, against loops over requests and tokens."""

from __future__ import annotations

import importlib
import random

import pytest
import torch

from sglang_glm53.compat import sgl_kernel_cpu as ops

POOL_LEN = 40


@pytest.fixture
def table() -> torch.Tensor:
    return torch.arange(7 * POOL_LEN, dtype=torch.int32).view(7, POOL_LEN).flip(1).contiguous()


def test_writing_new_slots(table: torch.Tensor) -> None:
    requests = torch.tensor([4, 1, 6])
    start, end = torch.tensor([3, 0, 10]), torch.tensor([5, 0, 14])
    new = torch.arange(1000, 1006)
    expected = table.clone()
    expected[4, 3:5] = torch.tensor([1000, 1001])
    expected[6, 10:14] = torch.tensor([1002, 1003, 1004, 1005])
    ops.assign_req_to_token_pool_cpu(requests, table, start, end, new, POOL_LEN)
    assert torch.equal(table, expected)


def test_reading_slots_of_a_range(table: torch.Tensor) -> None:
    requests = torch.tensor([4, 1, 6])
    start, end = torch.tensor([3, 0, 10]), torch.tensor([5, 2, 10])
    out = torch.full((6,), -7, dtype=torch.int64)
    ops.assign_extend_cache_locs_cpu(requests, table, start, end, out, POOL_LEN)
    expected = table[4, 3:5].tolist() + table[1, 0:2].tolist() + [-7, -7]
    assert out.tolist() == expected


@pytest.mark.parametrize("steps", [1, 5])
def test_reading_the_draft_slots(table: torch.Tensor, steps: int) -> None:
    requests, lengths = torch.tensor([2, 5], dtype=torch.int32), torch.tensor([9, 0])
    out = torch.empty(2 * steps, dtype=torch.int64)
    ops.assign_draft_cache_locs_contiguous_cpu(requests, table, lengths, out, POOL_LEN, 1, steps)
    assert out.tolist() == table[2, 9 : 9 + steps].tolist() + table[5, :steps].tolist()


def test_bonus_tokens() -> None:
    accepted = torch.tensor([[5, 6, 7], [8, 9, 0], [3, 0, 0]], dtype=torch.int32)
    bonus = torch.empty(3, dtype=torch.int32)
    lengths = torch.tensor([3, 2, 1], dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(accepted, lengths, bonus, 3)
    assert bonus.tolist() == [7, 9, 3]
    ops.fill_bonus_tokens_cpu(accepted.flatten(), lengths, bonus, 3)
    assert bonus.tolist() == [7, 9, 3]


def test_slots_of_accepted_tokens() -> None:
    index = torch.tensor([[0, 1, -1], [3, -1, -1]], dtype=torch.int32)
    out = torch.zeros(6, dtype=torch.int64)
    ops.fill_accept_out_cache_loc_cpu(index, torch.arange(50, 56), out)
    assert out.tolist() == [50, 51, 53, 0, 0, 0]


def chain(lengths: list[int], nodes: int, mode: int):
    """Inputs as SGLang makes them for topk 1, and what the op wrote."""
    requests = len(lengths)
    size = requests * nodes * nodes + (sum(lengths) * nodes if mode == 0 else 0)
    mask = torch.full((size,), True)
    positions = torch.empty(requests * nodes, dtype=torch.long)
    index, child, sibling = torch.full((3, requests, nodes), -1)
    ops.build_tree_kernel_efficient_cpu(
        torch.arange(-1, nodes - 2).repeat(requests, 1),
        torch.arange(nodes - 1).repeat(requests, 1),
        torch.tensor(lengths),
        mask,
        positions,
        index,
        child,
        sibling,
        1,
        nodes - 1,
        nodes,
        mode,
    )
    return mask, positions, index, child, sibling


@pytest.mark.parametrize("nodes", [1, 2, 6])
def test_draft_chains(nodes: int) -> None:
    lengths = [7, 1, 12]
    mask, positions, index, child, sibling = chain(lengths, nodes, 0)
    start = 0
    for request, length in enumerate(lengths):
        for node in range(nodes):
            row = request * nodes + node
            assert positions[row] == length + node
            assert index[request, node] == row
            assert child[request, node] == (node + 1 if node + 1 < nodes else -1)
            assert sibling[request, node] == -1
            seen = mask[start : start + length + nodes].tolist()
            assert seen == [True] * (length + node + 1) + [False] * (nodes - node - 1)
            start += length + nodes
    assert start == mask.numel()


def test_draft_chains_with_a_mask_of_the_new_tokens_only() -> None:
    mask, *_ = chain([7, 1], 3, 1)
    expected = torch.ones(3, 3).tril().bool()
    assert torch.equal(mask.view(2, 3, 3), expected.expand(2, 3, 3))


def test_trees_are_refused() -> None:
    nothing = torch.empty(0)
    with pytest.raises(NotImplementedError, match="topk 4"):
        ops.build_tree_kernel_efficient_cpu(*[nothing] * 8, 4, 2, 8, 0)
    with pytest.raises(NotImplementedError, match="mask mode 2"):
        ops.build_tree_kernel_efficient_cpu(*[nothing] * 8, 1, 2, 3, 2)


def verify_one(candidates: list[int], target: list[int]) -> tuple[list[int], list[int]]:
    """Accepted nodes after node 0, and the target's tokens at node 0 and at those."""
    nodes = [0]
    while nodes[-1] + 1 < len(candidates) and candidates[nodes[-1] + 1] == target[nodes[-1]]:
        nodes.append(nodes[-1] + 1)
    return nodes[1:], [target[node] for node in nodes]


@pytest.mark.parametrize("nodes", [1, 2, 4, 6])
def test_greedy_verification(nodes: int) -> None:
    dice = random.Random(nodes)
    requests = 50
    # Two possible tokens: about half of the drafts match, so every accept length occurs.
    candidates = [[dice.randrange(2) for _ in range(nodes)] for _ in range(requests)]
    target = [[dice.randrange(2) for _ in range(nodes)] for _ in range(requests)]
    _, _, index, child, sibling = chain([3] * requests, nodes, 1)
    predicts = torch.full((requests * nodes,), -9, dtype=torch.int32)
    accept_index = torch.full((requests, nodes), -1, dtype=torch.int32)
    accepted = torch.empty(requests, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=torch.tensor(candidates),
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=torch.tensor(target),
    )
    seen = set()
    for request in range(requests):
        drafts, tokens = verify_one(candidates[request], target[request])
        seen.add(len(drafts))
        first = request * nodes
        rows = [first] + [first + node for node in drafts]
        assert accepted[request] == len(drafts)
        assert accept_index[request].tolist() == rows + [-1] * (nodes - len(rows))
        expected = [-9] * nodes
        expected[: len(tokens)] = tokens
        assert predicts[first : first + nodes].tolist() == expected
    assert seen == set(range(nodes)) or nodes == 6


def test_rotating_input_ids() -> None:
    ids = torch.arange(10, 19)
    start, lengths = torch.tensor([0, 4, 4]), torch.tensor([4, 0, 5])
    new = torch.tensor([[100], [101], [102]])
    ops.rotate_input_ids_cpu(ids, start, lengths, new)
    assert ids.tolist() == [11, 12, 13, 100, 15, 16, 17, 18, 102]
    ops.rotate_input_ids_cpu(ids, start[:1], lengths[:1], new[:1], torch.tensor([1]))
    assert ids.tolist()[:4] == [12, 100, 100, 100]


def test_copying_cache_rows() -> None:
    first, second = torch.randn(9, 2, 3), torch.randn(9, 5).to(torch.bfloat16)
    expected = [first.clone(), second.clone()]
    for buffer in expected:
        buffer[[2, 3, 8]] = buffer[[3, 4, 0]]
    ops.copy_all_layer_kv_cache_cpu(
        torch.tensor([first.data_ptr(), second.data_ptr()], dtype=torch.uint64),
        torch.tensor([first[0].nbytes, second[0].nbytes]),
        torch.tensor([2, 3, 8]),
        torch.tensor([3, 4, 0]),
    )
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def test_sglang_finds_every_op_that_it_imports() -> None:
    importlib.import_module("sglang.srt.utils")  # puts our module in the place of sgl_kernel
    import sys

    if sys.modules.get("sgl_kernel") is not ops:
        pytest.skip("the real sgl_kernel is installed and imports here")
    for name in (
        "sglang.kernels.ops.kvcache.cache_move",
        "sglang.kernels.ops.speculative.eagle",
        "sglang.kernels.ops.speculative.multi_layer_eagle",
        "sglang.kernels.ops.speculative.cache_locs",
        "sglang.kernels.ops.speculative.spec_tree",
        "sglang.srt.mem_cache.allocation",
        "sglang.srt.speculative.eagle_worker_v2",
    ):
        importlib.import_module(name)
    with pytest.raises(ImportError):
        importlib.import_module("sgl_kernel.allreduce")
