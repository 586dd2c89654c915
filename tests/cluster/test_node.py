"""The front end's report on an agent that has ended."""

from __future__ import annotations

import sys
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


PROBLEM = """
import json, sys
sys.stdin.read(1)
print("\\x1e" + json.dumps({"is": "problem", "what": "no directory /data", "fix": "make it"}))
sys.exit(3)
"""


def test_what_an_agent_says_last_is_heard_with_its_end() -> None:
    """Both may arrive in one read; the end of the command is less informative."""
    node = Node(Host("w0", (0,)), 0, [sys.executable, "-c", PROBLEM])
    node.connect({})
    assert node._process is not None and node._process.wait(timeout=60) == 3
    assert [message["is"] for message in node.read()] == ["problem"]
    assert node.lost == "no directory /data (make it)"
    node.close()
