"""Work on a second CUDA stream while a decode or verify step is being captured.

In a captured graph two streams are two chains of nodes that the GPU may run side by side. It pays
where a step is bound by latency: few rows. Elsewhere everything stays on one stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.model_executor.runner import get_is_capture_mode
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
    is_in_breakable_cuda_graph,
)


def make_side_stream() -> torch.cuda.Stream | None:
    """The second stream of a model, shared by its layers; None without a GPU."""
    return torch.cuda.Stream() if torch.get_default_device().type == "cuda" else None


def overlaps(side: torch.cuda.Stream | None, rows: int) -> bool:
    """Whether independent work of this forward goes to the second stream.

    True while a graph of a decode, verify or draft step is captured. A prefill graph is cut into
    segments, and a segment must not end with a stream that has not joined.
    """
    return (
        side is not None and rows > 0 and get_is_capture_mode() and not is_in_breakable_cuda_graph()
    )


@contextmanager
def forked(side: torch.cuda.Stream) -> Iterator[None]:
    """Run the body on ``side``, after all that the current stream holds. `join` ends it."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


def join(side: torch.cuda.Stream) -> None:
    """Let the current stream wait for ``side``."""
    torch.cuda.current_stream().wait_stream(side)
