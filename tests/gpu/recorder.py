"""A test-only SGLang plugin: holds what the indexer selects against a recomputation in FP32.

`long_context.py` puts it on PYTHONPATH with an entry point of its own. In the scheduler process it
wraps three functions that SGLang's indexer and ours both call, whatever their own code is:

* the backend's ``get_indexer_metadata``: which layer, which batch;
* DeepGEMM's two logits functions: the quantised queries and the gates of each row;
* ``DSAIndexerMetadata.topk_transform``: the rows of logits, and the slots chosen from them.

For rows that see at least GLM53_RECORD_FROM tokens it reads the request's index keys from the cache
(slot by slot, e4m3 times the token's scale), recomputes

    score(s) = scale(s) * sum over heads h of w(h) * relu(q(h) . k(s))

in FP32, and appends one line of figures to GLM53_RECORD_DIR/rows.<pid>.jsonl. Graph replays run no
Python: the rows wanted must be computed eagerly. It also keeps the peak of GPU memory up to date
in memory.<pid>.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

NEEDLES = 64  # the positions with the largest recomputed scores
ROWS_A_CALL = 4  # the last ones: a recomputation costs some milliseconds
PAGE = 64  # tokens of a page of index keys
KEY_BYTES = 128  # e4m3, followed in a page by one FP32 scale a token
HOOKS = {  # SGLang's function -> the recorder's, around it
    "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend.get_indexer_metadata": (
        "metadata"
    ),
    "sglang.srt.layers.attention.dsa.dsa_indexer_metadata.DSAIndexerMetadata.topk_transform": (
        "transform"
    ),
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": "forward",
}
# Of topk_transform, after logits and topk.
TRANSFORM = ("ks", "cu_seqlens_q", "ke_offset", "batch_idx_list", "topk_indices_offset_override")


def keys_of(pages: Any, slots: Any) -> tuple[Any, Any]:
    """Index keys of some slots: FP32 [n, 128], and their scales, FP32 [n].

    Args:
        pages: uint8 [pages, 64 * 132], a page's keys first and its scales after them.
        slots: int64 [n].
    """
    import torch

    page, offset = slots // PAGE, slots % PAGE
    keys = pages[:, : PAGE * KEY_BYTES].reshape(-1, PAGE, KEY_BYTES)[page, offset]
    scales = pages[:, PAGE * KEY_BYTES :].reshape(-1, PAGE, 4)[page, offset]
    scales = scales.contiguous().view(torch.float32)[:, 0]
    return keys.contiguous().view(torch.float8_e4m3fn).float(), scales


def scores_of(query: Any, gates: Any, keys: Any, scales: Any) -> Any:
    """FP32 [n]: one row's index scores. query [heads, 128], gates [heads], keys [n, 128]."""
    return (query.float() @ keys.T).relu().mul_(gates.float()[:, None]).sum(0) * scales


def figures(scores: Any, chosen: Any, logits: Any, topk: int) -> dict[str, Any]:
    """What is recorded of one row.

    Args:
        scores: FP32 [n], recomputed. chosen: the positions selected. logits: FP32 [n], the
        indexer's own.

    Returns:
        recall: share of the true best `topk` that was selected (a position that ties with the
        last of them counts as one of them). needles: how many of the NEEDLES best were selected.
        logit_error: largest |difference| of logits and scores over the scores' standard deviation.
        shortfall: of the worst position selected, below the last true one, in the same unit.
    """
    import torch

    n = scores.shape[0]
    count = min(topk, n)
    best = scores.topk(count)
    last = best.values[-1]
    unit = scores.std().clamp_min(1e-20)
    inside = torch.zeros(n, dtype=torch.bool, device=scores.device)
    inside[chosen] = True
    selected = scores[inside]
    right = int((selected >= last).sum())
    return {
        "length": n,
        "distinct": int(inside.sum()),
        "recall": right / count,
        "needles": int(inside[best.indices[:NEEDLES]].sum()),
        "needle_positions": sorted(best.indices[:NEEDLES].tolist()),
        "logit_error": float((logits - scores).abs().max() / unit),
        "shortfall": float(((last - selected.min()) / unit).clamp_min(0.0)),
    }


