"""The KV pool: byte layout of both formats, reads, writes, moves, host copies and sizing."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
import torch
from dsa_fakes import PAGE, both_modes, make_pool, single_rank, stored_rows  # noqa: F401

from sglang_glm53.memory import page as layout
from sglang_glm53.memory import pool as pool_module
from sglang_glm53.memory.page import IndexPage
from sglang_glm53.memory.pool import count_exact_index_bytes
from sglang_glm53.memory.quantise import fp8_values, quantise_index_key

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["exact", "real"])
LAYER = SimpleNamespace(layer_id=0)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scattered(count: int, pool, seed: int = 1) -> torch.Tensor:
    """Distinct slots outside page 0."""
    order = torch.randperm(pool.size, generator=torch.Generator().manual_seed(seed))
    return order[:count] + PAGE


# Layout


def test_the_page_arithmetic() -> None:
    real, exact = IndexPage(exact=False), IndexPage(exact=True)
    assert (real.token_bytes, real.page_bytes, real.scales_start) == (132, 8448, 8192)
    assert (exact.token_bytes, exact.page_bytes) == (512, 32768)
    assert real.key_offset(63) == 8064 and real.scale_offset(63) == 8192 + 252
    assert exact.key_offset(1) == 512
    with pytest.raises(ValueError, match="no scales"):
        exact.scale_offset(0)
    assert layout.locate(130) == (2, 2)


def test_bytes_of_a_token_of_glm_5_3() -> None:
    glm = {"layers": 78, "full_layers": 21, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert layout.token_bytes(**glm, itemsize=2, exact=False) == 92_628
    assert layout.token_bytes(**glm, itemsize=4, exact=True) == 78 * 2304 + 21 * 512


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "exact-fp32"), (torch.bfloat16, "bf16+fp8-index")]
)
def test_the_dtype_decides_the_layout(dtype: torch.dtype, name: str) -> None:
    pool = make_pool(3, dtype)
    assert pool.layout == name
    assert pool.kv_buffer[0].dtype == dtype
    exact = dtype == torch.float32
    index = pool.index_k_with_scale_buffer[0]
    assert index.dtype == (torch.float32 if exact else torch.uint8)
    # SGLang rounds the number of pages up by one token, which never makes a page less.
    assert index.shape[0] >= 3
    assert index[0].nbytes == IndexPage(exact=exact).page_bytes


@BOTH
def test_layers_that_share_a_selection_hold_no_index_keys(dtype: torch.dtype) -> None:
    pool = make_pool(3, dtype, layers=3, skip=[False, True, False])
    assert [buffer.shape[0] > 0 for buffer in pool.index_k_with_scale_buffer] == [
        True,
        False,
        True,
    ]
    exact = dtype == torch.float32
    pages = pool.index_k_with_scale_buffer[0].shape[0]
    latents = 3 * 3 * PAGE * 576 * dtype.itemsize
    assert pool.get_kv_size_bytes() == latents + 2 * pages * IndexPage(exact=exact).page_bytes


def test_a_page_has_the_bytes_that_sglang_documents() -> None:
    # 64 keys of 128 FP8 bytes, then 64 fp32 scales; key = fp8 * scale.
    pool = make_pool(4, torch.bfloat16)
    slots = scattered(100, pool)
    keys = normal(100, 128) * normal(100, 1, seed=5).exp()
    pool.set_index_k(0, slots, keys)
    for slot, key in zip(slots.tolist(), keys, strict=True):
        number, offset = divmod(slot, 64)
        raw = bytes(pool.index_k_with_scale_buffer[0][number].tolist())
        (scale,) = struct.unpack_from("<f", raw, 64 * 128 + 4 * offset)
        assert scale == pytest.approx(key.abs().max().item() / 448, rel=1e-6)
        stored = torch.tensor(list(raw[offset * 128 : (offset + 1) * 128]), dtype=torch.uint8)
        expected = (key * (1 / torch.tensor(scale))).to(torch.float8_e4m3fn)
        assert torch.equal(stored, expected.view(torch.uint8))


def test_quantisation_survives_extreme_keys() -> None:
    keys = torch.stack([torch.zeros(128), torch.full((128,), 3e38), torch.full((128,), 1e-8)])
    fp8, scale = quantise_index_key(keys)
    assert fp8.float().isfinite().all()
    assert scale[0] == scale[2] == torch.tensor(1e-4) / 448
    assert scale[1].isfinite() and (fp8[1].float() == 448).all()


def test_every_fp8_byte_has_its_value() -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    expected = stored.view(torch.float8_e4m3fn).float()
    numbers = expected.isfinite()
    assert numbers.sum() == 254
    assert torch.equal(fp8_values(stored)[numbers], expected[numbers])
    grid = stored.view(2, 8, 16)[:, :, ::2]
    assert torch.equal(fp8_values(grid), fp8_values(grid.contiguous()))


# Reads and writes


@BOTH
def test_index_keys_come_back(dtype: torch.dtype) -> None:
    pool = make_pool(5, dtype)
    slots, keys = scattered(150, pool), normal(150, 128)
    pool.set_index_k(1, slots, keys)
    back = pool.get_index_k(1, slots)
    assert back.dtype == torch.float32 and back.shape == (150, 128)
    if dtype == torch.float32:
        assert torch.equal(back, keys)
    else:
        # e4m3 has 3 mantissa bits: half a step is 1/16 of the value.
        error = (back - keys).abs() / keys.abs().amax(dim=1, keepdim=True)
        assert error.max() < 1 / 16
    assert (pool.get_index_k(0, slots) == 0).all()


@BOTH
@pytest.mark.parametrize("pages", [slice(1, 4), torch.tensor([3, 1])], ids=["slice", "list"])
def test_whole_pages_of_index_keys(dtype: torch.dtype, pages: slice | torch.Tensor) -> None:
    pool = make_pool(5, dtype)
    slots = scattered(200, pool)
    pool.set_index_k(0, slots, normal(200, 128))
    keys, scales = pool.get_index_pages(0, pages)
    numbers = torch.arange(5)[pages]
    read = (numbers.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
    if scales is not None:
        keys = keys * scales.unsqueeze(1)
    assert (scales is None) == (dtype == torch.float32)
    torch.testing.assert_close(keys, pool.get_index_k(0, read), rtol=0, atol=0)


@BOTH
def test_latents_come_back(dtype: torch.dtype) -> None:
    pool = make_pool(4, dtype)
    slots, nope, rope = scattered(90, pool), normal(90, 1, 512), normal(90, 1, 64)
    pool.set_mla_kv_buffer(LAYER, slots, nope, rope)
    latent, key = pool.get_mla_kv_buffer(LAYER, slots)
    assert latent.shape == (90, 1, 512) and key.shape == (90, 1, 64)
    assert torch.equal(latent, nope.to(dtype)) and torch.equal(key, rope.to(dtype))
    latent, _ = pool.get_mla_kv_buffer(LAYER, slots, torch.float32)
    assert latent.dtype == torch.float32
    row = stored_rows(pool.get_key_buffer(0), slots)
    assert torch.equal(row, torch.cat([nope, rope], dim=-1).to(dtype))
    assert torch.equal(stored_rows(pool.get_value_buffer(0), slots), nope.to(dtype))
    assert torch.equal(pool.latent_rows(0, slots), row.flatten(1).float())
    assert (pool.get_key_buffer(1) == 0).all()


@BOTH
def test_moved_tokens_keep_latents_and_index_keys(dtype: torch.dtype) -> None:
    pool = make_pool(6, dtype, layers=3, skip=[False, True, False])
    slots = scattered(250, pool)
    for layer in (0, 2):
        pool.set_index_k(layer, slots, normal(250, 128, seed=layer))
    for layer in range(3):
        pool.set_mla_kv_buffer(
            SimpleNamespace(layer_id=layer),
            slots,
            normal(250, 1, 512, seed=layer),
            normal(250, 1, 64),
        )
    source, target = slots[:20], slots[100:120]
    expected = {
        "keys": [pool.get_index_k(layer, source) for layer in (0, 2)],
        "latents": [pool.latent_rows(layer, source) for layer in range(3)],
    }
    still = slots[120:]
    kept = pool.get_index_k(0, still)
    pool.move_kv_cache(target, source)
    for layer, keys in zip((0, 2), expected["keys"], strict=True):
        assert torch.equal(pool.get_index_k(layer, target), keys)
    for layer, rows in enumerate(expected["latents"]):
        assert torch.equal(pool.latent_rows(layer, target), rows)
    # Neighbours on the same pages stay as they were.
    assert torch.equal(pool.get_index_k(0, still), kept)
    pool.move_kv_cache(target[:0], source[:0])


@BOTH
def test_host_copies_of_a_request(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(9, dtype, layers=2, skip=[False, True])
    monkeypatch.setattr(pool, "cpu_offloading_chunk_size", 128)
    pages = torch.tensor([7, 2, 5, 4])
    slots = (pages.unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
    pool.set_index_k(0, slots, normal(256, 128))
    pool.set_mla_kv_buffer(LAYER, slots, normal(256, 1, 512), normal(256, 1, 64))
    keys, rows = pool.get_index_k(0, slots), pool.latent_rows(0, slots)
    saved = pool.get_cpu_copy(slots)
    pool.set_index_k(0, slots, torch.zeros(256, 128))
    pool.get_key_buffer(0).zero_()
    # The request comes back to other pages.
    elsewhere = (torch.tensor([1, 8, 3, 6]).unsqueeze(1) * PAGE + torch.arange(PAGE)).flatten()
    pool.load_cpu_copy(saved, elsewhere)
    assert torch.equal(pool.get_index_k(0, elsewhere), keys)
    assert torch.equal(pool.latent_rows(0, elsewhere), rows)


# Sizing


def test_sizing_counts_the_exact_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def stock(self, *, kvc, num_layers, allocate_all_layers=False) -> int:
        return 132 * num_layers

    count = count_exact_index_bytes(stock)
    ours = True
    monkeypatch.setattr(pool_module, "builds_our_pool", lambda: ours)
    exact = SimpleNamespace(kv_cache_dtype=torch.float32)
    real = SimpleNamespace(kv_cache_dtype=torch.bfloat16)
    assert count(None, kvc=exact, num_layers=4) == 4 * 512
    assert count(None, kvc=exact, num_layers=1, allocate_all_layers=True) == 512
    assert count(None, kvc=real, num_layers=4) == 4 * 132
    ours = False
    assert count(None, kvc=exact, num_layers=4) == 4 * 132


@BOTH
def test_sizing_agrees_with_what_is_allocated(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "builds_our_pool", lambda: True)

    def stock(self, *, kvc, num_layers, allocate_all_layers=False) -> int:
        return 132 * num_layers

    kvc = SimpleNamespace(kv_cache_dtype=dtype)
    count = count_exact_index_bytes(stock)(None, kvc=kvc, num_layers=2)
    pool = make_pool(200, dtype, layers=3, skip=[False, True, False])
    index_bytes = sum(buffer.nbytes for buffer in pool.index_k_with_scale_buffer)
    tokens = 199 * PAGE
    # What is not counted is page 0 and at most one more page.
    assert 0 <= index_bytes - count * tokens <= 2 * 2 * IndexPage(exact=pool.exact).page_bytes
