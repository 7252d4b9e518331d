"""Page-major pools: the same bytes as layer-major, the draft in the target's pages, page copies."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dsa_fakes import PAGE, make_pool, single_rank, stored_rows  # noqa: F401

from sglang_glm53.errors import Glm53Error
from sglang_glm53.kernels import page_copy
from sglang_glm53.memory import arena, mode
from sglang_glm53.memory.pool import GlmTokenToKVPool
from sglang_glm53.memory.quantise import dequantise_latents, quantise_latents

DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn],
    ids=["exact", "bf16", "fp8"],
)
SKIP = [False, True, False]
EAGLE = {"speculative_algorithm": "EAGLE"}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def page_major(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM53_POOL", "page")
    monkeypatch.setattr(arena, "_offered", None)


@pytest.fixture
def served_with(monkeypatch: pytest.MonkeyPatch):
    """Sets the arguments of the server that the pools belong to."""

    def serve(**arguments: object) -> None:
        monkeypatch.setattr(mode, "published", lambda: arguments.get)

    serve()
    return serve


def fill(pool: GlmTokenToKVPool, slots: torch.Tensor, seed: int = 0) -> None:
    """Latents in every layer and index keys where there are any, different in each."""
    for layer in range(pool.layer_num):
        number = layer + pool.start_layer
        name = SimpleNamespace(layer_id=number)
        nope, rope = (normal(len(slots), 1, w, seed=seed + 10 * layer) for w in (512, 64))
        pool.set_mla_kv_buffer(name, slots, nope, rope)
        if pool.index_key_cache.buffer[layer].shape[0]:
            pool.set_index_k(number, slots, normal(len(slots), 128, seed=seed + layer))


@DTYPES
def test_both_modes_hold_the_same_bytes(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = []
    for asked in ("page", "layer"):
        monkeypatch.setenv("GLM53_POOL", asked)
        pools.append(make_pool(6, dtype, layers=3, skip=SKIP, start=2))
    page, layer = pools
    assert page.share is not None and layer.share is None
    slots = torch.randperm(5 * PAGE, generator=torch.Generator().manual_seed(1))[:200] + PAGE
    for pool in pools:
        fill(pool, slots)
    every = torch.arange(6)
    assert torch.equal(page.read_pages(every), layer.read_pages(every))
    assert page.get_kv_size_bytes() == layer.get_kv_size_bytes()
    for number in (2, 3, 4):
        assert torch.equal(page.latent_rows(number, slots), layer.latent_rows(number, slots))
        for side in ("get_key_buffer", "get_value_buffer"):
            rows = [stored_rows(getattr(pool, side)(number), slots) for pool in pools]
            assert torch.equal(*(part.contiguous().view(torch.uint8) for part in rows))
    if dtype != torch.float8_e4m3fn:
        name, both = SimpleNamespace(layer_id=3), normal(9, 1, 576, seed=9)
        for pool in pools:
            pool.set_kv_buffer(name, slots[:9], both.to(dtype), both[..., :512].to(dtype))
        assert torch.equal(page.read_pages(every), layer.read_pages(every))
    for pool in pools:
        pool.move_kv_cache(slots[:30], slots[100:130])
    assert torch.equal(page.read_pages(every), layer.read_pages(every))


@DTYPES
def test_each_byte_is_where_the_layout_says(dtype: torch.dtype, served_with) -> None:
    served_with(**EAGLE)
    pool = make_pool(4, dtype, layers=3, skip=SKIP)
    draft = make_pool(4, dtype, layers=1)
    layout, memory = pool.share.arena.layout, pool.share.arena.memory
    assert layout.draft_layers == 1 and draft.share.arena is pool.share.arena
    slots = torch.tensor([70, 133, 250])
    fill(pool, slots)
    fill(draft, slots, seed=50)
    owners = [(pool, 0), (pool, 1), (pool, 2), (draft, 0)]
    for place, (owner, layer) in enumerate(owners):
        stored = stored_rows(owner.kv_buffer[layer], slots).flatten(1).contiguous()
        for row, slot in zip(stored.view(torch.uint8), slots.tolist(), strict=True):
            start = layout.latent_address(place, slot)
            assert torch.equal(memory[start : start + layout.row_bytes], row)
        if not layout.holds_index(place):
            continue
        keys = owner.index_key_cache.keys(layer)
        for slot in slots.tolist():
            start = layout.index_address(place, slot)
            key = keys[slot // 64, slot % 64].contiguous().view(torch.uint8)
            assert torch.equal(memory[start : start + layout.index.key_bytes], key)


def test_the_draft_lies_in_the_targets_pages(served_with) -> None:
    served_with(**EAGLE)
    pool = make_pool(5, torch.bfloat16, layers=3, skip=SKIP)
    draft = make_pool(5, torch.bfloat16, layers=1)
    slots = torch.arange(PAGE, 4 * PAGE)
    fill(pool, slots)
    before = pool.read_pages(torch.arange(5))
    fill(draft, slots, seed=77)
    assert torch.equal(pool.read_pages(torch.arange(5)), before)
    sizes = pool.get_kv_size_bytes(), draft.get_kv_size_bytes()
    assert sum(sizes) == pool.share.arena.memory.nbytes
    assert sizes[1] == 5 * PAGE * (1152 + 132)
    # A copy of a request's pages carries what the draft keeps in them.
    kept = draft.latent_rows(0, slots), draft.get_index_k(0, slots)
    saved = pool.get_cpu_copy(slots)
    elsewhere = torch.cat([torch.arange(PAGE) + PAGE * page for page in (4, 2, 3)])
    pool.share.arena.memory.zero_()
    pool.load_cpu_copy(saved, elsewhere)
    assert torch.equal(draft.latent_rows(0, elsewhere), kept[0])
    assert torch.equal(draft.get_index_k(0, elsewhere), kept[1])
    # Between servers the arena is one thing.
    pointers, sizes, items = pool.get_contiguous_buf_infos()
    assert (len(pointers), items) == (1, [pool.share.arena.layout.page_bytes])
    assert sizes == [pool.share.arena.memory.nbytes]
    assert draft.get_contiguous_buf_infos() == pool.get_state_buf_infos() == ([], [], [])
    assert len(pool.host_pool_decls()) == len(draft.host_pool_decls()) == 1
    assert "the draft's layer inside" in pool.pages_in_words


@pytest.mark.parametrize(
    ("arguments", "draft"),
    [
        ({}, {}),
        ({"speculative_algorithm": "EAGLE3"}, {}),
        ({**EAGLE, "enable_multi_layer_eagle": True}, {}),
        ({**EAGLE, "kv_cache_dtype": "fp8_e4m3", "speculative_draft_kv_cache_dtype": "bf16"}, {}),
        (EAGLE, {"dtype": torch.float32}),
        (EAGLE, {"pages": 6}),
        (EAGLE, {"layers": 2}),
    ],
)
def test_another_draft_has_an_arena_of_its_own(served_with, arguments, draft) -> None:
    served_with(**arguments)
    target = make_pool(4, torch.bfloat16, layers=3, skip=SKIP)
    shape = {"pages": 4, "dtype": torch.bfloat16, "layers": 1, **draft}
    other = make_pool(shape["pages"], shape["dtype"], layers=shape["layers"])
    assert other.share.arena is not target.share.arena and not other.share.is_draft


def test_an_arena_is_taken_once_and_not_kept_alive(served_with) -> None:
    served_with(**EAGLE)
    target = make_pool(4, torch.bfloat16, layers=3, skip=SKIP)
    drafts = [make_pool(4, torch.bfloat16, layers=1) for _ in range(2)]
    assert [draft.share.arena is target.share.arena for draft in drafts] == [True, False]
    make_pool(4, torch.bfloat16, layers=3, skip=SKIP)
    gc.collect()  # a pool and its index keys know each other
    assert not make_pool(4, torch.bfloat16, layers=1).share.is_draft


def test_pages_may_be_aligned() -> None:
    pool = make_pool(4, torch.float8_e4m3fn, layers=2, page_alignment=656 * 64)
    assert pool.share.arena.layout.page_bytes == 3 * 656 * 64
    slots = torch.arange(PAGE, 4 * PAGE)
    fill(pool, slots)
    assert pool.latent_rows(1, slots).abs().sum() > 0


def test_fp8_rows_hold_the_values() -> None:
    latents, rope = normal(40, 1, 512) * normal(40, 1, 1).exp(), normal(40, 1, 64)
    rows = torch.cat(quantise_latents(latents, rope), dim=1)
    assert rows.shape == (40, 656)
    values = dequantise_latents(rows, 512)
    assert torch.equal(values[:, 512:], rope.flatten(1).bfloat16().float())
    blocks = latents.flatten(1).unflatten(1, (4, 128))
    error = (values[:, :512].unflatten(1, (4, 128)) - blocks).abs()
    assert (error <= blocks.abs().amax(-1, keepdim=True) / 16).all()
    assert (dequantise_latents(torch.cat(quantise_latents(latents * 0, rope), 1), 512) < 9).all()
    pool = make_pool(3, torch.float8_e4m3fn)
    slots = torch.arange(70, 110)
    pool.set_mla_kv_buffer(SimpleNamespace(layer_id=1), slots, latents, rope)
    assert torch.equal(pool.latent_rows(1, slots), values)
    nope, key = pool.read_latents(SimpleNamespace(layer_id=1), slots, torch.float32)
    assert torch.equal(torch.cat([nope, key], dim=-1).flatten(1), values)


def test_pages_come_back() -> None:
    pool = make_pool(6, torch.bfloat16, layers=3, skip=SKIP)
    fill(pool, torch.arange(PAGE, 6 * PAGE))
    content = pool.read_pages(torch.tensor([3, 1]))
    pool.write_pages(torch.tensor([2, 5]), content)
    assert torch.equal(pool.read_pages(torch.tensor([2, 5])), content)


@pytest.mark.parametrize("asked", ["page", "layer"])
def test_a_kernel_writes_index_keys(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's kernel writes to contiguous pages arrives at the tokens' slots."""
    monkeypatch.setenv("GLM53_POOL", asked)
    pool = make_pool(5, torch.bfloat16, layers=3, skip=SKIP)
    other = make_pool(5, torch.bfloat16, layers=3, skip=SKIP)
    slots = torch.randperm(4 * PAGE, generator=torch.Generator().manual_seed(3))[:150] + PAGE
    keys = normal(150, 128)

    def kernel(buffer: torch.Tensor, places: torch.Tensor) -> None:
        assert buffer.is_contiguous() and buffer.shape[1] == 8448
        raw = other.index_key_cache
        raw.store(2, slots, keys)
        stored, scales = raw.keys(2)[slots // 64, slots % 64], raw.scales(2)
        for number, place in enumerate(places.tolist()):
            page, token = divmod(place, 64)
            buffer[page, token * 128 : token * 128 + 128] = stored[number]
            scale = scales[slots[number] // 64, slots[number] % 64].view(1).view(torch.uint8)
            buffer[page, 8192 + 4 * token : 8196 + 4 * token] = scale

    pool.store_with(kernel, 2, slots)
    assert torch.equal(pool.get_index_k(2, slots), other.get_index_k(2, slots))
    assert (pool.get_index_k(0, slots) == 0).all()


# The mode


@pytest.mark.parametrize(
    ("arguments", "device", "says"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "cuda", "fp8_e4m3"),
        ({"kv_cache_dtype": "fp8_e4m3", "dsa_decode_backend": "fa3"}, "cuda", "one stride"),
        (
            {"kv_cache_dtype": "fp8_e4m3", "dsa_prefill_backend": "flashmla_sparse"},
            "cuda",
            "stride",
        ),
        ({"pp_size": 2}, "cpu", "--pp-size 1"),
    ],
)
def test_what_cannot_be_page_major(
    arguments, device: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Glm53Error, match=says):
        mode.choose(arguments.get, device)
    monkeypatch.setenv("GLM53_POOL", "layer")
    assert str(mode.choose(arguments.get, device)) == "layer-major"
    monkeypatch.delenv("GLM53_POOL")
    monkeypatch.setattr(mode, "DEFAULT", "page")
    chosen = mode.choose(arguments.get, device)
    assert not chosen.page_major and chosen.reason


def test_what_can_be_page_major(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"kv_cache_dtype": "fp8_e4m3", "dsa_prefill_backend": "flashmla_kv", "pp_size": 1}
    assert mode.choose(gpu.get, "cuda").page_major
    assert mode.choose({}.get, "cpu").page_major
    monkeypatch.setenv("GLM53_ATTENTION", "torch")
    assert mode.choose({"kv_cache_dtype": "bfloat16"}.get, "cuda").page_major
    monkeypatch.setenv("GLM53_POOL", "pages")
    with pytest.raises(Glm53Error, match='"page" or "layer"'):
        mode.choose(gpu.get, "cuda")


def test_the_default_is_layer_major_until_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLM53_POOL")
    assert mode.DEFAULT == "layer"
    assert make_pool(3, torch.bfloat16).share is None


# Kernels


def test_kernels_do_what_their_twins_do() -> None:
    script = Path(__file__).with_name("interpreted_kernels.py")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, timeout=300
    )
    assert ended.stdout.strip().endswith("ok"), ended.stderr[-2000:]


