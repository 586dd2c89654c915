"""Whether the stored slices cover every element that a rank needs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from launcher.checkpoint.reader import covers
from launcher.checkpoint.slices import FlatSlice
from launcher.tensor.rectangles import rectangles

SHAPE = (3, 4, 2)


def stored(*spans: tuple[int, int]) -> Metadata:
    """Return a tensor of which these flat ranges are stored."""
    boxes = [box for start, stop in spans for box in rectangles(SHAPE, start, stop)]
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(SHAPE), chunks)
    return Metadata({"w": entry})


@given(st.integers(0, 24), st.integers(0, 24), st.integers(0, 24), st.integers(0, 24))
def test_a_flat_slice_is_covered_by_ranges_that_contain_it(a: int, b: int, c: int, d: int) -> None:
    start, stop, low, high = min(a, b), max(a, b), min(c, d), max(c, d)
    wanted = FlatSlice(torch.zeros(stop - start), SHAPE, start, stop)
    assert covers(stored((low, high)), "w", wanted) == (start == stop or low <= start <= stop <= high)
    assert covers(stored((0, low), (low, 24)), "w", wanted)


@pytest.mark.parametrize("missing", [0, 11, 23])
def test_a_whole_tensor_needs_every_element(missing: int) -> None:
    assert not covers(stored((0, missing), (missing + 1, 24)), "w", torch.zeros(SHAPE))
    assert covers(stored((0, missing), (missing, 24)), "w", torch.zeros(SHAPE))
