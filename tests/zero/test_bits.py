"""Bits that change without a write, and bits that are computed wrongly, are detected and reported."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from launcher.config import load
from launcher.errors import ConfigError, LauncherError
from launcher.zero.features.replicas import states_of
from launcher.zero.gradients import FlatGradient
from tests.engine.driving import advance_one, config_of, engine_of, log_lines, microbatches
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

FLIPS = 50


def train(engine: Any, ctx: RankContext, steps: range) -> list[float]:
    parts = [microbatches(ctx, step, engine.gradient_accumulation_steps()) for step in steps]
    return [float(engine.train_batch(iter(part))) for part in parts]


def flip(tensor: Tensor, at: int, bit: int) -> None:
    """Change one bit like a hardware fault, unnoticed by torch."""
    words = tensor.detach().reshape(-1).numpy().view(np.uint32)
    words[at] ^= np.uint32(1 << bit)


def held_alone(engine: Any) -> list[tuple[str, Tensor]]:
    found = []
    for flat in engine.zero.flats:
        if flat.sharded:
            for slot, start, stop in flat.overlaps(flat.shard_span):
                at = slot.offset + start - flat.shard_span.start
                found.append((slot.name, flat.shard[at : at + stop - start]))
        found += states_of(flat, engine.optimizer.states_in_memory)
    return found


def flip_at_rest(ctx: RankContext, stage: int, flips: int) -> list[tuple[str, int, str]]:
    section = {"every": 0, "resting": True}
    engine = engine_of(config_of(stage, replica_check=section), stack())
    dice, said = random.Random(stage), []
    train(engine, ctx, range(1))
    for _ in range(flips):
        victim, which, where, bit = (
            dice.randrange(ctx.world),
            dice.random(),
            dice.random(),
            dice.randrange(32),
        )
        names = held_alone(engine)
        name, tensor = names[int(which * len(names))]
        at = int(where * tensor.numel())
        if ctx.rank == victim:
            flip(tensor, at, bit)
        with pytest.raises(LauncherError) as caught:
            train(engine, ctx, range(1, 2))
        engine.abandon_step()
        if ctx.rank == victim:
            flip(tensor, at, bit)
        said.append((name, victim, str(caught.value)))
    train(engine, ctx, range(1, 4))  # nothing is left of them
    return said


@pytest.mark.key("replica_check.resting")
@pytest.mark.parametrize(("stage", "flips"), [(1, 15), (2, 15), (3, FLIPS)])
def test_a_bit_that_changes_between_two_steps_is_found_and_named(
    pool: WorkerPool, stage: int, flips: int
) -> None:
    for rank, said in enumerate(pool.run(flip_at_rest, 2, stage, flips)):
        assert len(said) == flips
        for name, victim, text in said:
            if victim == rank:
                assert f"rank {victim} has different bits in {name} than after the previous step" in text
            else:
                assert f"rank {victim} has different bits in " in text


def faulty(due: int, where: float, bit: int) -> Callable[[FlatGradient, Tensor], Tensor]:
    """Replace `to_wire`, and flip one bit in call number `due`."""
    to_wire, counted = FlatGradient.to_wire, count()

    def flipping(self: FlatGradient, full: Tensor) -> Tensor:
        if next(counted) == due:
            slot = self.flat.slots[0]
            flip(full[slot.span], int(where * slot.numel), bit)
        return to_wire(self, full)

    return flipping


def wrong_gradients(ctx: RankContext, stage: int, accumulation: int, flips: int) -> list[tuple[int, str]]:
    section = {"every": 0, "replay_every": 1}
    engine = engine_of(config_of(stage, accumulation, replica_check=section), stack())
    dice, said = random.Random(stage), []
    train(engine, ctx, range(1))
    before = [value.clone() for value in (flat.master for flat in engine.zero.flats)]
    for _ in range(flips):
        victim, call, where, bit = dice.randrange(ctx.world), dice.random(), dice.random(), dice.randrange(32)
        calls = 2 * len(engine.zero.gradients) * (accumulation if stage > 1 else 1)
        due = int(call * calls) if ctx.rank == victim else calls
        with (
            patch.object(FlatGradient, "to_wire", faulty(due, where, bit)),
            pytest.raises(LauncherError) as caught,
        ):
            train(engine, ctx, range(1, 2))
        engine.abandon_step()
        said.append((victim, str(caught.value)))
    for value, flat in zip(before, engine.zero.flats, strict=True):
        assert torch.equal(value, flat.master), "the step is not taken"
    return said


@pytest.mark.key("replica_check.replay_every")
@pytest.mark.parametrize(
    ("stage", "accumulation", "flips"), [(0, 2, 15), (1, 1, 15), (2, 2, 15), (3, 1, FLIPS)]
)
def test_a_wrong_bit_of_a_gradient_is_found_and_named(
    pool: WorkerPool, stage: int, accumulation: int, flips: int
) -> None:
    for said in pool.run(wrong_gradients, 2, stage, accumulation, flips):
        assert len(said) == flips
        for victim, text in said:
            assert f"rank {victim} computed different bits of the gradient of " in text


class Noisy(nn.Module):
    """Draws random numbers, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = stack()
        self.drop, self.norm, self.model = nn.Dropout(0.5), nn.BatchNorm1d(4, affine=False), model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.model(self.drop(self.norm(x)), y)
        return result