class FakeRuntime:
    """cudart's three functions, on plain memory."""

    def __init__(self, version: int, batched: bool = True, code: int = 0) -> None:
        self.version, self.code, self.calls = version, code, []
        self.cudaGetErrorString = lambda code: b"no"
        if batched:
            self.cudaMemcpyBatchAsync = self._batch

    def cudaRuntimeGetVersion(self, pointer) -> int:
        pointer._obj.value = self.version
        return 0

    def cudaMemcpyAsync(self, to, origin, length, kind, stream) -> int:
        assert kind == 4
        self.calls.append("one")
        ctypes.memmove(to, origin, length.value)
        return self.code

    def _batch(self, to, origin, length, count, attributes, first, how_many, *rest) -> int:
        assert len(rest) == (1 if self.version >= 13000 else 2)
        assert attributes._obj.order == 1 and first._obj.value == 0 and how_many.value == 1
        self.calls.append("batch")
        numbers = [
            (ctypes.c_uint64 * count.value).from_address(part.value)
            for part in (to, origin, length)
        ]
        for a, b, n in zip(*numbers, strict=True):
            ctypes.memmove(a, b, n)
        return self.code


@pytest.mark.parametrize(
    ("runtime", "stream", "calls"),
    [
        (FakeRuntime(13000), 7, ["batch"]),
        (FakeRuntime(12080), 7, ["batch"]),
        (FakeRuntime(12040), 7, ["one"] * 3),
        (FakeRuntime(13000, batched=False), 7, ["one"] * 3),
        (FakeRuntime(13000), 0, ["one"] * 3),
    ],
)
@pytest.mark.parametrize("part", [(0, None), (64, 4096)])
def test_the_copy_engine_is_told_one_copy_a_page(runtime, stream, calls, part) -> None:
    runtime.calls.clear()
    source, target = (torch.randint(0, 256, (9, 8192), dtype=torch.uint8) for _ in range(2))
    to, origin = torch.tensor([4, 5, 0]), torch.tensor([7, 8, 2])
    expected = target.clone()
    page_copy.copy_pages_torch(expected, source, to, origin, *part)
    engine = page_copy.CopyEngine(runtime)
    assert engine.copy(target, source, to, origin, *part, stream=stream) == 3
    assert torch.equal(target, expected) and runtime.calls == calls
    assert engine.copy(target, source, to[:0], origin[:0], stream=stream) == 0


def test_a_refused_copy_is_told() -> None:
    pages = torch.zeros(2, 64, dtype=torch.uint8)
    engine = page_copy.CopyEngine(FakeRuntime(13000, code=1))
    with pytest.raises(Glm53Error, match="code 1"):
        engine.copy(pages, pages, torch.tensor([0]), torch.tensor([1]), stream=7)
