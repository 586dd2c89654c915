"""Distribution of cores over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cluster import cores
from launcher.errors import ConfigError


def test_list_of_numbers_and_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: list(range(10)))
    assert cores.parse_core_list("0-3, 8") == [0, 1, 2, 3, 8]


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "5,99"])
def test_wrong_list_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: list(range(10)))
    with pytest.raises(ConfigError):
        cores.parse_core_list(text)


def machine(directory: Path, nodes: dict[int, str], siblings: dict[int, str] | None = None) -> Path:
    """Simulate Linux's description of a machine with these cores in its NUMA nodes."""
    for node, listed in nodes.items():
        (directory / f"node/node{node}").mkdir(parents=True)
        (directory / f"node/node{node}/cpulist").write_text(f"{listed}\n")
    for core, listed in (siblings or {}).items():
        (directory / f"cpu/cpu{core}/topology").mkdir(parents=True)
        (directory / f"cpu/cpu{core}/topology/thread_siblings_list").write_text(f"{listed}\n")
    return directory


def test_shares_are_equal_and_disjoint(tmp_path: Path) -> None:
    assert cores.share_cores([0, 1, 2, 4, 5, 6, 7], 3, tmp_path) == [[0, 1], [2, 4], [5, 6]]
    with pytest.raises(ConfigError, match="2 cores cannot be divided among 3 ranks"):
        cores.share_cores([0, 1], 3, tmp_path)


@pytest.mark.parametrize(
    ("nodes", "count", "ranks", "shares"),
    [
        # The cores of a node are not always neighbours.
        ({0: "0-3,8-11", 1: "4-7,12-15"}, 16, 2, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        ({0: "0,2,4,6", 1: "1,3,5,7"}, 8, 4, [[0, 2], [4, 6], [1, 3], [5, 7]]),
        # 3 ranks would have 2 cores each, and the second would lie in two nodes: 1 of 2 is too much to give up.
        ({0: "0-2", 1: "3-5"}, 6, 3, [[0, 1], [2, 3], [4, 5]]),
        # 6 cores each, and the second would lie in two nodes: 5 each do not.
        ({0: "0-9", 1: "10-19"}, 20, 3, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]),
        # One rank has the whole machine.
        ({0: "0-1", 1: "2-3"}, 4, 1, [[0, 1, 2, 3]]),
        # Nodes of memory only, and cores of no node.
        ({0: "0-1", 1: "", 10: "2-3"}, 6, 3, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_shares_lie_in_one_node(
    tmp_path: Path, nodes: dict[int, str], count: int, ranks: int, shares: list[list[int]]
) -> None:
    system = machine(tmp_path, nodes)
    found = cores.share_cores(range(count), ranks, system)
    assert found == shares
    assert cores.threads(ranks, found) == len(shares[0])


def test_only_cores_that_may_be_used_are_shared(tmp_path: Path) -> None:
    system = machine(tmp_path, {0: "0-7", 1: "8-15"})
    assert cores.share_cores([2, 3, 8, 9, 10, 11], 3, system) == [[2, 3], [8, 9], [10, 11]]


def test_hyperthreads_of_a_core_stay_together(tmp_path: Path) -> None:
    pairs = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}
    system = machine(tmp_path, {0: "0-7"}, pairs)
    assert cores.share_cores(range(8), 2, system) == [[0, 1, 4, 5], [2, 3, 6, 7]]
