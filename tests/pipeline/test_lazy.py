"""A sequence whose items are created on access: exceptions reach the reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from launcher.pipeline.executor.batches import LazySequence

READERS: dict[str, Callable[[LazySequence[int]], Any]] = {
    "list": list,
    "loop": lambda items: [item for item in items],
    "index": lambda items: [items[index] for index in range(len(items))],
}


def failing(error: Exception) -> LazySequence[int]:
    def make(index: int) -> int:
        if index == 1:
            raise error
        return index

    return LazySequence(3, make)


@pytest.mark.parametrize("error", [StopIteration("the data is over"), IndexError("row 7"), KeyError("row")])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_an_error_of_the_data_is_no_end_of_the_sequence(
    read: Callable[[LazySequence[int]], Any], error: Exception
) -> None:
    with pytest.raises(type(error)):
        read(failing(error))


def test_items_are_made_once_and_in_order() -> None:
    made: list[int] = []
    items = LazySequence(3, lambda index: made.append(index) or index * 10)
    assert items[1] == 10
    assert made == [0, 1]
    assert list(items) == list(items) == [0, 10, 20]
    assert made == [0, 1, 2]
