"""The order of use is recorded once, followed with prefetch, and recorded again when a step departs from it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from launcher.zero.policy import ZeroPolicy
from launcher.zero.unshard import Unsharder


@dataclass(eq=False)
class FakeUnit:
    """The interface of a unit that the unsharder uses."""

    name: str
    numel: int = 100
    starts: int = 0
    whole: bool = False
    is_offloaded: bool = False
    fetches: int = 0
    held: bool = False

    @property
    def sharded(self) -> bool:
        return self.numel > 0

    def fetch(self) -> None:
        self.fetches += 1

    def rest(self) -> None:
        """Do nothing: offload is not part of these tests."""

    def unshard(self, phase: str) -> None:
        self.starts += 1

    def wait_for_unshard(self) -> None:
        self.whole = True

    def reshard(self) -> None:
        self.whole = False


def unsharder(**sizes: int) -> Unsharder:
    policy = {"prefetch_bucket_size": 0, "max_reuse_distance": 0, "max_live_parameters": 10**9, **sizes}
    return Unsharder(ZeroPolicy.of_stage(3, **policy))


def iterate(fetch: Unsharder, units: list[FakeUnit]) -> list[list[str]]:
    """Run one forward and backward; return what was gathered or in flight at each use."""
    seen = []
    fetch.begin(with_grad=True)
    for unit in units:
        fetch.use(unit, "forward")
        assert unit.whole
        seen.append([u.name for u in fetch.unsharded])
        fetch.leave(unit)
    for unit in reversed(units):
        fetch.use(unit, "backward")
        assert unit.whole
        seen.append([u.name for u in fetch.unsharded])
        fetch.reshard(unit)
    fetch.end()
    return seen


def test_the_first_iteration_only_records() -> None:
    seen = iterate(
        unsharder(prefetch_bucket_size=10**9, max_reuse_distance=10**9), [FakeUnit(c) for c in "abc"]
    )
    assert seen == [["a"], ["b"], ["c"], ["c"], ["b"], ["a"]]


@pytest.mark.parametrize(("size", "ahead"), [(0, 0), (1, 1), (100, 1), (101, 2), (250, 3)])
def test_prefetch_bucket_size(size: int, ahead: int) -> None:
    units = [FakeUnit(c) for c in "abcdef"]
    fetch = unsharder(prefetch_bucket_size=size)
    iterate(fetch, units)
    assert len(iterate(fetch, units)[0]) == 1 + ahead


def test_max_live_parameters_stops_prefetch_but_never_the_unit_in_use() -> None:
    units = [FakeUnit(c) for c in "abcd"]
    fetch = unsharder(prefetch_bucket_size=10**9, max_live_parameters=200)
    iterate(fetch, units)
    assert max(len(live) for live in iterate(fetch, units)) == 2
    fetch = unsharder(prefetch_bucket_size=10**9, max_live_parameters=0)
    iterate(fetch, units)
    assert iterate(fetch, units) == [["a"], ["b"], ["c"], ["d"], ["d"], ["c"], ["b"], ["a"]]


@pytest.mark.parametrize(("distance", "gathers"), [(0, 7), (200, 6), (400, 5), (10**9, 4)])
def test_max_reuse_distance(distance: int, gathers: int) -> None:
    """d is reused at once, c after d (100 elements twice: kept copy and backward), b after 4 units, ..."""
    units = [FakeUnit(c) for c in "abcd"]
    fetch = unsharder(max_reuse_distance=distance)
    iterate(fetch, units)
    before = sum(unit.starts for unit in units)
    iterate(fetch, units)
    assert sum(unit.starts for unit in units) - before == gathers


def test_another_order_falls_back_and_is_recorded() -> None:
    a, b, c = units = [FakeUnit(name) for name in "abc"]
    fetch = unsharder(prefetch_bucket_size=1)
    iterate(fetch, units)
    turned = [b, a, c]
    iterate(fetch, turned)  # every use is served all the same: asserted inside
    assert iterate(fetch, turned)[0] == ["b", "a"]  # and now a, not c, is fetched ahead


def test_forwards_without_gradients_have_an_order_of_their_own() -> None:
    units = [FakeUnit(name) for name in "abc"]
    fetch = unsharder(prefetch_bucket_size=1)
    iterate(fetch, units)
    for _ in range(2):
        fetch.begin(with_grad=False)
        for unit in units:
            fetch.use(unit, "forward")
            fetch.leave(unit)
        fetch.end()
    assert iterate(fetch, units)[0] == ["a", "b"]
    assert not fetch.unsharded


@pytest.mark.key("zero_optimization.log_trace_cache_warnings")
@pytest.mark.parametrize("warn", [True, False])
def test_a_change_of_order_is_reported_when_asked_for(warn: bool, caplog: pytest.LogCaptureFixture) -> None:
    a, b, c = units = [FakeUnit(name) for name in "abc"]
    fetch = unsharder(prefetch_bucket_size=1, warn_of_order=warn)
    for order in (units, units, [a, c, b], [a, c, b]):
        iterate(fetch, order)
    said = ["unit c was used where b was used before, at position 2 of the iteration"]
    assert len(caplog.messages) == len(said) * warn
    assert not warn or said[0] in caplog.messages[0]


@pytest.mark.parametrize(("elements", "number", "asked"), [(1000, 2, 2), (100, 5, 1), (1000, 9, 5)])
def test_what_rests_elsewhere_is_read_ahead_and_gathered_one_use_later(
    elements: int, number: int, asked: int
) -> None:
    units = [FakeUnit(c, is_offloaded=True) for c in "abcdef"]
    fetch = Unsharder(ZeroPolicy.of_stage(3, prefetch_bucket_size=100), elements, number)
    iterate(fetch, units)
    fetch.begin(with_grad=True)
    fetch.use(units[0], "forward")
    assert [unit.fetches for unit in units] == [0] + [1] * asked + [0] * (5 - asked)
    assert [unit.starts for unit in units[1:3]] == [2, 2], "gathered in the first iteration only"
    fetch.use(units[1], "forward")
    assert units[2].starts == (3 if asked > 1 else 2), "whose read was asked for one use before"


def test_what_rests_elsewhere_is_kept_no_longer_than_it_would_be_read_ahead() -> None:
    """Memory must not grow with the model: without a limit, all units would be in memory at the end of the forward."""

    def most(*, saves_memory: bool) -> int:
        units = [FakeUnit(c, is_offloaded=True) for c in "abcdefghij"]
        policy = ZeroPolicy.of_stage(3, prefetch_bucket_size=10**9, max_reuse_distance=10**9)
        fetch = Unsharder(policy, max_loaded_numel=10**9, max_loaded_units=3, saves_memory=saves_memory)
        iterate(fetch, units)
        return max(len(live) for live in iterate(fetch, units))

    assert most(saves_memory=False) == 10
    assert most(saves_memory=True) <= 1 + 3
