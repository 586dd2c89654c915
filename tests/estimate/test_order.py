"""The estimate executes a step like the engine: the same actions, gathers and reductions in the same order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from transformers import PretrainedConfig

from launcher.config import Config, load
from launcher.estimate import dry_run
from launcher.estimate.estimator import Estimator
from launcher.estimate.replay import ScriptedStep
from launcher.optim.states import FlatState
from launcher.pipeline.executor import action_loop
from launcher.zero.reduce import Reducer
from launcher.zero.unit import Unit
from tests.estimate.cases import EVERY_UNIT_FREED, NVME, config_of
from tests.pool.reference import SEQ, tiny_llama

DP = 2


class Recording:
    """Records the events of a step. `step` clears it, so it holds the last step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._monkeypatch = monkeypatch
        self._note(action_loop, "run_action", lambda action, stages, last: f"{action}{', the last' * last}")
        self._note(Unit, "unshard", lambda unit, phase: f"unshard {unit.name} in {phase}")
        self._note(
            Unit, "reshard", lambda unit: f"reshard {unit.name}" if unit.sharded and unit.is_unsharded else ""
        )
        self._note(Reducer, "ready", lambda reducer, unit: f"{unit.name} is ready, {planned(reducer)}")
        self._note(Reducer, "finish", lambda reducer: "the backward ends" if reducer.plan.reduces else "")
        self._note(Reducer, "flush", lambda reducer: "flush" if reducer.unsent else "")
        for name in ("fetch", "show", "hide"):
            self._note(FlatState, name, lambda state, name=name: f"{name} {state.flat.name}")

    def step_is(self, owner: Any, name: str) -> None:
        """Treat each call of this as a step."""
        run = getattr(owner, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            self.events.clear()
            return run(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, step)

    def taken(self) -> list[str]:
        """Return the events of the last step.

        The unsharder determines which of several units is gathered or freed first.
        """
        events = [event for event in self.events if event]
        self.events.clear()
        runs = (list(run) for _, run in groupby(events, lambda event: event.partition(" ")[0]))
        return [event for run in runs for event in (sorted(run) if "shard" in run[0] else run)]

    def _note(self, owner: Any, name: str, say: Callable[..., str]) -> None:
        run = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.events.append(say(*args, **kwargs))
            return run(*args, **kwargs)

        self._monkeypatch.setattr(owner, name, noted)


def planned(reducer: Reducer) -> str:
    plan = reducer.plan
    return f"{'reducing' if plan.reduces else 'adding up'}{', the last' * plan.last}"


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    config: PretrainedConfig = tiny_llama(layers=4, vocab=128).config
    return Estimator(config)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording(monkeypatch)
    recording.step_is(dry_run, "_step")
    recording.step_is(ScriptedStep, "run")
    return recording


def orders(
    estimator: Estimator, recording: Recording, config: Config, world: int, rank: int
) -> tuple[list[str], list[str]]:
    """Return the events of a step in the estimate, and in the engine."""
    estimator.estimate(config, world, rank, SEQ)
    estimated = recording.taken()
    dry_run.dry_run(estimator.copy(), config, world=world, rank=rank, sequence=SEQ)
    return estimated, recording.taken()


@pytest.mark.pairwise
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize(("rank", "accumulation"), [(0, 4), (1, 2), (1, 4)])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(
    estimator: Estimator,
    recording: Recording,
    stage: int,
    each: bool,
    rank: int,
    schedule: str,
    accumulation: int,
) -> None:
    config = config_of(
        stage,
        EVERY_UNIT_FREED,
        gradient_accumulation_steps=accumulation,
        pipeline={
            "stages": 2,
            "schedule": schedule,
            "gather_per_microbatch": each,
            "reduce_per_microbatch": each,
        },
    )
    estimated, done = orders(estimator, recording, load(config), 2 * DP, rank * DP)
    assert estimated == done


@pytest.mark.pairwise
@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", [0, 1])
def test_stages_with_delayed_weights(
    estimator: Estimator, recording: Recording, stage: int, rank: int, schedule: str, accumulation: int
) -> None:
    config = config_of(
        stage,
        EVERY_UNIT_FREED,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.0 if schedule == "pipedream" else 1.0,
        pipeline={"stages": 2, "schedule": schedule},
    )
    estimated, done = orders(estimator, recording, load(config), 2 * DP, rank * DP)
    assert estimated == done


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_stage(estimator: Estimator, recording: Recording, stage: int, accumulation: int) -> None:
    config = config_of(stage, EVERY_UNIT_FREED, gradient_accumulation_steps=accumulation)
    estimated, done = orders(estimator, recording, load(config), DP, 0)
    assert estimated == done


@pytest.mark.parametrize("pipelined", [False, True])
def test_what_rests_on_nvme(estimator: Estimator, recording: Recording, pipelined: bool) -> None:
    """The optimizer reads, steps and frees buffers in the same order."""
    tier = NVME | {"pipeline_read": pipelined, "pipeline_write": pipelined}
    offload = {"offload_optimizer": tier, "offload_param": NVME | {"max_in_cpu": 0}}
    config = config_of(3, {**EVERY_UNIT_FREED, **offload})
    estimated, done = orders(estimator, recording, load(config), DP, 0)
    assert estimated == done
    assert any(event.startswith("hide") for event in done)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_parameters_are_freed_before_what_was_put_off_is_reduced(
    estimator: Estimator, recording: Recording, schedule: str
) -> None:
    """Otherwise a rank holds both at once: its gathered parameters, and the gradient buffers for communication."""
    config = config_of(3, EVERY_UNIT_FREED, pipeline={"stages": 2, "schedule": schedule})
    for events in orders(estimator, recording, load(config), 2 * DP, 0):
        freed = [at for at, event in enumerate(events) if event.startswith("reshard")]
        assert freed and max(freed) < events.index("flush")
