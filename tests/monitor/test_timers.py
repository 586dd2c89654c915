"""Times of phases, and no overhead while disabled."""

from __future__ import annotations

import pytest

from launcher.monitor import timers as timers_module
from launcher.monitor.timers import Timers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets: `clock[0]` is the time in seconds."""
    time = [0.0]
    monkeypatch.setattr(timers_module.time, "perf_counter", lambda: time[0])
    return time


def test_means_per_step_over_microbatches_in_the_order_of_a_step(clock: list[float]) -> None:
    timers = Timers(enabled=True)
    for _ in range(2):  # steps
        for _ in range(3):  # microbatches
            with timers("backward"):
                clock[0] += 0.002
                with timers("reduce"):
                    clock[0] += 0.001
            with timers("forward"):
                clock[0] += 0.010
    assert timers.mean_ms(2, reset=False) == pytest.approx({"forward": 30.0, "backward": 9.0, "reduce": 3.0})
    assert timers.line(2) == "forward 30.0 ms | backward 9.0 ms | reduce 3.0 ms"
    assert timers.mean_ms(2) == {}


def test_a_phase_that_fails_is_counted_and_fails_on(clock: list[float]) -> None:
    timers = Timers(enabled=True)
    with pytest.raises(ValueError), timers("step"):
        clock[0] += 1.0
        raise ValueError
    assert timers.mean_ms(1) == {"step": 1000.0}


def test_while_off_nothing_is_measured_or_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> float:
        raise AssertionError("the clock was read")

    monkeypatch.setattr(timers_module.time, "perf_counter", forbidden)
    timers = Timers(enabled=False, device="cuda:0")
    with timers("forward"), timers("backward"):
        pass
    assert timers("forward") is timers("step")
    assert timers.mean_ms(1) == {} and timers.line(1) == ""


def test_cuda_is_waited_for_at_both_ends_only_while_on(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    with Timers(enabled=True, device="cuda:1")("forward"):
        assert waited == ["cuda:1"]
    assert waited == ["cuda:1", "cuda:1"]
    with Timers(enabled=False, device="cuda:1")("forward"), Timers(enabled=True, device="cpu")("forward"):
        pass
    assert len(waited) == 2


def test_the_last_step_by_itself_and_the_mean_of_all(clock: list[float]) -> None:
    timers = Timers(enabled=True)
    for milliseconds in (10, 30):
        with timers("forward"):
            clock[0] += milliseconds / 1000
        timers.end_step()
        assert timers.last_step == pytest.approx({"forward": milliseconds})
    assert timers.mean_ms(2) == pytest.approx({"forward": 20.0})
    timers.add("forward", 0.005)
    timers.end_step()  # a reset in between takes nothing from the next step
    assert timers.last_step == pytest.approx({"forward": 5.0})
