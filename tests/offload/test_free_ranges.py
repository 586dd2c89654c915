"""Ranges never overlap, stay within bounds, and are reused after they are freed."""

from __future__ import annotations

import random
from itertools import pairwise

from launcher.offload.free_ranges import FreeRanges


def test_ranges_do_not_overlap_and_come_back() -> None:
    chance, ranges = random.Random(0), FreeRanges()
    held: dict[int, int] = {}
    for _ in range(3000):
        if held and chance.random() < 0.5:
            offset = chance.choice(sorted(held))
            ranges.give(offset, held.pop(offset))
        else:
            size = chance.randrange(1, 20)
            offset = ranges.take(size)
            assert offset not in held
            held[offset] = size
            places = sorted(held.items())
            assert all(a + n <= b for (a, n), (b, _) in pairwise(places))
            assert sum(places[-1]) <= ranges.end
    for offset, size in held.items():
        ranges.give(offset, size)
    whole = ranges.end
    assert ranges.take(whole) == 0 and ranges.end == whole


def test_the_last_free_range_grows() -> None:
    ranges = FreeRanges()
    ranges.give(ranges.take(10), 10)
    assert ranges.take(15) == 0 and ranges.end == 15
