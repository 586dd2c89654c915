"""One table of all problems of the nodes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from launcher.cluster.hostfile import Host
from launcher.cluster.node import ConnectionAttempt, Node
from launcher.cluster.preflight import NodeRequirements, judge
from launcher.cluster.rendezvous import RendezvousOptions, _agreed, partners
from launcher.errors import ConfigError

GOOD: dict[str, Any] = {
    "versions": {"launcher": "0.1", "torch": "2.13", "transformers": "5.23"},
    "source": "abc",
    "files": {"/w/ds.json": "d1"},
    "memory": 8 << 30,
    "gpus": 0,
    "mask": None,
    "clock": 1000.0,
    "arrived": 1000.2,
}
NEEDS = NodeRequirements({"/w/ds.json": "d1"}, "cpu")


def nodes(*changes: dict[str, Any] | None) -> list[Node]:
    found = []
    for index, change in enumerate(changes):
        node = Node(Host(f"w{index}", (0, 1)), index, ["ssh"])
        if change is None:
            node.lost = "ssh ended with 255: ssh: Could not resolve hostname w9: Name or service not known"
        else:
            node.facts = copy.deepcopy(GOOD) | change
        found.append(node)
    return found


def test_nodes_that_are_alike_are_ready() -> None:
    judge(nodes({}, {}, {}), NEEDS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {**GOOD["versions"], "torch": "2.11"}}, "torch is 2.11, but 2.13 on the other hosts"),
        (
            {"versions": {**GOOD["versions"], "torch": None}},
            "torch is not installed, but 2.13 on the other hosts",
        ),
        ({"source": "other"}, "its launcher version differs"),
        ({"files": {"/w/ds.json": None}}, "/w/ds.json does not exist"),
        ({"files": {"/w/ds.json": "d2"}}, "/w/ds.json differs from the file on this machine"),
        ({"memory": 1 << 20}, "1 MiB of memory are free, too little for 2 ranks"),
        ({"clock": 1090.2}, "its clock is 90 s ahead"),
        (None, "unknown host name: check the hostfile"),
    ],
)
def test_what_is_wrong_with_one_host(change: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        judge(nodes({}, change, {}), NEEDS)
    text = str(caught.value)
    assert text.startswith("1 of 3 hosts is not ready, and nothing was started:\n  w1  ") and said in text
    assert "w0" not in text and "w2" not in text


def test_all_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        judge(nodes({}, None, {"memory": 0, "source": "x"}, {}), NEEDS)
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == ["w1", "w2", "w2"]


def test_devices_and_slots() -> None:
    judge(nodes({"gpus": 2}), NodeRequirements({}, "auto"))
    with pytest.raises(
        ConfigError, match="1 CUDA devices are visible, but slot 1 was requested, CUDA_VISIBLE_DEVICES=3"
    ):
        judge(nodes({"gpus": 1, "mask": "3"}), NodeRequirements({}, "auto"))
    with pytest.raises(ConfigError, match="no CUDA device is visible"):
        judge(nodes({}), NodeRequirements({}, "cuda"))


def walled(count: int, *walls: tuple[int, int]) -> list[Node]:
    """Return nodes that have tried to connect to each other; `walls` are pairs (source, target) that failed."""
    found = nodes(*[{} for _ in range(count)])
    for here, node in enumerate(found):
        for other in partners(node, found, found[0]):
            there = found.index(other)
            reached = () if (here, there) in walls else ("10.0.0.9",)
            node.tries.append(ConnectionAttempt(other.name, 7000 + there, reached, "no answer within 3 s"))
    return found


def rows_of(found: list[Node]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        judge(found, NEEDS)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def everything_to(target: int, count: int) -> list[tuple[int, int]]:
    return [(here, target) for here in range(count)]


def test_a_firewall_is_named_where_it_is() -> None:
    judge(walled(8), NEEDS)
    (row,) = rows_of(walled(8, (5, 0)))
    assert row.startswith("w5  cannot reach w0:7000: no answer within 3 s (is there a firewall?")
    (row,) = rows_of(walled(8, *everything_to(0, 8)))  # the first lets nobody in
    assert row.startswith("w0  w1, w2, w3, ..., w7 cannot reach w0:7000: no answer")
    (row,) = rows_of(walled(64, *everything_to(33, 64)))
    assert row.startswith("w33  w1, w32 cannot reach w33:7033: no answer")
    out = [
        (6, there) for there in range(8)
    ]  # 6 is let out nowhere, so what it says of others is about itself
    assert {row.split()[0] for row in rows_of(walled(8, *out))} == {"w6"}
    rows = rows_of(walled(8, *out, *everything_to(0, 8)))
    assert [row.split()[0] for row in rows] == ["w0", "w6", "w6", "w6"]
    out += [(1, there) for there in range(8)]  # nobody but 1 and 6 tries 2
    assert {row.split()[0] for row in rows_of(walled(8, *out))} == {"w1", "w6"}
    rows = rows_of(walled(3, (2, 0), (2, 1), (1, 0)))  # of 0 only 1 can tell
    assert rows[0].split()[:5] == ["w1", "cannot", "reach", "w0:7000:", "no"]
    both = rows_of(walled(3, (2, 0), (2, 1), *everything_to(2, 3)))
    assert {row.split()[0] for row in both} == {"w2"} and len(both) == 3


def test_two_hosts_that_do_not_reach_each_other() -> None:
    rows = rows_of(walled(2, (0, 1), (1, 0)))
    assert [row.partition(": no answer")[0] for row in rows] == [
        "w0  cannot reach w1:7001",
        "w1  cannot reach w0:7000",
    ]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 64])
def test_every_host_is_tried_and_tries(count: int) -> None:
    found = nodes(*[{} for _ in range(count)])
    tried = {node: partners(node, found, found[0]) for node in found}
    for node, others in tried.items():
        assert node not in others and min(count - 1, 2) <= len(others) <= 3
        assert node is found[0] or found[0] in others
    assert {other for others in tried.values() for other in others} == set(found)


def test_the_address_that_all_reach_is_taken() -> None:
    found = nodes({"addresses": ["10.0.0.1", "192.168.0.1"], "host": "w0"}, {}, {})
    for node, reached in zip(found[1:], (("10.0.0.1", "192.168.0.1"), ("192.168.0.1",)), strict=True):
        node.tries = [ConnectionAttempt("w0", 7000, reached, "refused")]
    assert _agreed(found[0], found, RendezvousOptions()) == "192.168.0.1"
    judge(found, NEEDS)
    found[1].tries = [
        ConnectionAttempt("w0", 7000, ("10.0.0.1",), "refused")
    ]  # now no address is common to both
    assert _agreed(found[0], found, RendezvousOptions()) == "10.0.0.1"
    (row,) = rows_of(found)
    assert row.startswith(
        "w2  cannot reach w0:7000: only at 192.168.0.1, but others at 10.0.0.1: set --master_addr"
    )
