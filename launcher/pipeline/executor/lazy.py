"""A sequence whose items are made when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """Makes its items in order, each once. So a step reads the data of a microbatch when its forward comes, and
    random numbers are drawn in the order of a plain loop.

    Args:
        length: How many items there are.
        make: Makes the item of an index; called with 0, 1, 2, ...
    """

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length, self._make = length, make
        self._made: list[T] = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if index >= self._length:
            raise IndexError(index)
        while len(self._made) <= index:
            self._made.append(self._make(len(self._made)))
        return self._made[index]

    def __iter__(self) -> Iterator[T]:
        """All items, made before the first is given: the loop of `Sequence` takes an IndexError of `make` for the end,
        and turns its StopIteration into a RuntimeError."""
        if self._length:
            self[self._length - 1]
        return iter(self._made)
