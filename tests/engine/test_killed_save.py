"""The state of a run after a killed save, a full disk, or a damaged file."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.errors import CheckpointError
from tests.engine.driving import advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.zero.models import stack

FIRST, SECOND, THIRD = range(2), range(2, 4), range(4, 6)


@contextmanager
def at_call(name: str, number: int, act: Callable[[], Any]) -> Iterator[None]:
    """Call `act` instead of call number `number` of os.<name>, and of all later ones."""
    real, calls = getattr(os, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return act() if calls >= number else real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, call)
        yield


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_twice_and_die(
    ctx: RankContext, stage: int, directory: Path, victim: int, name: str, number: int
) -> None:
    engine = engine_of(config_of(stage))
    advance(engine, ctx, FIRST)
    engine.save_checkpoint(directory, "first", client_state={"steps": 2})
    advance(engine, ctx, SECOND)
    if ctx.rank == victim:
        with at_call(name, number, die):
            engine.save_checkpoint(directory, "second")
    engine.save_checkpoint(directory, "second")


def go_on(ctx: RankContext, stage: int, directory: Path) -> list[float]:
    engine = engine_of(config_of(stage), stack(seed=1))
    path, client = engine.load_checkpoint(directory)
    assert path == str(directory / "first") and client == {"steps": 2}
    losses = advance(engine, ctx, SECOND)
    engine.save_checkpoint(directory, "second")
    assert engine.load_checkpoint(directory)[0] == str(directory / "second")
    return losses + advance(engine, ctx, THIRD)


def straight(ctx: RankContext, stage: int) -> list[float]:
    return advance(engine_of(config_of(stage)), ctx, [*FIRST, *SECOND, *THIRD])[2:]


@pytest.mark.parametrize(("stage", "victim", "name", "number"), [
    (0, 0, "rename", 2),  # of the directory; the first is torch's, of .metadata
    (3, 1, "fsync", 1),
])  # fmt: skip
def test_a_killed_save_leaves_the_one_before(
    pool: WorkerPool, tmp_path: Path, stage: int, victim: int, name: str, number: int
) -> None:
    """Killed before the last rename, and on one rank in the middle of writing; then the same tag is saved again."""
    with pytest.raises(RanksFailed, match="exit code -9"):
        pool.run(save_twice_and_die, 2, stage, tmp_path, victim, name, number)
    assert (tmp_path / "latest").read_text() == "first\n"
    assert pool.run(go_on, 2, stage, tmp_path) == pool.run(straight, 2, stage)
    assert {entry.name for entry in tmp_path.iterdir()} == {"first", "second", "latest"}


def save_on_a_full_disk(ctx: RankContext, stage: int, directory: Path, name: str) -> tuple[str, list[float]]:
    engine = engine_of(config_of(stage))
    advance(engine, ctx, FIRST)
    engine.save_checkpoint(directory, "first")
    message, losses = "", advance(engine, ctx, SECOND)
    try:
        with at_call(name, 1 if ctx.rank == 1 or name == "rename" else 10**6, full):
            engine.save_checkpoint(directory, "second")
    except CheckpointError as error:
        message = str(error)
    losses += advance(engine, ctx, THIRD)
    if ctx.rank == 0:
        assert {entry.name for entry in directory.iterdir()} == {"first", "latest"}
    assert engine.load_checkpoint(directory)[0] == str(directory / "first")
    assert advance(engine, ctx, [*SECOND, *THIRD]) == losses
    return message, losses


@pytest.mark.parametrize(("stage", "name"), [(0, "rename"), (3, "fsync")])
def test_a_full_disk_is_told_and_training_can_go_on(
    pool: WorkerPool, tmp_path: Path, stage: int, name: str
) -> None:
    want = pool.run(straight, 2, stage)
    for rank, (message, losses) in enumerate(pool.run(save_on_a_full_disk, 2, stage, tmp_path, name)):
        assert "No space left on device" in message and "could not be written" in message
        assert losses == want[rank]


def save_two(ctx: RankContext, directory: Path) -> dict[str, Tensor]:
    engine = engine_of(config_of(3))
    advance(engine, ctx, FIRST)
    engine.save_checkpoint(directory, "first")
    weights = whole_weights(engine)
    advance(engine, ctx, SECOND)
    engine.save_checkpoint(directory, "second")
    return weights


def load_damaged(ctx: RankContext, stage: int, directory: Path) -> tuple[str, dict[str, Tensor]]:
    engine = engine_of(config_of(stage), stack(seed=1))
    message = ""
    try:
        engine.load_checkpoint(directory)
    except CheckpointError as error:
        message = str(error)
    engine.load_checkpoint(directory, "first")
    assert engine.global_steps == 2
    return message, whole_weights(engine)


def flip(content: bytes) -> bytes:
    """Flip one bit in every kilobyte, from the first tensor's data on."""
    changed = bytearray(content)
    for at in range(700, len(changed), 1000):
        changed[at] ^= 4
    return bytes(changed)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_damaged_file_is_named_on_every_rank_and_another_tag_loads(
    pool: WorkerPool, tmp_path: Path, stage: int
) -> None:
    want = pool.run(save_two, 2, tmp_path)[0]
    (victim,) = tmp_path.glob("second/__1_*.distcp")
    whole = victim.read_bytes()
    for damaged in (flip(whole), whole[: len(whole) // 2]):
        victim.write_bytes(damaged)
        for message, weights in pool.run(load_damaged, 2, stage, tmp_path):
            assert str(victim) in message and "load another checkpoint" in message
            for name, value in want.items():
                assert torch.equal(weights[name], value), name
