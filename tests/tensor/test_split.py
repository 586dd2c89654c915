"""A rank's share of a parameter agrees with plain indexing of the logical tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from launcher.comm import Axis
from launcher.tensor.split import DimSlice, Split


@st.composite
def splits(draw: st.DrawFn) -> Split:
    """Generate parts along any dim, in any order; some are empty, some are on several ranks."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    if not shape:
        return Split.whole((), Axis("tp", draw(st.sampled_from([1, 2])), 0))
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=6)))
    ranges = list(zip(cuts[::2], cuts[1::2], strict=False))
    parts = [
        DimSlice(start, stop, draw(st.sampled_from([1, 2, 4])), first=draw(st.booleans()))
        for start, stop in draw(st.permutations(ranges))
    ]
    return Split(torch.Size(shape), tuple(parts), dim, partial=draw(st.booleans()))


def numbered(shape: Sequence[int]) -> Tensor:
    return torch.arange(math.prod(shape)).view(tuple(shape))


def local_of(split: Split) -> Tensor:
    """Compute the same from the split with one index per element along its dim."""
    logical = numbered(split.shape)
    if not split.shape:
        return logical
    rows = [row for part in split.parts for row in range(part.start, part.stop)]
    return logical.index_select(split.dim, torch.tensor(rows, dtype=torch.long))


def box_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


def a_range(data: st.DataObject, numel: int) -> tuple[int, int]:
    start = data.draw(st.integers(0, numel))
    return start, data.draw(st.integers(start, numel))


@given(splits())
def test_taking_a_share_and_putting_it_back(split: Split) -> None:
    logical, local = numbered(split.shape), local_of(split)
    assert local.shape == split.local_shape and local.numel() == split.numel
    if not split.is_whole:  # parts that are all of it are in order
        assert torch.equal(split.take(logical), local)
    for firsts in (False, True):
        found = torch.full_like(logical, -1)
        split.put(local, found, first_only=firsts)
        kept = {
            int(i)
            for part in split.parts
            if part.first or not firsts
            for i in (logical.narrow(split.dim, part.start, part.size) if split.shape else logical).reshape(
                -1
            )
        }
        assert found.reshape(-1).tolist() == [i if i in kept else -1 for i in range(logical.numel())]


@given(splits(), st.data())
def test_boxes_are_the_range_element_by_element(split: Split, data: st.DataObject) -> None:
    logical, flat = numbered(split.shape), local_of(split).reshape(-1)
    start, stop = a_range(data, split.numel)
    seen = torch.full_like(flat[start:stop], -1)
    for box in split.boxes(start, stop):
        values = box_of(logical, box.offsets, box.sizes)
        assert values.numel() > 0
        assert torch.equal(split.view(flat[start:stop], start, box), values)
        place = split.view(seen, start, box)
        assert bool((place == -1).all())
        place.copy_(values)
        inside = range(box.part.start, box.part.stop) if split.shape else range(1)
        assert not split.shape or box.offsets[split.dim] in inside
    assert torch.equal(seen, flat[start:stop])


@given(splits(), st.data())
def test_reading_asks_for_the_range_and_nothing_else(split: Split, data: st.DataObject) -> None:
    logical, flat = numbered(split.shape), local_of(split).reshape(-1)
    start, stop = a_range(data, split.numel)
    asked: list[int] = []

    def read(offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        asked.append(math.prod(sizes))
        return box_of(logical, offsets, sizes)

    values = split.read(start, stop, read)
    assert values.tolist() == flat[start:stop].tolist()
    assert sum(asked) == stop - start


@given(splits(), st.data())
def test_shared_ranges_are_the_elements_of_shared_parts(split: Split, data: st.DataObject) -> None:
    numel = split.numel
    holders = torch.ones(split.local_shape, dtype=torch.long)
    at = 0
    for part in split.parts:
        (holders.narrow(split.dim, at, part.size) if split.shape else holders).fill_(part.holders)
        at += part.size
    start, stop = a_range(data, numel)
    found = torch.ones(numel, dtype=torch.long)
    for low, high, part in split.shared(start, stop):
        assert start <= low < high <= stop
        assert bool((found[low:high] == 1).all())
        found[low:high] = part.holders
    want = torch.ones(numel, dtype=torch.long)
    want[start:stop] = holders.reshape(-1)[start:stop]
    assert torch.equal(found, want)


def test_a_whole_parameter_on_an_axis() -> None:
    alone = Split.whole((3, 4))
    assert alone.is_whole and alone.padded_numel == 12 and list(alone.shared(0, 12)) == []
    second = Split.whole((3, 4), Axis("tp", 2, 1), partial=True)
    assert [(low, high, part.holders, part.first) for low, high, part in second.shared(2, 9)] == [
        (2, 9, 2, False)
    ]
    tensor = numbered((3, 4))
    assert second.take(tensor) is tensor
