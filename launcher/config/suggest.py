"""The nearest valid key to one that is not."""

from __future__ import annotations

from collections.abc import Iterable


def distance(one: str, other: str) -> int:
    """Edits between two words: insert, delete, replace a letter, or swap two neighbours, each counts 1.

    Source: optimal string alignment, the restricted form of Damerau (1964).
    """
    before: list[int] = []
    above = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        row = [i] + [0] * len(other)
        for j, wanted in enumerate(other, start=1):
            row[j] = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                row[j] = min(row[j], before[j - 2] + 1)
        before, above = above, row
    return above[-1]


def plain(key: str) -> str:
    """A key without what people vary: case, dashes, blanks at the ends."""
    return key.strip().lower().replace("-", "_").replace(" ", "_")


def nearest(key: str, candidates: Iterable[str], *, furthest: int | None = None) -> str | None:
    """The candidate with the fewest edits from `key`, or None when none is near.

    Args:
        key: the word as written.
        candidates: valid words.
        furthest: most edits allowed; by default about a third of the letters, at least 1.
    """
    word = plain(key)
    limit = max(1, len(word) // 3) if furthest is None else furthest
    best: tuple[int, int, int] | None = None
    winner: str | None = None
    for candidate in candidates:
        other = plain(candidate)
        if abs(len(word) - len(other)) > limit:
            continue
        edits = distance(word, other)
        # Among equally near ones the longer common beginning wins: people mistype the middle and the end.
        rank = (edits, -_common_start(word, other), abs(len(word) - len(other)))
        if edits <= limit and (best is None or rank < best):
            best, winner = rank, candidate
    return winner


def _common_start(one: str, other: str) -> int:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
