"""Runs our Triton kernels on a CPU, in Triton's interpreter, against their twins; prints "ok".

A process of its own (see test_page_kernels.py): the interpreter is chosen while Triton is imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sglang_glm53.kernels import page_copy, page_rows
from sglang_glm53.memory.arena import Arena
from sglang_glm53.memory.page import PageLayout, page_layout

PAGES = 7


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def main() -> None:
    """Every kernel over FP8 pages with the draft in them."""
    torch.manual_seed(0)
    layout = page_layout(
        full=[True, False, True],
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_dtype="fp8",
        draft_layers=1,
    )
    before = bytes_of(PAGES * layout.page_bytes)
    slots = torch.randperm(PAGES * 64)[:150]
    for layer in range(layout.layers):
        parts = bytes_of(150, 528), bytes_of(150, 128)
        for numbers in (slots, slots.int()):
            results = []
            for write in (page_rows.scatter_rows, page_rows.scatter_rows_torch):
                memory = before.clone()
                write(memory, layout.page_bytes, layout.latent_offset(layer), numbers, parts)
                results.append(memory)
            assert torch.equal(*results) and not torch.equal(results[0], before)
            row = layout.latent_address(layer, int(slots[17]))
            assert torch.equal(results[0][row : row + 528], parts[0][17])
            assert torch.equal(results[0][row + 528 : row + 656], parts[1][17])
        if not layout.holds_index(layer):
            continue
        staged, results = bytes_of(3, 8448), []
        for write in (page_rows.scatter_index, page_rows.scatter_index_torch):
            memory = before.clone()
            write(memory, layout.page_bytes, layout.index_offset(layer), slots, staged)
            results.append(memory)
        assert torch.equal(*results) and not torch.equal(results[0], before)
        key = layout.index_address(layer, int(slots[70]))
        assert torch.equal(results[0][key : key + 128], staged[1, 6 * 128 : 7 * 128])
    empty = slots[:0]
    page_rows.scatter_rows(before, layout.page_bytes, 0, empty, (bytes_of(0, 4), bytes_of(0, 4)))
    page_rows.scatter_index(before, layout.page_bytes, 0, empty, bytes_of(0, 8448))

    source, target = (bytes_of(PAGES, layout.page_bytes) for _ in range(2))
    to, origin = torch.tensor([5, 0, 6]), torch.tensor([1, 4, 2])
    for start, end in [(0, None), *(r[1:] for r in layout.ranges(3))]:
        results = []
        for copy in (page_copy.copy_pages, page_copy.copy_pages_torch):
            results.append(target.clone())
            copy(results[-1], source, to, origin, start, end)
        assert torch.equal(*results)
        assert torch.equal(results[0][5, start:end], source[1, start:end])
        assert torch.equal(results[0][1], target[1])
    page_copy.copy_pages(target, source, to[:0], origin[:0])
    gathered_by_sglang(layout)
    print("ok")


def gathered_by_sglang(layout: PageLayout) -> None:
    """SGLang's gather of index keys, over the view of a layer that the pool gives it."""
    try:
        from sglang.kernels.ops.kvcache.dsa_index_k_cache import _get_k_and_s_triton
    except ImportError:  # 0.5.22
        from sglang.kernels.ops.attention.dsa.index_buf_accessor import _get_k_and_s_triton

    arena = Arena(layout, bytes_of(PAGES * layout.page_bytes))
    keys = arena.index_keys(2, torch.uint8)
    view = keys.as_strided((1, keys.stride(0)), (keys.stride(0), 1))
    table, lengths = torch.tensor([[5, 2, 0], [1, 6, 3]]), torch.tensor([100, 192])
    key, scale = _get_k_and_s_triton(view, table, lengths, 292, 192, 64, 128)
    row = 0
    for request, length in zip(table, lengths.tolist(), strict=True):
        for token in range(length):
            page = keys[request[token // 64]]
            at = token % 64
            assert torch.equal(key[row], page[128 * at : 128 * at + 128])
            assert torch.equal(scale[row], page[8192 + 4 * at : 8196 + 4 * at])
            row += 1


if __name__ == "__main__":
    main()
