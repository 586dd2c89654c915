"""Replicated values that differ between ranks are detected and reported."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.errors import LauncherError
from launcher.zero.features.replicas import digests
from tests.engine.driving import advance, config_of, engine_of, log_lines
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

FLIPS = 50


def checked(stage: int, **section: Any) -> Any:
    return engine_of(config_of(stage, replica_check={"every": 2, **section}), stack())


def held_alike(engine: Any, stage: int) -> list[tuple[str, Tensor]]:
    """Return every replicated tensor by its name."""
    found = []
    for flat in engine.zero.flats:
        found += [(slot.name, flat.full[slot.span]) for slot in flat.slots] if not flat.sharded else []
        if stage == 0:
            for slot in flat.slots:
                states = engine.optimizer.states_in_memory(slot.name)
                found += [(f"{key} of {slot.name}", states[key]) for key in ("exp_avg", "exp_avg_sq")]
    return found


def flip(ctx: RankContext, stage: int, flips: int) -> list[tuple[str, int, str]]:
    """Flip one bit at a time on one rank, like a fault; return (tensor, rank, message)."""
    engine, dice, said = checked(stage), random.Random(stage), []
    advance(engine, ctx, range(1))
    for _ in range(flips):
        name, tensor = dice.choice(held_alike(engine, stage))
        victim, at, bit = dice.randrange(ctx.world), dice.randrange(tensor.numel()), dice.randrange(32)
        words = tensor.view(torch.int32)
        if ctx.rank == victim:
            words[at] ^= -(1 << 31) if bit == 31 else 1 << bit
        with pytest.raises(LauncherError) as caught:
            advance(engine, ctx, range(1))
        engine.abandon_step()
        if ctx.rank == victim:
            words[at] ^= -(1 << 31) if bit == 31 else 1 << bit
        said.append((name, victim, str(caught.value)))
    advance(engine, ctx, range(4))  # nothing is left of them
    return said


@pytest.mark.key("replica_check", "replica_check.every")
@pytest.mark.parametrize(("stage", "flips"), [(0, FLIPS), (1, 15), (2, 15)])
def test_one_flipped_bit_is_found_and_named(pool: WorkerPool, stage: int, flips: int) -> None:
    for said in pool.run(flip, 4, stage, flips):
        assert len(said) == flips
        for name, victim, text in said:
            assert f"rank {victim} differs from all other replicas of {name}\n" in text


def part(ctx: RankContext, action: str) -> str:
    """Run a script that changes weights on one rank."""
    engine = checked(1, action=action)
    advance(engine, ctx, range(1))
    if ctx.rank == 0:
        next(engine.module.parameters()).data.mul_(2)
    with log_lines() as heard:
        try:
            advance(engine, ctx, range(1))
        except LauncherError as error:
            return f"error: {error}"
    return "".join(text for text in heard if "before step 2" in text)


@pytest.mark.key("replica_check.action")
@pytest.mark.parametrize("action", ["stop", "warn"])
def test_two_ranks_cannot_tell_which_is_right(pool: WorkerPool, action: str) -> None:
    for said in pool.run(part, 2, action):
        assert "ranks 0,1 have different values of " in said and "no majority determines" in said
        assert said.startswith("error: ") == (action == "stop")


def never(ctx: RankContext) -> list[float]:
    return advance(checked(2, every=0), ctx, range(4))


def always(ctx: RankContext, stage: int) -> list[float]:
    return advance(checked(stage, every=1), ctx, range(4))


def test_nothing_is_changed_by_looking(pool: WorkerPool) -> None:
    assert pool.run(always, 2, 2) == pool.run(never, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_any_bit_changes_a_digest(dtype: torch.dtype) -> None:
    for numel in (1, 7, 16):
        tensor = torch.arange(numel).to(dtype)
        (before,) = digests([tensor])
        bits = tensor.view(torch.uint8)
        for at in range(len(bits)):
            for bit in range(8):
                bits[at] ^= 1 << bit
                assert digests([tensor]) != [before]
                bits[at] ^= 1 << bit
