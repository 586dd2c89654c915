"""What the front end says of an agent that has ended."""

from __future__ import annotations

import time

from launcher.cluster.hostfile import Host
from launcher.cluster.node import Node


def test_idle_talk_of_a_runner_is_not_the_reason() -> None:
    talk = "echo 'srun: cluster configuration lacks support for cpu binding' >&2"
    node = Node(Host("w0", (0,)), 0, ["sh", "-c", f"{talk}; echo no space left >&2; {talk}; exit 3"])
    node.connect({})
    deadline = time.monotonic() + 10
    while node.lost is None and time.monotonic() < deadline:
        node.read()
        time.sleep(0.01)
    node.close()
    assert node.lost == "sh ended with 3: no space left"
