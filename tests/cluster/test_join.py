"""The server that nodes without ssh connect to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from launcher.cluster.hostfile import Host
from launcher.cluster.join import JoinServer, connect
from launcher.cluster.node import Node
from launcher.errors import ConfigError
from tests.cluster.test_elastic import free_port

LIMIT_S, WORD = 20.0, "0123456789abcdef"


class House:
    """A server that expects two nodes, and the nodes that connect to it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.door = JoinServer("127.0.0.1", self.port, WORD)
        self.nodes = [Node(Host(f"node{index}", (0,)), index, []) for index in (0, 1)]
        self.inside: list[socket.socket] = []
        self.refused: list[str] = []

    def knock(self, rank: int) -> threading.Thread:
        def come() -> None:
            try:
                self.inside.append(connect("127.0.0.1", self.port, rank, WORD, 1.0)[0])
            except ConfigError as error:
                self.refused.append(str(error))

        thread = threading.Thread(target=come, daemon=True)
        thread.start()
        return thread

    def admit_until(self, thread: threading.Thread) -> None:
        until = time.monotonic() + LIMIT_S
        while thread.is_alive() and time.monotonic() < until:
            began = time.monotonic()
            self.door.admit(self.nodes)
            assert time.monotonic() - began < 3.0  # a run goes on meanwhile
            time.sleep(0.02)
        assert not thread.is_alive()


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    for node in house.nodes:
        node.close()
    for connection in house.inside:
        connection.close()


def test_strangers_do_not_hold_up_the_run(house: House) -> None:
    with ExitStack() as stack:
        for said in (b"", b"GET / HTTP/1.1\n\n", b"3\n", b'{"proof": 3}\n'):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", house.port)))
            stranger.sendall(said)
        house.admit_until(house.knock(1))
    assert house.nodes[1].connected and not house.nodes[0].connected
    assert len(house.inside) == 1 and not house.refused


def test_a_second_node_of_a_number_waits_until_the_first_is_lost(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.admit_until(house.knock(1))
    told: list[str] = []
    log = SimpleNamespace(warning=lambda text, *values: told.append(text % values))
    monkeypatch.setattr("launcher.cluster.join.logger", log)
    second, until = house.knock(1), time.monotonic() + LIMIT_S
    while not told and time.monotonic() < until:
        house.door.admit(house.nodes)
        time.sleep(0.02)
    assert "node rank 1 is already connected" in told[0] and second.is_alive()
    house.nodes[1].close()
    house.nodes[1].lost = None
    house.admit_until(second)
    assert len(house.inside) == 2 and house.nodes[1].connected


@pytest.mark.parametrize("rank", [0, 2])
def test_a_number_that_no_node_has(house: House, rank: int) -> None:
    house.admit_until(house.knock(rank))
    assert "rejected this node" in house.refused[0] and not house.inside
