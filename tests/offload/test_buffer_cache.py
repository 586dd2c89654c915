"""Cached buffers are reused, kept while referenced, and freed if there are more than needed."""

from __future__ import annotations

import torch

from launcher.offload.buffer_cache import BufferCache

FLOAT, HALF = torch.float32, torch.bfloat16


def idle(*, sparing: bool) -> BufferCache:
    return BufferCache(lambda numel, dtype: torch.empty(numel, dtype=dtype), sparing=sparing)


def test_memory_is_used_again_by_bytes() -> None:
    memory = idle(sparing=False)
    first = memory.take(100, FLOAT)
    address = first.data_ptr()
    memory.give(first)
    del first
    again = memory.take(200, HALF)
    assert again.data_ptr() == address and again.dtype == HALF and again.shape == (200,)


def test_what_somebody_looks_at_is_not_handed_out() -> None:
    memory = idle(sparing=False)
    view = memory.take(100, FLOAT).fill_(3)[:10]
    memory.give(view._base if view._base is not None else view)
    assert memory.take(100, FLOAT).data_ptr() != view.data_ptr()
    assert view.tolist() == [3.0] * 10


def test_sparing_memory_is_at_most_what_was_in_use_at_once() -> None:
    memory = idle(sparing=True)
    for numel in (100, 200, 300, 400):
        memory.give(memory.take(numel, FLOAT))
    assert (memory.nbytes, memory.most) == (1600, 1600), "one was in use at a time: the largest is left"
    two = [memory.take(100, FLOAT), memory.take(400, FLOAT)]
    for one in two:
        memory.give(one)
    assert (memory.nbytes, memory.most) == (2000, 2000)
    memory.give(memory.take(50, FLOAT))
    assert memory.nbytes <= 2000


def test_other_memory_stays() -> None:
    memory = idle(sparing=False)
    for numel in (100, 200, 300):
        memory.give(memory.take(numel, FLOAT))
    assert memory.nbytes == 2400
    memory.clear()
    assert memory.nbytes == 0
