"""NaN and infinity in the target's logits, noticed without waiting for the device.

After a pass each row of logits is summed on the device, in fp32: a NaN or an infinity stays in the
sum, whose range finite logits do not reach. The sums are copied to the host behind the pass, and
read where SGLang reads the pass's tokens, when the copy is long done.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

KEPT = "_glm53_sums"


@dataclass
class Sums:
    """Sums of logits rows on the host. done: the event after their copy; None on a CPU."""

    rows: torch.Tensor
    done: Any = None

    def bad_rows(self) -> list[int]:
        """Rows whose logits are not all finite."""
        if self.done is not None:
            self.done.synchronize()
        values = self.rows.tolist()
        if math.isfinite(sum(values)):
            return []
        return [row for row, value in enumerate(values) if not math.isfinite(value)]


def keep_sums(logits_output: Any) -> None:
    """Sum the rows of `next_token_logits` [rows, vocabulary], and leave the sums there."""
    logits = getattr(logits_output, "next_token_logits", None)
    if logits is None or not logits.numel():
        return
    sums = logits.sum(-1, dtype=torch.float32)
    if not sums.is_cuda:
        setattr(logits_output, KEPT, Sums(sums))
        return
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    host.copy_(sums, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    setattr(logits_output, KEPT, Sums(host, done))


def bad_requests(logits_output: Any, rows_each: int, requests: int) -> list[int]:
    """Indices of the requests of a batch that have a row which is not finite.

    Args:
        rows_each: logits rows of each request: 1, or the drafts and the token before them.
        requests: of the batch; rows after theirs are padding.
    """
    sums: Sums | None = getattr(logits_output, KEPT, None)
    if sums is None:
        return []
    found = {row // rows_each for row in sums.bad_rows()}
    return sorted(index for index in found if index < requests)
