"""Where each byte of a token's cache lies. Pure Python: no torch, no sglang.

A page holds `PAGE_SIZE` tokens; slot `s` is token `s % PAGE_SIZE` of page `s // PAGE_SIZE`. Page 0
is never given to a request: padded rows write there.

What a page holds, piece by piece:

* latents, every layer: one row a token, the normed latent and then the rotated rope key.
  576 bf16 values (1152 B); or FP8 (656 B): 512 e4m3 bytes, four fp32 scales of 128 values each, 64
  bf16 values; or, for `--dtype float32`, 576 fp32 values (2304 B).
* index keys, full indexer layers only: the e4m3 keys of the page's tokens, 128 B each, and then
  their fp32 scales, key = fp8 * scale (132 B a token); or, for `--dtype float32`, fp32 keys and no
  scales (512 B).

Where the pieces lie:

* layer-major, SGLang's own: one buffer a piece, and page p is part p of each. GLM-5.3 has 99.
* page-major: one buffer, and page p is one contiguous part of it, which `PageLayout` divides:

      arena   | page 0     | page 1     | page 2     | ...                  p * page_bytes
              +------------+------------+------------+---
                           |            |
              .------------'            '----------------------------------------.
              | layer 0    | index 0 | layer 1    | index 1 | layer 2 | index 2 |
              | layer 3    | layer 4 | layer 5    | layer 6 | index 6 | ...     |
              | layer 77   | draft   | draft's index                  | padding |
              '----------------------------------------------------------------'
                a layer's index keys follow its latents, the draft's layer comes last

      a piece of latents       token 0 | token 1 | ... | token 63      64 rows of row_bytes
      a piece of index keys    key 0 | key 1 | ... | key 63 | scale 0 | ... | scale 63

  So any run of layers is one run of bytes (`ranges`), and latents cannot part from the index keys
  and the draft's layer that belong to them. To a kernel, a layer is a view of the arena that steps
  by `page_bytes` from page to page and by `row_bytes` from token to token; there is no one step
  from token to token across pages.

A rank of a tensor-parallel group holds every byte (the latents are shared by all heads); a stage of
a pipeline holds its own layers: `full` lists those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

PAGE_SIZE = 64
INDEX_HEAD_DIM = 128
SCALE_BYTES = 4
FLOAT32_BYTES = 4
BF16_BYTES = 2
FP8_BLOCK = 128  # latents that share a scale

REAL = "bf16+fp8-index"
EXACT = "exact-fp32"

# What the kernels ask of an address: TMA (DeepGEMM's paged scores) and 16-byte loads (FlashMLA).
ACCESS_BYTES = 16

LATENT, INDEX = "latent", "index"


@dataclass(frozen=True)
class IndexPage:
    """One page of index keys of one layer; offsets and sizes in bytes from the page's start."""

    exact: bool
    page_size: int = PAGE_SIZE
    head_dim: int = INDEX_HEAD_DIM

    @property
    def key_bytes(self) -> int:
        """Bytes of one token's key."""
        return self.head_dim * (FLOAT32_BYTES if self.exact else 1)

    @property
    def scale_bytes(self) -> int:
        """Bytes of one token's scale; 0 where keys are not quantised."""
        return 0 if self.exact else SCALE_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes that one token costs: 512 exact, 132 quantised."""
        return self.key_bytes + self.scale_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of the whole page: 32768 exact, 8448 quantised."""
        return self.page_size * self.token_bytes

    @property
    def scales_start(self) -> int:
        """Where the scales begin, behind all keys."""
        return self.page_size * self.key_bytes

    def key_offset(self, slot_in_page: int) -> int:
        """Where the key of a token lies."""
        return slot_in_page * self.key_bytes

    def scale_offset(self, slot_in_page: int) -> int:
        """Where the scale of a token lies.

        Raises:
            ValueError: the exact layout has no scales.
        """
        if self.exact:
            raise ValueError(f"the {EXACT} layout has no scales")
        return self.scales_start + slot_in_page * SCALE_BYTES


