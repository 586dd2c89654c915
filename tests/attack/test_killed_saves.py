"""Runs that are killed at random moments of their saves: the newest complete checkpoint always loads and resumes."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launcher.checkpoint.retention import delete_old
from launcher.checkpoint.store import list_tags
from tests.engine.driving import advance, config_of, engine_of
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.zero.models import stack

SAVE_S = 0.12  # about as long as a save takes on a busy machine
MOST = 4  # steps of a life


def live(ctx: RankContext, directory: Path, seed: int) -> None:
    """Resume from the newest complete checkpoint, at any stage, until one rank is killed while it saves."""
    dice = random.Random(seed)
    section: dict[str, Any] = {"writer": {"decoupled": True}} if dice.random() < 0.3 else {}
    section |= {"keep_last": 2} if dice.random() < 0.5 else {}  # killed while it deletes, too
    engine = engine_of(config_of(dice.randrange(4), checkpoint=section), stack(seed=seed))
    victim, last, delay = dice.randrange(ctx.world), dice.randrange(MOST), dice.uniform(0, SAVE_S)
    with warnings.catch_warnings(action="ignore"):  # `latest` may be one behind
        if tags := list_tags(directory):
            assert engine.load_checkpoint(directory)[0] in (str(directory / tag) for tag in tags[-2:])
            assert engine.load_checkpoint(directory, tags[-1])[0] == str(directory / tags[-1])
            assert tags[-1] == f"global_step{engine.global_steps}"
    first = engine.global_steps
    for step in range(first, first + MOST):
        (loss,) = advance(engine, ctx, [step])
        if ctx.rank == 0:
            with (directory / "losses").open("a") as file:
                print(step, repr(loss), file=file)
        if ctx.rank == victim and step == first + last:
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        engine.save_checkpoint(directory)
    if ctx.rank == victim:
        threading.Event().wait()  # for the timer
    dist.barrier()  # ends when the other rank has died


def straight(ctx: RankContext, steps: int) -> list[float]:
    return advance(engine_of(config_of(0)), ctx, range(steps))


def lives(pool: WorkerPool, directory: Path, number: int) -> None:
    directory.mkdir()
    (directory / "losses").touch()
    for seed in range(number):
        with pytest.raises(RanksFailed, match="exit code -9"):
            pool.run(live, 2, directory, seed)
        if list_tags(directory):
            with warnings.catch_warnings(action="ignore"):
                delete_old(directory, 3)
    lines = [line.split() for line in (directory / "losses").read_text().splitlines()]
    got = [(int(step), float(loss)) for step, loss in lines]
    want = pool.run(straight, 2, max(step for step, _ in got) + 1)[0]
    for step, loss in got:
        assert loss == pytest.approx(want[step], rel=1e-6), step
    assert len(got) >= number  # each life came as far as a step


def test_killed_saves(pool: WorkerPool, tmp_path: Path) -> None:
    lives(pool, tmp_path / "lives", 4)


@pytest.mark.full
@pytest.mark.timeout(1000)
def test_a_hundred_killed_saves(pool: WorkerPool, tmp_path: Path) -> None:
    lives(pool, tmp_path / "lives", 100)
