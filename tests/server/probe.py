"""A test-only SGLang plugin that writes down what the server process did.

The harness puts it on PYTHONPATH with an entry point of its own, so the package carries no test
code. It records, in the folder ``GLM53_PROBE_DIR``:

* ``<rid>.<pid>.npz`` when a request's cache row is given back: its tokens, the content of its
  committed slots in the target's pool and in the draft's, and for every layer the set that the
  indexer chose and the set that attention used;
* ``proposals.<pid>.jsonl``: every draft handed to verification, one line a request and step;
* ``free.<pid>.jsonl``: the allocator's free slots after each flush of the cache.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

NOT_SEEN = -2  # no forward wrote this slot's row
DENSE = -3  # attention ran dense: everything up to the position
BACKEND = "sglang_glm53.backends.torch_dsa.TorchDsaBackend."


class Recorder:
    """The recordings of one scheduler process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runners: dict[bool, Any] = {}
        self.current_is_draft = False
        self.sets: dict[tuple[str, bool, int], torch.Tensor] = {}

    def forward(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Around ModelRunner.forward: remembers which of target and draft runs."""
        before = self.current_is_draft
        self.current_is_draft = bool(runner.is_draft_worker)
        self.runners[self.current_is_draft] = runner
        try:
            return original(runner, *args, **kwargs)
        finally:
            self.current_is_draft = before

    def record(self, kind: str, layer: int, slots: torch.Tensor, chosen: Any) -> None:
        """Keeps one row of positions a slot; ``chosen`` None means dense attention."""
        key = (kind, self.current_is_draft, layer)
        runner = self.runners[self.current_is_draft]
        width = runner.model_config.hf_config.index_topk
        if key not in self.sets:
            size = runner.token_to_kv_pool.size + runner.token_to_kv_pool.page_size
            self.sets[key] = torch.full((size, width), NOT_SEEN, dtype=torch.int32)
        rows = self.sets[key]
        slots = slots.long()
        if chosen is None:
            rows[slots] = DENSE
        else:
            rows[slots] = torch.sort(chosen[: len(slots)].to(torch.int32), dim=-1).values

    def select(self, original: Any, backend: Any, layer_id: int, *args: Any, **kw: Any) -> Any:
        """Around the indexer's selection."""
        chosen = original(backend, layer_id, *args, **kw)
        batch = kw.get("forward_batch", args[-1] if args else None)
        self.record("select", layer_id, batch.out_cache_loc, chosen)
        return chosen

    def attend(self, original: Any, backend: Any, *args: Any, **kw: Any) -> Any:
        """Around the attention call of a layer."""
        named = dict(zip(("q", "k", "v", "layer", "forward_batch"), args, strict=False), **kw)
        chosen = named.get("topk_indices")
        slots = named["forward_batch"].out_cache_loc
        self.record("attend", named["layer"].layer_id, slots, chosen)
        return original(backend, *args, **kw)

    def draft(self, original: Any, worker: Any, batch: Any, *args: Any, **kw: Any) -> Any:
        """Around EagleDraftWorker.draft: writes the tokens handed to verification."""
        verify = original(worker, batch, *args, **kw)
        rids = [req.rid for req in batch.reqs]
        if not rids or batch.forward_mode.is_idle():
            return verify
        result = verify[0] if isinstance(verify, tuple) else verify
        tokens = result.draft_token.reshape(len(rids), -1).tolist()
        lengths = batch.seq_lens.tolist()
        with (self.folder / f"proposals.{os.getpid()}.jsonl").open("a") as out:
            for rid, length, chain in zip(rids, lengths, tokens, strict=True):
                line = {"rid": rid, "cached": length, "last": chain[0], "draft": chain[1:]}
                out.write(json.dumps(line) + "\n")
        return verify

    def flush(self, original: Any, scheduler: Any, *args: Any, **kw: Any) -> Any:
        """After a flush: writes how many slots are free."""
        success = original(scheduler, *args, **kw)
        free = scheduler.token_to_kv_pool_allocator.available_size()
        with (self.folder / f"free.{os.getpid()}.jsonl").open("a") as out:
            out.write(json.dumps({"flushed": bool(success), "free": int(free)}) + "\n")
        return success

    def release(self, original: Any, req: Any, tree_cache: Any, *args: Any, **kw: Any) -> Any:
        """Before a request's row is given back: writes its slots' content."""
        if req.kv.holds_kv and req.finished() and False in self.runners:
            try:
                self.dump(req, tree_cache)
            except Exception as error:  # the test sees this file in place of the recording
                (self.folder / f"{req.rid}.error").write_text(repr(error))
        return original(req, tree_cache, *args, **kw)

    def dump(self, req: Any, tree_cache: Any) -> None:
        """Writes one request's recording."""
        length = req.owned_kv_len()
        row = tree_cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        slots = row[:length].long()
        arrays: dict[str, np.ndarray] = {
            "tokens": np.array([*req.origin_input_ids, *req.output_ids], dtype=np.int64),
            "slots": slots.numpy(),
        }
        for is_draft, runner in self.runners.items():
            who, pool = ("draft" if is_draft else "target"), runner.token_to_kv_pool
            layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
            for layer in layers:
                arrays[f"{who}.latent.{layer}"] = pool.latent_rows(layer, slots).numpy()
            for (kind, draft, layer), rows in self.sets.items():
                if draft != is_draft:
                    continue
                arrays[f"{who}.{kind}.{layer}"] = rows[slots].numpy()
                if kind == "select":
                    key = pool.get_index_k(layer, slots)
                    arrays[f"{who}.index.{layer}"] = key.float().numpy()
        target = self.folder / f"{req.rid}.{os.getpid()}.npz"
        partial = target.with_suffix(".part")
        with partial.open("wb") as out:
            np.savez(out, **arrays)
        partial.rename(target)


def install() -> None:
    """Entry point: hooks this process when the harness asked for recordings."""
    folder = os.environ.get("GLM53_PROBE_DIR")
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    recorder = Recorder(Path(folder))
    around = {
        "sglang.srt.model_executor.model_runner.ModelRunner.forward": recorder.forward,
        "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft": recorder.draft,
        "sglang.srt.mem_cache.common.release_kv_cache": recorder.release,
        "sglang.srt.managers.scheduler.Scheduler.flush_cache": recorder.flush,
        BACKEND + "select_topk": recorder.select,
        BACKEND + "forward_extend": recorder.attend,
        BACKEND + "forward_decode": recorder.attend,
    }
    for target, hook in around.items():
        HookRegistry.register(target, _as_function(hook), HookType.AROUND)


def _as_function(method: Any) -> Any:
    """A bound method as a plain function, whose first argument stays free for ``self``."""

    def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    hook.__name__ = method.__name__
    return hook
