"""Allocation of ranges in a file."""

from __future__ import annotations

import bisect


class FreeRanges:
    """The free ranges of a file, allocated first fit; adjacent ranges are merged.

    Attributes:
        end: all ranges end at or before this offset.
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # (offset, size), by offset

    def take(self, size: int) -> int:
        """Return the offset of a range of `size` bytes, at the end of the file if no free range fits."""
        for i, (offset, there) in enumerate(self._free):
            if there >= size:
                self._free[i : i + 1] = [(offset + size, there - size)] if there > size else []
                return offset
        last = self._free[-1] if self._free else (0, 0)
        if sum(last) == self.end and last[1]:  # grow the last free range
            self._free.pop()
            self.end = last[0]
        offset, self.end = self.end, self.end + size
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free a range."""
        if size == 0:
            return
        i = bisect.bisect(self._free, (offset, size))
        self._free.insert(i, (offset, size))
        for at in (i, i - 1):
            if 0 <= at < len(self._free) - 1 and sum(self._free[at]) == self._free[at + 1][0]:
                self._free[at : at + 2] = [(self._free[at][0], self._free[at][1] + self._free[at + 1][1])]