def looked_at(ctx: RankContext, stage: int, section: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(ctx.rank)
    engine = engine_of(config_of(stage, 2, replica_check=section), Noisy())
    losses = train(engine, ctx, range(4))
    return losses, [buffer.clone() for buffer in engine.module.buffers()]


@pytest.mark.parametrize("stage", [0, 3])
def test_looking_changes_nothing(pool: WorkerPool, stage: int) -> None:
    both = {"every": 1, "resting": True, "replay_every": 2}
    for (seen, buffers), (plain, others) in zip(
        pool.run(looked_at, 2, stage, both), pool.run(looked_at, 2, stage, {"every": 0}), strict=True
    ):
        assert seen == plain
        assert all(torch.equal(one, other) for one, other in zip(buffers, others, strict=True))


def written(ctx: RankContext, write: Callable[[Tensor], object]) -> list[str]:
    """Return the messages after a script writes to weights between two steps."""
    engine = engine_of(config_of(1, replica_check={"every": 0, "resting": True, "action": "warn"}), stack())
    train(engine, ctx, range(1))
    with torch.no_grad():
        for flat in engine.zero.flats:
            for _, state in states_of(flat, engine.optimizer.states_in_memory):
                write(state)
    with log_lines() as heard:
        train(engine, ctx, range(1, 2))
    return [text for text in heard if "before step 2" in text]


def double(state: Tensor) -> None:
    state.mul_(2)


def double_unseen(state: Tensor) -> None:
    state.data.mul_(2)


def test_what_a_program_writes_is_no_fault(pool: WorkerPool) -> None:
    assert pool.run(written, 2, double) == [[], []]
    for said in pool.run(written, 2, double_unseen):
        assert "Writes through tensor.data are not detected" in "".join(said)


def scripted(ctx: RankContext, stage: int, directory: str) -> None:
    """Write to parameters and load, in each way that torch and the engine provide."""
    engine = engine_of(config_of(stage, replica_check={"every": 0, "resting": True}), stack())
    for step in range(2):  # what is loaded may lie where other values did
        train(engine, ctx, range(step, step + 1))
        engine.save_checkpoint(directory, f"step{step}")
        train(engine, ctx, range(step + 1, step + 2))
        engine.load_checkpoint(directory, f"step{step}")
    if stage < 3:
        train(engine, ctx, range(2, 3))
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.mul_(0.9)
        train(engine, ctx, range(3, 4))
        engine.module.load_state_dict(stack().state_dict())
    train(engine, ctx, range(4, 6))


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (3, 2)])
def test_what_a_script_writes_and_loads_is_no_fault(
    pool: WorkerPool, tmp_path: Path, stage: int, ranks: int
) -> None:
    pool.run(scripted, ranks, stage, str(tmp_path))


class Moving(nn.Module):
    """Replaces its buffer by another tensor at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.model = stack()
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        result: Tensor = self.model(self.drop(x - self.mean), y)
        return result


def with_random_data(ctx: RankContext, every: int) -> tuple[list[float], Tensor]:
    """Return data that draw random numbers when they are read, between those of the model."""
    torch.manual_seed(ctx.rank)
    engine = engine_of(config_of(1, 2, replica_check={"every": 0, "replay_every": every}), Moving())
    losses = []
    for step in range(4):
        rows = ((x + torch.randn_like(x), y) for x, y in microbatches(ctx, step, 2))
        losses.append(float(engine.train_batch(rows)))
    return losses, engine.module.mean.clone()


def test_data_may_draw_random_numbers_and_buffers_may_be_assigned(pool: WorkerPool) -> None:
    for (seen, mean), (plain, other) in zip(
        pool.run(with_random_data, 2, 2), pool.run(with_random_data, 2, 0), strict=True
    ):
        assert seen == plain and torch.equal(mean, other)


def random_model(ctx: RankContext) -> str:
    """Return a model that is not deterministic."""
    engine = engine_of(config_of(2, replica_check={"replay_every": 1}), stack())
    numbers = random.SystemRandom()
    engine.module.register_forward_pre_hook(lambda _, args: (args[0] * numbers.random(), args[1]))
    with pytest.raises(LauncherError) as caught:
        train(engine, ctx, range(1))
    return str(caught.value)


def test_a_model_that_is_not_deterministic_is_told_from_a_fault(pool: WorkerPool) -> None:
    for text in pool.run(random_model, 2):
        assert "rank 0 computed different bits of the loss" in text
        assert "the model is probably not deterministic" in text


def by_itself(ctx: RankContext) -> list[str]:
    engine = engine_of(config_of(1, replica_check={"replay_every": 1}), stack())
    with log_lines() as heard:
        for step in range(3):
            advance_one(engine, microbatches(ctx, step))
    return [text for text in heard if "replay_every" in text]


def test_a_script_that_runs_its_own_backward_is_told_that_nothing_is_replayed(pool: WorkerPool) -> None:
    said = pool.run(by_itself, 2)
    assert len(said[0]) == 1 and "step 1 is not replayed" in said[0][0]


def test_weights_of_asynchronous_schedules_neither_rest_nor_are_replayed() -> None:
    section = {"stages": 2, "schedule": "2bw"}
    for key, value in {"replay_every": 1, "resting": True}.items():
        with pytest.raises(ConfigError, match=f"replica_check.{key}"):
            load(config_of(0, replica_check={key: value}, pipeline=section))
