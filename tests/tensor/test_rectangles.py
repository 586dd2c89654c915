"""A flat range as boxes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.tensor.rectangles import Rectangle, rectangles


@given(st.data())
def test_boxes_cover_the_range_exactly_once_in_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=4)))
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    tensor = torch.arange(numel).view(shape)
    boxes = rectangles(shape, start, stop)
    covered = []
    for box in boxes:
        assert len(box.offsets) == len(box.sizes) == len(shape)
        index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        inside = tensor[index].reshape(-1).tolist()
        assert inside == list(range(box.flat_start, box.flat_stop))
        covered += inside
    assert covered == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_ragged_range_of_a_matrix() -> None:
    """The end of row 0, the full rows 1 and 2, the beginning of row 3."""
    assert rectangles((4, 5), 3, 17) == [
        Rectangle((0, 3), (1, 2), 3, 5),
        Rectangle((1, 0), (2, 5), 5, 15),
        Rectangle((3, 0), (1, 2), 15, 17),
    ]


def test_edges() -> None:
    assert rectangles((), 0, 1) == [Rectangle((), (), 0, 1)]
    assert rectangles((), 0, 0) == []
    assert rectangles((3, 0, 2), 0, 0) == []
    assert rectangles((4, 5), 20, 20) == []
    assert rectangles((4, 5), 0, 20) == [Rectangle((0, 0), (4, 5), 0, 20)]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 21)])
def test_a_range_outside_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not inside"):
        rectangles((4, 5), start, stop)
