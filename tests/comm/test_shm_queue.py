"""Messages between processes: each reaches its receiver, and none comes from dead processes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time

import pytest

from launcher.comm.shared_memory.queue import PLACES, ShmQueue
from launcher.errors import LauncherError


@pytest.fixture
def boxes() -> list[ShmQueue]:
    """Yield two ranks in one process."""
    both = [ShmQueue(0, 2), ShmQueue(1, 2)]
    for box in both:
        box.connect([b.address for b in both])
    return both


def test_messages_are_told_apart_by_number_and_sender(boxes: list[ShmQueue]) -> None:
    boxes[0].send(1, 7, 70)
    boxes[0].send(1, 3, -(2**62))
    boxes[1].send(1, 3, 30)
    assert boxes[1].receive(0, 3) == -(2**62)
    assert boxes[1].receive(1, 3) == 30
    assert boxes[1].receive(0, 7) == 70


def test_a_message_may_come_late(boxes: list[ShmQueue]) -> None:
    threading.Timer(0.2, boxes[0].send, (1, 1, 5)).start()
    assert boxes[1].receive(0, 1) == 5


def test_thousands_wait_without_blocking_the_sender(boxes: list[ShmQueue]) -> None:
    for number in range(5000):
        boxes[0].send(1, number, number)
    assert [boxes[1].receive(0, number) for number in reversed(range(5000))] == list(reversed(range(5000)))


def test_the_end_of_a_peer_is_an_error_that_names_it(boxes: list[ShmQueue]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    boxes[1]._peers[0] = dataclasses.replace(boxes[0].address, pid=ended.pid)
    began = time.monotonic()
    with pytest.raises(LauncherError, match=rf"rank 0 of the axis \(process {ended.pid}\) has ended"):
        boxes[1].receive(0, 1)
    assert time.monotonic() - began < 5
    with pytest.raises(LauncherError, match="has ended"):
        for number in range(PLACES + 1):  # a message to the dead is taken while there is room for it
            boxes[1].send(0, number, 1)
