"""A page in one piece: sizes of GLM-5.3's, and properties of any configuration's."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_glm53.config import schedule
from sglang_glm53.memory.page import (
    ACCESS_BYTES,
    INDEX,
    LATENT,
    IndexPage,
    PageLayout,
    page_layout,
)

GLM = {
    "full": [kind == "full" for kind in schedule(78, 4, 3)],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}

layouts = st.builds(
    page_layout,
    full=st.lists(st.booleans(), min_size=1, max_size=90),
    # Four blocks of 128, or eight: then FP8's scales are a multiple of 16 bytes.
    kv_lora_rank=st.sampled_from([512, 1024]),
    qk_rope_head_dim=st.sampled_from([32, 64, 128]),
    kv_dtype=st.sampled_from(["bf16", "fp8", "fp32"]),
    draft_layers=st.integers(0, 3),
    alignment=st.sampled_from([1, 16, 128, 512, 656, 4096, 8448]),
)


@pytest.mark.parametrize(
    ("kv_dtype", "draft", "expected"),
    [
        ("fp8", 0, 3_452_160),
        ("fp8", 1, 3_502_592),
        ("bf16", 0, 5_928_192),
        ("bf16", 1, 6_010_368),
    ],
)
def test_a_page_of_glm_5_3(kv_dtype: str, draft: int, expected: int) -> None:
    layout = page_layout(**GLM, kv_dtype=kv_dtype, draft_layers=draft)
    assert sum(layout.full) == 21
    assert layout.page_bytes == layout.used_bytes == expected
    # 99 pieces without the draft, 101 with it.
    assert len(layout.pieces) == 99 + 2 * draft
    row = {"fp8": 656, "bf16": 1152}[kv_dtype]
    assert layout.row_bytes == row
    # A token costs what SGLang's budget counts for it: no token less for the same memory.
    assert layout.page_bytes == 64 * ((78 + draft) * row + (21 + draft) * 132)


def test_index_keys_follow_their_latents() -> None:
    layout = page_layout(**GLM, kv_dtype="fp8", draft_layers=1)
    assert (layout.latent_offset(0), layout.index_offset(0)) == (0, 41_984)
    assert layout.latent_offset(1) == 41_984 + 8_448
    assert layout.latent_offset(78) == 3_452_160 and layout.index_offset(78) == 3_494_144
    with pytest.raises(KeyError):
        layout.index_offset(3)
    assert layout.latent_address(1, 130) == 2 * 3_502_592 + 50_432 + 2 * 656
    assert layout.index_address(0, 65) == 3_502_592 + 41_984 + 128
    assert layout.draft_bytes == 41_984 + 8_448


def test_a_pipeline_stage_holds_its_layers() -> None:
    stages = [GLM["full"][:39], GLM["full"][39:]]
    sizes = [page_layout(**{**GLM, "full": stage}, kv_dtype="fp8").page_bytes for stage in stages]
    assert sum(sizes) == 3_452_160


@given(layouts)
def test_pieces_neither_overlap_nor_leave_a_gap(layout: PageLayout) -> None:
    end = 0
    for piece in layout.pieces:
        assert piece.offset == end
        end = piece.end
    assert end == layout.used_bytes
    seen = [(piece.kind, piece.layer) for piece in layout.pieces]
    latents = [layer for kind, layer in seen if kind == LATENT]
    assert latents == list(range(layout.layers))
    index = [layer for kind, layer in seen if kind == INDEX]
    assert index == [layer for layer in latents if layout.holds_index(layer)]


@given(layouts)
def test_addresses_suit_the_kernels(layout: PageLayout) -> None:
    for piece in layout.pieces:
        assert piece.offset % ACCESS_BYTES == 0 and piece.nbytes % ACCESS_BYTES == 0
    assert layout.row_bytes % ACCESS_BYTES == 0
    assert layout.page_bytes % layout.alignment == 0
    assert 0 <= layout.page_bytes - layout.used_bytes < layout.alignment


@given(layouts, st.data())
def test_no_two_tokens_share_a_byte(layout: PageLayout, data: st.DataObject) -> None:
    pages = 3
    rows = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, layout.layers - 1), st.integers(0, pages * layout.page_size - 1)
            ),
            min_size=2,
            max_size=20,
            unique=True,
        )
    )
    taken: list[tuple[int, int]] = []
    for layer, slot in rows:
        start = layout.latent_address(layer, slot)
        taken.append((start, start + layout.row_bytes))
        if layout.holds_index(layer):
            start = layout.index_address(layer, slot)
            taken.append((start, start + layout.index.key_bytes))
            if not layout.index.exact:
                page, token = divmod(slot, layout.page_size)
                base = page * layout.page_bytes + layout.index_offset(layer)
                start = base + layout.index.scale_offset(token)
                taken.append((start, start + 4))
    taken.sort()
    assert all(a[1] <= b[0] for a, b in zip(taken, taken[1:], strict=False))
    assert taken[0][0] >= 0 and taken[-1][1] <= pages * layout.page_bytes


@given(layouts, st.integers(1, 100))
def test_ranges_are_runs_of_whole_layers(layout: PageLayout, groups: int) -> None:
    ranges = layout.ranges(groups)
    assert 1 <= len(ranges) <= min(groups, layout.target_layers)
    assert ranges[0][:2] == (0, 0) and ranges[-1][2] == layout.used_bytes
    for (_, _, end), (first, start, _) in zip(ranges, ranges[1:], strict=False):
        assert end == start == layout.latent_offset(first)
    if groups <= layout.target_layers:
        assert len(ranges) == groups


@given(layouts, layouts)
def test_a_tag_names_one_layout(one: PageLayout, other: PageLayout) -> None:
    def places(layout: PageLayout) -> tuple[object, ...]:
        # Without the alignment: two that round to the same size are the same.
        return layout.row_bytes, layout.index, layout.full, layout.draft_layers, layout.page_bytes

    assert (one.tag == other.tag) == (places(one) == places(other))


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_dtype"):
        page_layout(**GLM, kv_dtype="fp4")
    with pytest.raises(ValueError, match="multiple of 128"):
        page_layout(full=[True], kv_lora_rank=96, qk_rope_head_dim=64, kv_dtype="fp8")
    with pytest.raises(ValueError, match="alignment"):
        page_layout(**GLM, kv_dtype="fp8", alignment=0)
    with pytest.raises(ValueError, match="multiples of 16"):
        page_layout(full=[True], kv_lora_rank=256, qk_rope_head_dim=64, kv_dtype="fp8")
    with pytest.raises(ValueError, match="multiples of 16"):
        PageLayout(row_bytes=3, index=IndexPage(exact=False, page_size=1), full=(True,))


def test_other_chips_may_ask_for_more() -> None:
    layout = page_layout(**GLM, kv_dtype="fp8", alignment=656)
    assert layout.page_bytes == math.ceil(3_452_160 / 656) * 656 == 3_452_528