class Recorder:
    """The recordings of one scheduler process."""

    def __init__(self, folder: Path, start: int) -> None:
        self.folder, self.start = folder, start
        self.layer: int | None = None
        self.batch: Any = None
        self.backend: Any = None
        self.query: Any = None
        self.gates: Any = None
        self.peak = -1
        self.wrapped = False

    def metadata(self, original: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the backend's get_indexer_metadata(layer_id, forward_batch)."""
        named = dict(zip(("layer_id", "forward_batch"), args, strict=False), **kwargs)
        self.layer, self.batch = named["layer_id"], named["forward_batch"]
        self.backend = backend
        self._wrap_deep_gemm()
        return original(backend, *args, **kwargs)

    def _wrap_deep_gemm(self) -> None:
        """Once, and only where an indexer runs: importing DeepGEMM needs the GPU."""
        if self.wrapped:
            return
        self.wrapped = True
        import deep_gemm

        for name in ("fp8_mqa_logits", "fp8_paged_mqa_logits"):
            setattr(deep_gemm, name, self.logits(getattr(deep_gemm, name)))

    def logits(self, original: Any) -> Any:
        """A DeepGEMM logits function that leaves its queries and gates behind."""

        def function(query: Any, keys: Any, gates: Any, *args: Any, **kwargs: Any) -> Any:
            self.query = query.reshape(-1, *query.shape[-2:])
            self.gates = gates.reshape(self.query.shape[0], -1)
            return original(query, keys, gates, *args, **kwargs)

        return function

    def transform(
        self, original: Any, metadata: Any, logits: Any, topk: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Around DSAIndexerMetadata.topk_transform."""
        import torch

        chosen = original(metadata, logits, topk, *args, **kwargs)
        if torch.cuda.is_current_stream_capturing() or self.query is None:
            return chosen
        try:
            named = dict(zip(TRANSFORM, args, strict=False), **kwargs)
            self._record(metadata, logits, topk, chosen, named)
        except Exception as error:  # the test finds this line in place of a recording
            self._write({"error": repr(error)})
        return chosen

    def _record(self, metadata: Any, logits: Any, topk: int, chosen: Any, named: Any) -> None:
        import torch

        lengths = named.get("ke_offset")
        lengths = metadata.get_seqlens_expanded() if lengths is None else lengths
        lengths = lengths[: logits.shape[0]].tolist()
        rows = [i for i, length in enumerate(lengths) if length >= self.start][-ROWS_A_CALL:]
        starts, offsets = named.get("ks"), named.get("topk_indices_offset_override")
        if offsets is None:
            offsets = metadata.attn_metadata.topk_indices_offset
        ragged = metadata.topk_transform_method.name == "RAGGED"
        for row in rows:
            length = lengths[row]
            request = int(self.batch.seq_lens.argmax())  # the long one
            table = self.backend.req_to_token[self.batch.req_pool_indices[request], :length]
            slots = table.long()
            pool = self.backend.token_to_kv_pool
            keys, scales = keys_of(pool.get_index_k_with_scale_buffer(self.layer), slots)
            scores = scores_of(self.query[row], self.gates[row], keys, scales)
            picked = chosen[row][chosen[row] >= 0].long()
            if ragged:
                picked = picked - int(offsets[row])
            else:
                largest = int(torch.cat([slots, picked]).max())
                position = torch.full((largest + 1,), -1, device=slots.device)
                position[slots] = torch.arange(length, device=slots.device)
                picked = position[picked]
            if not len(picked) or int(picked.min()) < 0 or int(picked.max()) >= length:
                raise ValueError("a slot was selected that is not the request's")
            first = 0 if starts is None else int(starts[row])
            own = logits[row, first : first + length].float()
            mode = self.batch.forward_mode.name
            line = {"layer": self.layer, "mode": mode, "ragged": ragged}
            self._write({**line, **figures(scores, picked, own, topk)})

    def _write(self, line: dict[str, Any]) -> None:
        with (self.folder / f"rows.{os.getpid()}.jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")

    def forward(self, original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Around ModelRunner.forward: the peak of allocated memory so far."""
        import torch

        result = original(runner, *args, **kwargs)
        peak = torch.cuda.max_memory_allocated()
        if peak != self.peak:
            reserved = torch.cuda.max_memory_reserved()
            first = {} if self.peak >= 0 else {"at_first_pass": torch.cuda.memory_allocated()}
            self.peak = peak
            file = self.folder / f"memory.{os.getpid()}.json"
            before = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps({**before, **first, "peak": peak, "reserved": reserved}))
        return result


def install() -> None:
    """Entry point: hooks this process when long_context.py asked for recordings."""
    folder = os.environ.get("GLM53_RECORD_DIR")
    # The engine's first process runs no model, and has not read its arguments yet.
    if not folder or multiprocessing.parent_process() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    recorder = Recorder(Path(folder), int(os.environ["GLM53_RECORD_FROM"]))
    for target, method in HOOKS.items():
        HookRegistry.register(target, _as_function(getattr(recorder, method)), HookType.AROUND)


def _as_function(method: Any) -> Any:
    """A bound method as a plain function, whose first argument stays free for ``self``."""

    def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    hook.__name__ = method.__name__
    return hook


def put_on_path(folder: Path) -> Path:
    """A folder for PYTHONPATH that makes this file an installed SGLang plugin."""
    place = folder / "plugin"
    metadata = place / "glm53_recorder-1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (place / "glm53_recorder.py").write_text(Path(__file__).read_text())
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: glm53-recorder\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nglm53_recorder = glm53_recorder:install\n"
    )
    return place
