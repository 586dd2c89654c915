"""The order in which what rests elsewhere is read for the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar

T = TypeVar("T")


def read_ahead(
    batches: Iterable[Sequence[T]], fetch: Callable[[T], None], *, ahead: bool
) -> Iterator[Sequence[T]]:
    """Yield batches one after the other, each after the reading of the following one has started.

    Args:
        batches: What is stepped together.
        fetch: Starts reading one of a batch.
        ahead: False reads nothing before its turn.
    """
    every = list(batches)
    nothing: Sequence[T] = ()
    for batch, following in zip_longest(every, every[1:], fillvalue=nothing):
        for one in following if ahead else ():
            fetch(one)
        yield batch
