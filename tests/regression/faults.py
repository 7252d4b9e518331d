"""Planted faults: a test-only SGLang plugin that breaks our classes while the server runs.

`switch.py` puts this file on PYTHONPATH with an entry point of its own, so the package carries no
fault code. In each forward pass the scheduler process reads which fault is on from the file
``active`` in ``GLM53_FAULTS_DIR``; turning one on or off needs no restart. What a fault did is
counted in ``acted.<pid>.json``: a fault that nothing ran through has proved nothing.

The faults break the plain-torch path, which is the reference on a CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NEOX = "neox-indexer"  # the indexer rotates halves in place of pairs
OTHER_SET = "other-set"  # shared layers attend to layer 0's set in place of the one above them
SHIFTED_KEYS = "shifted-keys"  # index keys are written one page further
STALE_INDEX = "stale-index"  # a slot that was given back keeps its first owner's index key
HALF_TOPK = "half-topk"  # only the better half of the selection is kept
STALE_DRAFT = "stale-draft"  # after verification the draft's cache keeps what drafting wrote
NO_BIAS = "no-gate-bias"  # experts are chosen without the correction bias
FAULTS = (NEOX, OTHER_SET, SHIFTED_KEYS, STALE_INDEX, HALF_TOPK, STALE_DRAFT, NO_BIAS)

FOLDER = "GLM53_FAULTS_DIR"
DUMP = "draft-cache-"  # requests whose name begins so leave the draft's cache in a file
PAGE = 64
OURS = "sglang_glm53."


class Faults:
    """The faults of one scheduler process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.active = ""
        self.seen: tuple[int, int] | None = None  # of the file `active`
        self.acted = self.told = 0
        self.draft: Any = None  # the draft's ModelRunner
        self.is_draft = self.is_draft_extend = False
        self.selections: dict[int, torch.Tensor | None] = {}
        self.written: dict[tuple[int, int], torch.Tensor] = {}

    def on(self, fault: str) -> bool:
        """Whether `fault` is on; counts that it acted."""
        if self.active != fault:
            return False
        self.acted += 1
        return True

    def read(self) -> None:
        """Which fault is on from now on."""
        file = self.folder / "active"
        try:
            stat = file.stat()
        except FileNotFoundError:
            return
        if (stat.st_mtime_ns, stat.st_ino) == self.seen:
            return
        self.seen = (stat.st_mtime_ns, stat.st_ino)
        self.active = file.read_text().strip()
        self.acted = self.told = 0
        self.selections.clear()
        self.written.clear()

    def tell(self) -> None:
        """Write down how often the fault acted."""
        if self.acted == self.told:
            return
        self.told = self.acted
        part = self.folder / f"acted.{os.getpid()}.part"
        part.write_text(json.dumps({"fault": self.active, "acted": self.acted}))
        part.rename(part.with_suffix(".json"))

    # --- hooks: (original, self of the hooked method, its arguments) --------------------------

    def forward(self, original: Any, runner: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        """ModelRunner.forward: which of target and draft runs, and in which mode."""
        before = self.is_draft, self.is_draft_extend
        self.read()
        self.is_draft = bool(runner.is_draft_worker)
        self.is_draft_extend = self.is_draft and batch.forward_mode.is_draft_extend_v2()
        if self.is_draft:
            self.draft = runner
        else:
            self.selections.clear()
        try:
            return original(runner, batch, *args, **kw)
        finally:
            self.is_draft, self.is_draft_extend = before
            self.tell()

    def rotate(
        self,
        original: Any,
        indexer: Any,
        queries: torch.Tensor | None,
        keys: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """GlmTorchIndexer._rotate."""
        if not self.on(NEOX):
            return original(indexer, queries, keys, positions)
        cos, sin = indexer.rotary_emb.cos_sin_cache[positions].float().chunk(2, dim=-1)

        def turn(x: torch.Tensor) -> torch.Tensor:
            turned, rest = x[..., : indexer.rope_head_dim], x[..., indexer.rope_head_dim :]
            c, s = (cos, sin) if x.dim() == 2 else (cos[:, None], sin[:, None])
            first, second = turned.float().chunk(2, dim=-1)
            halves = [first * c - second * s, second * c + first * s]
            return torch.cat([torch.cat(halves, dim=-1).to(x.dtype), rest], dim=-1)

        return None if queries is None else turn(queries), turn(keys)

    def select(self, original: Any, backend: Any, *args: Any, **kw: Any) -> torch.Tensor:
        """TorchDsaBackend.select_topk."""
        if not self.on(HALF_TOPK):
            return original(backend, *args, **kw)
        whole = backend.index_topk
        backend.index_topk = whole // 2
        try:
            chosen = original(backend, *args, **kw)
        finally:
            backend.index_topk = whole
        padded = chosen.new_full((chosen.shape[0], whole), -1)
        padded[:, : chosen.shape[1]] = chosen
        return padded

    def index(self, original: Any, indexer: Any, *args: Any, **kw: Any) -> torch.Tensor | None:
        """GlmTorchIndexer.forward: keeps the target's selections of this pass."""
        selection = original(indexer, *args, **kw)
        if not self.is_draft:
            self.selections[indexer.layer_id] = selection
        return selection

    def reuse(self, original: Any, attention: Any, given: torch.Tensor | None) -> Any:
        """GlmAttention._reused."""
        if given is not None and attention.skip_topk and self.selections:
            other = self.selections[min(self.selections)]
            if other is not None and other.shape == given.shape and self.on(OTHER_SET):
                given = other
        return original(attention, given)

    def store_key(
        self, original: Any, pool: Any, layer_id: int, loc: torch.Tensor, key: torch.Tensor
    ) -> None:
        """GlmTokenToKVPool.set_index_k."""
        if self.is_draft_extend and self.on(STALE_DRAFT):
            return
        if self.on(SHIFTED_KEYS):
            loc = torch.where(loc < PAGE, loc, PAGE + loc % (pool.size // PAGE * PAGE))
        elif self.on(STALE_INDEX):
            written = self.written.setdefault(
                (id(pool), layer_id), torch.zeros(pool.size + pool.page_size, dtype=torch.bool)
            )
            fresh = ~written[loc.long()]
            written[loc.long()] = True
            loc, key = loc[fresh], key[fresh]
        if loc.numel():
            original(pool, layer_id, loc, key)

    def store_latents(self, original: Any, pool: Any, *args: Any, **kw: Any) -> None:
        """GlmTokenToKVPool._write_mla_kv_buffer."""
        if not (self.is_draft_extend and self.on(STALE_DRAFT)):
            original(pool, *args, **kw)

    def route(self, original: Any, moe: Any, x: torch.Tensor) -> torch.Tensor:
        """GlmMoE._routed."""
        if not self.on(NO_BIAS):
            return original(moe, x)
        config = moe.topk.topk_config
        bias = config.correction_bias
        config.correction_bias = torch.zeros_like(bias)
        try:
            return original(moe, x)
        finally:
            config.correction_bias = bias

    def release(self, original: Any, req: Any, tree_cache: Any, *args: Any, **kw: Any) -> Any:
        """release_kv_cache: before a named request's row is given back, its draft cache."""
        if req.rid.startswith(DUMP) and req.finished() and self.draft is not None:
            length = req.owned_kv_len()
            row = tree_cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            slots, pool = row[:length].long(), self.draft.token_to_kv_pool
            layer = pool.start_layer
            state = {
                "latents": pool.latent_rows(layer, slots),
                "keys": pool.get_index_k(layer, slots).float(),
            }
            part = self.folder / f"{req.rid}.part"
            torch.save(state, part)
            part.rename(part.with_suffix(".pt"))
        return original(req, tree_cache, *args, **kw)


def install() -> None:
    """Entry point: hooks this process where a test asked for it."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    faults = Faults(Path(folder))
    around = {
        "sglang.srt.model_executor.model_runner.ModelRunner.forward": faults.forward,
        "sglang.srt.mem_cache.common.release_kv_cache": faults.release,
        OURS + "layers.indexer.GlmTorchIndexer._rotate": faults.rotate,
        OURS + "layers.indexer.GlmTorchIndexer.forward": faults.index,
        OURS + "layers.attention.GlmAttention._reused": faults.reuse,
        OURS + "layers.moe.GlmMoE._routed": faults.route,
        OURS + "backends.torch_dsa.TorchDsaBackend.select_topk": faults.select,
        OURS + "memory.pool.GlmTokenToKVPool.set_index_k": faults.store_key,
        OURS + "memory.pool.GlmTokenToKVPool._write_mla_kv_buffer": faults.store_latents,
    }
    for target, hook in around.items():
        HookRegistry.register(target, _as_function(hook), HookType.AROUND)


def _as_function(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method as a plain function, whose first argument stays free for ``self``."""

    def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    hook.__name__ = method.__name__
    return hook
