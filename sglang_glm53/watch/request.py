"""One request's tokens, judged as they come: accept length, accept rate, repetition.

Plain Python on a few integers a step. The thresholds of accept length and rate are those that the
model's makers published for a broken cache ("Scaling Pain", z.ai): below 1.4 after 128 tokens, or a
rate above 0.96. A high rate alone is what healthy copying looks like, so it counts only where the
text repeats itself and the prompt does not hold that text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_glm53.watch.options import Options

ACCEPT_LENGTH = "accept_length"
ACCEPT_RATE = "accept_rate"
REPETITION = "repetition"

CHECK_EVERY = 32  # tokens from one search for repetition to the next
TIMES = 4  # a block that comes this often, one after the other, repeats
_BYTES = 8  # of an id in an array of type q


@dataclass(frozen=True)
class Alarm:
    """What is wrong with a request: a kind, and what was measured, in words."""

    kind: str
    says: str


@dataclass
class Watched:
    """The state of one request.

    Attributes:
        prompt: its ids.
        output: generated ids; SGLang appends to it, and only reads happen here.
    """

    options: Options
    prompt: Sequence[int]
    output: Sequence[int]
    tokens: int = 0  # of the block that is being counted
    passes: int = 0
    proposed: int = 0
    accepted: int = 0
    searched: int = 0  # output tokens when repetition was searched for last
    _prompt_bytes: bytes | None = None

    def speculated(self, new: Sequence[int], proposed: int, judge: bool = True) -> Alarm | None:
        """Count one target pass with `proposed` drafts.

        Args:
            new: the tokens that it gave, its own one included; not yet in `output`.
            judge: whether a short accept length may alarm; a grammar makes the target disagree with
                its draft while nothing is wrong.

        Returns:
            An alarm where a block of `options.after` tokens is complete and bad.
        """
        self.tokens += len(new)
        self.passes += 1
        self.proposed += proposed
        self.accepted += max(0, len(new) - 1)
        if self.tokens < self.options.after:
            return None
        tokens, passes = self.tokens, self.passes
        rate = self.accepted / self.proposed if self.proposed else 0.0
        self.tokens = self.passes = self.proposed = self.accepted = 0
        length = tokens / passes
        if judge and length < self.options.accept:
            return Alarm(
                ACCEPT_LENGTH,
                f"accept length {length:.2f} over {tokens} tokens, below {self.options.accept:g}",
            )
        if rate > self.options.rate:
            period = self._repeats(self.options.after, new)
            if period:
                return Alarm(
                    ACCEPT_RATE,
                    f"accept rate {rate:.3f} over {tokens} tokens, above {self.options.rate:g}, "
                    f"while the same {_ids(period)} repeat",
                )
        return None

    def repeated(self) -> Alarm | None:
        """An alarm where the last `options.repeat` tokens are one block over and over."""
        if len(self.output) - self.searched < CHECK_EVERY:
            return None
        self.searched = len(self.output)
        period = self._repeats(self.options.repeat)
        if not period:
            return None
        return Alarm(
            REPETITION, f"the last {self.options.repeat} tokens are the same {_ids(period)} again"
        )

    def _repeats(self, length: int, new: Sequence[int] = ()) -> int:
        """The period of the last `length` tokens, `new` ones behind them; 0 if they have none or
        stand in the prompt."""
        tail = (array("q", self.output[-length:]) + array("q", new))[-length:]
        if len(tail) < length:
            return 0
        period = shortest_period(tail, length // TIMES)
        return 0 if period and self._in_prompt(tail) else period

    def _in_prompt(self, tail: array[int]) -> bool:
        if self._prompt_bytes is None:
            self._prompt_bytes = array("q", self.prompt).tobytes()
        return _holds(self._prompt_bytes, tail.tobytes())


def shortest_period(tokens: Sequence[int], longest: int) -> int:
    """The smallest p up to `longest` with tokens[i] == tokens[i - p] for all i >= p; 0 if none."""
    length = len(tokens)
    last = tokens[-1]
    for period in range(1, min(longest, length - 1) + 1):
        if tokens[-1 - period] == last and tokens[period:] == tokens[: length - period]:
            return period
    return 0


def _holds(text: bytes, part: bytes) -> bool:
    """Whether an array of ids holds another one."""
    at = text.find(part)
    while at >= 0 and at % _BYTES:
        at = text.find(part, at + 1)
    return at >= 0


def _ids(count: int) -> str:
    return "token" if count == 1 else f"{count} tokens"
