"""The fixture `hosts`: two pretend machines and a head, whole again before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.testbed import Hosts


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Skips, with the reason, where no machines can be made: not root, no namespaces, no sshd."""
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    hosts("up", 2)
    yield hosts
    hosts("down")


@pytest.fixture
def hosts(machines: Hosts) -> Iterator[Hosts]:
    machines("heal")
    yield machines
    machines("heal")
