"""The property of tool calls over many random answers; run by hand for the numbers in the docs.

python tests/unit/tool_call_run.py --messages 100000 --cuts 2000 --seed 0
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from chat_messages import SCHEMAS, chaotic, expected, well_formed  # noqa: E402
from chat_parse import Parsed, chunks, streamed, whole  # noqa: E402

CHUNKINGS = 3


def message(seed: int) -> tuple[str, Parsed | None]:
    """A random answer and, where its writer knows, what it holds."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        return chaotic(rng), None
    text, content, calls = well_formed(rng)
    return text, (content, calls)


def check(seed: int) -> Parsed:
    """One answer: read whole as its writer or the whole-text reading says; what it holds."""
    from sglang_glm53.chat.glm47 import Glm53ToolDetector

    text, known = message(seed)
    found = whole(Glm53ToolDetector(), text)
    if known is not None:
        assert found == known, (seed, text, found, known)
    content, calls = expected(text)
    assert found[0] == content, (seed, text, found[0], content)
    assert [name for name, _ in found[1]] == [name for name, _ in calls], (seed, text)
    for (name, given), (_, written) in zip(found[1], calls, strict=True):
        assert list(given) == list(written), (seed, text)
        for key, value in written.items():
            if SCHEMAS[name].get(key, {}).get("type") == "string" or value is None:
                assert given[key] == value, (seed, text, key)
    return found


def check_chunkings(seed: int) -> int:
    """One answer in three random chunkings; its number of calls."""
    from sglang_glm53.chat.glm47 import Glm53ToolDetector

    found = check(seed)
    rng = random.Random(-seed - 1)
    for _ in range(CHUNKINGS):
        pieces = chunks(rng, message(seed)[0])
        assert streamed(Glm53ToolDetector(), pieces) == found, (seed, pieces)
    return len(found[1])


def check_cuts(seed: int) -> int:
    """One answer cut in two at every place; how many places."""
    from sglang_glm53.chat.glm47 import Glm53ToolDetector

    text = message(seed)[0]
    found = check(seed)
    for at in range(len(text) + 1):
        assert streamed(Glm53ToolDetector(), [text[:at], text[at:]]) == found, (seed, at, text)
    return len(text) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start, calls = time.perf_counter(), Counter()
    for seed in range(args.seed, args.seed + args.messages):
        calls[check_chunkings(seed)] += 1
    print(f"{args.messages} answers x {CHUNKINGS} chunkings: {time.perf_counter() - start:.0f} s")
    print("answers by their number of calls:", dict(sorted(calls.items())))
    places = sum(check_cuts(seed) for seed in range(args.seed, args.seed + args.cuts))
    print(f"{args.cuts} answers at every cut, {places} cuts: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
