"""Ports that nodes open for each other, and the results of connecting to them."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator

import pytest

from launcher.cluster import probe
from launcher.cluster.probe import ProbeClient, ProbeServer

HERE = "127.0.0.1"


@pytest.fixture
def opened() -> Iterator[tuple[ProbeServer, int]]:
    port = ProbeServer()
    yield port, port.open(HERE, 0, "right")["port"]
    port.close()


def found(*targets: dict[str, object]) -> list[dict[str, object]]:
    tries = ProbeClient(targets)
    while (said := tries.found()) is None:
        time.sleep(0.01)
    return said


def takes(port: int) -> bool:
    """Bind without SO_REUSEADDR, as a user's script would bind MASTER_PORT."""
    with socket.socket() as taken:
        try:
            taken.bind((HERE, port))
        except OSError:
            return False
    return True


def test_the_word_tells_who_answers(opened: tuple[ProbeServer, int]) -> None:
    place = {"addresses": [HERE], "port": opened[1]}
    right, wrong = found({**place, "word": "right"}, {**place, "word": "other"})
    assert right == {"addresses": [HERE], "why": None}
    assert wrong == {"addresses": [], "why": "another program answers there"}


def test_more_come_than_a_backlog_holds_and_nothing_lingers(
    opened: tuple[ProbeServer, int], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    held, port = opened
    monkeypatch.setattr(probe, "REACH_S", 1.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    for _ in range(1500):
        assert probe.why_not(HERE, port, "right") is None
    held.close()
    for _ in range(100):  # the last acknowledgements may be under way; TIME_WAIT would last a minute
        if takes(port):
            return
        time.sleep(0.02)
    raise AssertionError("the port is still taken")


def test_what_is_wrong_with_a_place(opened: tuple[ProbeServer, int]) -> None:
    taken = ProbeServer().open(HERE, opened[1], "late")
    assert taken == {"problem": "Address already in use"}
    opened[0].close()
    (closed,) = found({"addresses": [HERE], "port": opened[1], "word": "right"})
    assert closed == {"addresses": [], "why": "Connection refused"}


def test_a_silent_address_is_not_waited_for_beside_one_that_answers(
    opened: tuple[ProbeServer, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = probe.why_not

    def slow(address: str, port: int, word: str) -> str | None:
        if address == "silent":
            time.sleep(8)
        return real(HERE, port, word)

    monkeypatch.setattr(probe, "why_not", slow)
    began = time.monotonic()
    (said,) = found({"addresses": ["silent", HERE], "port": opened[1], "word": "right"})
    assert said["addresses"] == [HERE] and time.monotonic() - began < 6
