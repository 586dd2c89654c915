"""One table of everything that is wrong with the nodes."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from launcher.cluster.hostfile import Host
from launcher.cluster.node import Node
from launcher.cluster.preflight import Needs, judge
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
NEEDS = Needs({"/w/ds.json": "d1"}, "cpu")


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
        ({"versions": {**GOOD["versions"], "torch": "2.11"}}, "torch is 2.11, on the others it is 2.13"),
        ({"versions": {**GOOD["versions"], "torch": None}}, "torch is not installed, on the others"),
        ({"source": "other"}, "its launcher is another version"),
        ({"files": {"/w/ds.json": None}}, "there is no file /w/ds.json"),
        ({"files": {"/w/ds.json": "d2"}}, "/w/ds.json is another file there than here"),
        ({"memory": 1 << 20}, "1 MiB of memory are free for 2 ranks"),
        ({"clock": 1090.2}, "its clock is 90 s ahead"),
        (None, "no such name: see the hostfile"),
    ],
)
def test_what_is_wrong_with_one_host(change: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        judge(nodes({}, change, {}), NEEDS)
    text = str(caught.value)
    assert text.startswith("1 of 3 hosts are not ready, and nothing was started:\n  w1  ") and said in text
    assert "w0" not in text and "w2" not in text


def test_all_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        judge(nodes({}, None, {"memory": 0, "source": "x"}, {}), NEEDS)
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == ["w1", "w2", "w2"]


def test_devices_and_slots() -> None:
    judge(nodes({"gpus": 2}), Needs({}, "auto"))
    with pytest.raises(
        ConfigError, match="1 CUDA devices are visible, slot 1 is wanted, CUDA_VISIBLE_DEVICES=3"
    ):
        judge(nodes({"gpus": 1, "mask": "3"}), Needs({}, "auto"))
    with pytest.raises(ConfigError, match="no CUDA device is visible"):
        judge(nodes({}), Needs({}, "cuda"))
