"""Where each byte of a token's cache lies. Pure Python: no torch, no sglang.

A page holds `PAGE_SIZE` tokens; slot `s` is token `s % PAGE_SIZE` of page `s // PAGE_SIZE`. Page 0
is never given to a request: padded rows write there.

Two layouts:

* `bf16+fp8-index`, SGLang's own. Latents: one row of kv_lora_rank + qk_rope_head_dim values a
  token and layer (the normed latent, then the rotated rope key). Index keys, full indexer layers
  only, one block a page: the FP8 (e4m3) keys of its 64 tokens, 128 bytes each, then their 64 fp32
  scales. key = fp8 * scale.
* `exact-fp32`, for `--dtype float32`: the same order, everything in fp32 and no scales.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_SIZE = 64
INDEX_HEAD_DIM = 128
SCALE_BYTES = 4
FLOAT32_BYTES = 4

REAL = "bf16+fp8-index"
EXACT = "exact-fp32"


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


def locate(slot: int, page_size: int = PAGE_SIZE) -> tuple[int, int]:
    """(page, token inside the page) of a cache slot."""
    return divmod(slot, page_size)


def latent_bytes(kv_lora_rank: int, qk_rope_head_dim: int, itemsize: int) -> int:
    """Bytes of one token's latent and rope key in one layer (GLM-5.3 in bf16: 1152)."""
    return (kv_lora_rank + qk_rope_head_dim) * itemsize


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