@dataclass(frozen=True)
class Piece:
    """One layer's latents or index keys inside a page.

    layer: counted from this rank's first; the draft's layers follow the target's.
    offset, nbytes: in bytes, from the page's start.
    """

    layer: int
    kind: str
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class PageLayout:
    """A page in one piece: what is where, in bytes from the page's start.

    Attributes:
        row_bytes: one token's latents in one layer: 1152 (bf16), 656 (FP8), 2304 (fp32).
        index: a page of index keys of one layer.
        full: for each of this rank's layers, whether it is a full indexer layer.
        draft_layers: layers of the MTP draft behind the target's; each has index keys.
        alignment: a page's size is rounded up to a multiple of this many bytes. 1 on Hopper; other
            kernels may want more (FlashMLA on SM100: a multiple of a row's 656 B).
    """

    row_bytes: int
    index: IndexPage
    full: tuple[bool, ...]
    draft_layers: int = 0
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.row_bytes % ACCESS_BYTES or self.index.page_bytes % ACCESS_BYTES:
            raise ValueError(
                f"a row of latents has {self.row_bytes} B and a page of index keys "
                f"{self.index.page_bytes} B; both must be multiples of {ACCESS_BYTES} B"
            )
        if self.alignment < 1:
            raise ValueError(f"alignment is {self.alignment}; it must be 1 or more")

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.index.page_size

    @property
    def target_layers(self) -> int:
        return len(self.full)

    @property
    def layers(self) -> int:
        """The target's and the draft's."""
        return len(self.full) + self.draft_layers

    @property
    def latent_bytes(self) -> int:
        """Bytes of one layer's latents in a page (GLM-5.3: 73,728 in bf16, 41,984 in FP8)."""
        return self.row_bytes * self.page_size

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in the order in which they lie; no gap between them."""
        pieces: list[Piece] = []
        offset = 0
        for layer in range(self.layers):
            kinds = [(LATENT, self.latent_bytes)]
            if self.holds_index(layer):
                kinds.append((INDEX, self.index.page_bytes))
            for kind, nbytes in kinds:
                pieces.append(Piece(layer, kind, offset, nbytes))
                offset += nbytes
        return tuple(pieces)

    @cached_property
    def _offsets(self) -> dict[tuple[str, int], int]:
        return {(piece.kind, piece.layer): piece.offset for piece in self.pieces}

    def holds_index(self, layer: int) -> bool:
        """Whether a layer holds index keys: full indexer layers, and the draft's."""
        return layer >= len(self.full) or self.full[layer]

    def latent_offset(self, layer: int) -> int:
        """Where a layer's latents begin."""
        return self._offsets[LATENT, layer]

    def index_offset(self, layer: int) -> int:
        """Where a layer's index keys begin.

        Raises:
            KeyError: a layer without index keys.
        """
        return self._offsets[INDEX, layer]

    @property
    def used_bytes(self) -> int:
        """Bytes of all pieces."""
        return self.pieces[-1].end

    @property
    def page_bytes(self) -> int:
        """From one page to the next: `used_bytes` rounded up to the alignment."""
        return -(-self.used_bytes // self.alignment) * self.alignment

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft's pieces."""
        return self.draft_layers * (self.latent_bytes + self.index.page_bytes)

    def latent_address(self, layer: int, slot: int) -> int:
        """Where a token's latents of a layer begin in the arena."""
        page, token = locate(slot, self.page_size)
        return page * self.page_bytes + self.latent_offset(layer) + token * self.row_bytes

    def index_address(self, layer: int, slot: int) -> int:
        """Where a token's index key of a layer begins in the arena."""
        page, token = locate(slot, self.page_size)
        return page * self.page_bytes + self.index_offset(layer) + self.index.key_offset(token)

    def ranges(self, groups: int) -> tuple[tuple[int, int, int], ...]:
        """The page cut into at most `groups` runs of whole layers, about equal in bytes.

        Returns:
            (first layer of the target, start, end) of each, in order; together they are the used
            bytes. The draft's layers are in the last.
        """
        groups = max(1, min(groups, self.target_layers))
        firsts = sorted({self.target_layers * number // groups for number in range(groups)})
        starts = [self.latent_offset(layer) for layer in firsts]
        ends = [*starts[1:], self.used_bytes]
        return tuple(zip(firsts, starts, ends, strict=True))

    @property
    def tag(self) -> str:
        """Names the layout: two pages with the same tag have each byte at the same place."""
        full = "".join("x" if kind else "." for kind in self.full)
        runs = [full[0] + "1"]
        for kind in full[1:]:
            if kind == runs[-1][0]:
                runs[-1] = f"{kind}{int(runs[-1][1:]) + 1}"
            else:
                runs.append(kind + "1")
        return (
            f"glm53-page-major-1-{self.page_size}x{self.row_bytes}+{self.index.token_bytes}"
            f"-{''.join(runs)}-d{self.draft_layers}-{self.page_bytes}"
        )


def page_layout(
    *,
    full: Sequence[bool],
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    kv_dtype: str,
    draft_layers: int = 0,
    alignment: int = 1,
    page_size: int = PAGE_SIZE,
) -> PageLayout:
    """The page of a configuration.

    Args:
        full: for each layer of this rank (all, or a pipeline stage's), whether it runs its indexer.
        kv_dtype: "bf16", "fp8" or "fp32" (exact).
        draft_layers: 1 where the MTP draft's layer is in the page.

    Raises:
        ValueError: another kv_dtype, or rows that are no multiple of 16 bytes.
    """
    if kv_dtype == "fp8":
        row_bytes = fp8_row_bytes(kv_lora_rank, qk_rope_head_dim)
    elif kv_dtype in ("bf16", "fp32"):
        itemsize = FLOAT32_BYTES if kv_dtype == "fp32" else BF16_BYTES
        row_bytes = latent_bytes(kv_lora_rank, qk_rope_head_dim, itemsize)
    else:
        raise ValueError(f'kv_dtype is "{kv_dtype}"; it can be bf16, fp8 or fp32')
    index = IndexPage(exact=kv_dtype == "fp32", page_size=page_size)
    return PageLayout(row_bytes, index, tuple(full), draft_layers, alignment)


def locate(slot: int, page_size: int = PAGE_SIZE) -> tuple[int, int]:
    """(page, token inside the page) of a cache slot."""
    return divmod(slot, page_size)


def latent_bytes(kv_lora_rank: int, qk_rope_head_dim: int, itemsize: int) -> int:
    """Bytes of one token's latent and rope key in one layer (GLM-5.3 in bf16: 1152)."""
    return (kv_lora_rank + qk_rope_head_dim) * itemsize


def fp8_row_bytes(kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Bytes of one token in one layer, latents in FP8 and the rope key in bf16 (GLM-5.3: 656).

    Raises:
        ValueError: the latents are no multiple of 128, which share a scale.
    """
    if kv_lora_rank % FP8_BLOCK:
        raise ValueError(f"kv_lora_rank is {kv_lora_rank}, which is no multiple of {FP8_BLOCK}")
    scales = kv_lora_rank // FP8_BLOCK * SCALE_BYTES
    return kv_lora_rank + scales + qk_rope_head_dim * BF16_BYTES


def token_bytes(
    *,
    layers: int,
    full_layers: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    itemsize: int,
    exact: bool,
) -> int:
    """Bytes that one token costs over all layers (GLM-5.3 in bf16: 92,628)."""
    latents = layers * latent_bytes(kv_lora_rank, qk_rope_head_dim, itemsize)
    return latents + full_layers * IndexPage(exact=exact).token_bytes
