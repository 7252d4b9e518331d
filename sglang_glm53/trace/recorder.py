"""Records the passes of one process: collectives with group and bytes, matrix products with shapes.

Two of torch's own interfaces: a dispatch mode sees every operator that this thread runs, among them
c10d's collectives, whichever of SGLang's layers calls them; global module hooks tell where a pass
begins and which module multiplies. A pass is one call of the model: its body (embedding and
layers), then the logits processor.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import TorchDispatchMode

# c10d operator -> kind, and which argument is the whole tensor.
COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all-to-all", 0),
    "alltoall_": ("all-to-all", 0),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
# SGLang's own operators around a group's collective, on a GPU; below them NCCL is called directly.
GROUP_OPERATORS = {
    "inplace_all_reduce": ("all-reduce", 0),
    "outplace_all_reduce": ("all-reduce", 0),
    "flashinfer_allreduce": ("all-reduce", 0),
    "reg_all_gather_into_tensor": ("all-gather", 0),
    "reg_reduce_scatter_tensor": ("reduce-scatter", 1),
    "reg_all_to_all_single": ("all-to-all", 0),
}
HEAD = "LogitsProcessor"


class Recorder:
    """The passes of this process, one JSON line each."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{os.getpid()}.jsonl"
        self.depth = 0
        self.current: dict[str, Any] | None = None
        self.outside: list[dict[str, Any]] = []
        self.names: dict[int, str] = {}
        self.mode = _Watch(self)
        self.watching = False

    def install(self) -> None:
        """Set torch's global module hooks; the dispatch mode follows with the first pass."""
        torch_modules.register_module_forward_pre_hook(self.enter)
        torch_modules.register_module_forward_hook(self.leave, always_call=True)

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self.depth += 1
        if self.depth > 1:
            return
        batch = next((arg for arg in args if hasattr(arg, "forward_mode")), None)
        if batch is None or type(module).__name__ == HEAD:
            return
        if not self.watching:
            self.watching = True
            self.mode.__enter__()  # of this thread, and for as long as it runs
        self.begin(module, batch)

    def leave(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.depth -= 1
        if self.current is None:
            return
        self.product(module, args, output)
        if self.depth == 0 and type(module).__name__ == HEAD:
            self.finish()

    def begin(self, module: torch.nn.Module, batch: Any) -> None:
        if not self.names or id(module) not in self.names:
            self.names.update({id(each): name for name, each in module.named_modules()})
            self.names[id(module)] = ""
        counts = getattr(batch, "global_num_tokens_cpu", None)
        logits = getattr(batch, "global_num_tokens_for_logprob_cpu", None)
        lengths = getattr(batch, "seq_lens_cpu", None)
        self.current = {
            "model": type(module).__name__,
            "mode": batch.forward_mode.name,
            "rows": int(batch.input_ids.shape[0]) if batch.input_ids is not None else 0,
            "requests": int(batch.batch_size),
            "longest": int(lengths.max()) if lengths is not None and len(lengths) else 0,
            "rows_by_rank": None if counts is None else [int(count) for count in counts],
            "logits_by_rank": None if logits is None else [int(count) for count in logits],
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "collectives": [],
            "products": [],
            "outside": self.outside,
        }
        self.outside = []

    def finish(self) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(self.current) + "\n")
        self.current = None

    def product(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module with a weight matrix: rows in, and the matrix's shape."""
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not args:
            return
        x = args[0]
        if not isinstance(x, torch.Tensor) or x.dim() != 2 or not x.is_floating_point():
            return
        name = self.names.get(id(module))
        if name is not None:
            self.current["products"].append(
                [name, int(x.shape[0]), int(weight.shape[1]), int(weight.shape[0])]
            )

    def collective(self, kind: str, tensor: torch.Tensor, ranks: list[int]) -> None:
        if len(ranks) == 1:
            return
        entry = {
            "kind": kind,
            "ranks": ranks,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": tensor.numel() * tensor.element_size(),
        }
        (self.outside if self.current is None else self.current["collectives"]).append(entry)


class _Watch(TorchDispatchMode):
    """Sees the operators of this thread."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            self.note(name, func, args, kwargs)
        elif name in GROUP_OPERATORS:
            self.note_group(name, func, args, kwargs)
        return func(*args, **kwargs)

    def note(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in COLLECTIVES:
            return
        kind, whole = COLLECTIVES[name]
        group = dist.ProcessGroup.unbox(_named(func, args, kwargs)["process_group"])
        ranks = dist.get_process_group_ranks(group)
        self.recorder.collective(kind, _tensor(args[whole]), ranks)

    def note_group(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        from sglang.srt.distributed.parallel_state import _groups

        kind, whole = GROUP_OPERATORS[name]
        named = _named(func, args, kwargs)
        group = _groups[named["group_name"]]()
        self.recorder.collective(kind, list(named.values())[whole], list(group.ranks))


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (each.name for each in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _tensor(value: Any) -> torch.Tensor:
    """The tensor of an argument; of a list of parts, all of them side by side."""
    if isinstance(value, torch.Tensor):
        return value
    parts = [_tensor(each) for each in value]
    if len(parts) == 1:
        return parts[0]
    return torch.empty(
        (sum(part.shape[0] for part in parts), *parts[0].shape[1:]),
        dtype=parts[0].dtype,
        device="meta",
    )
