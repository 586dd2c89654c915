"""The CSV files of both engines have the same names and columns, and the same numbers where both write one."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from tests.parity_deepspeed.conftest import run_deepspeed
from tests.parity_deepspeed.job import STEPS, WORLD, Job
from tests.parity_deepspeed.test_training import ours
from tests.pool import WorkerPool


def table(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_files_are_deepspeeds_and_the_loss_more(pool: WorkerPool, tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    run_deepspeed("train", [dataclasses.asdict(Job(1, csv=str(theirs)))], WORLD, tmp_path)
    pool.run(ours, WORLD, Job(1, csv=str(mine)))
    names = {path.name for path in (theirs / "job").iterdir()}
    assert len(names) == 6
    assert {path.name for path in (mine / "job").iterdir()} - names == {
        "Train_Samples_train_loss.csv",
        "Train_Samples_grad_norm.csv",
    }
    for name in names:
        left, right = table(theirs / "job" / name), table(mine / "job" / name)
        assert left[0] == right[0] and len(left) == len(right) == STEPS + 1
        assert [row[0] for row in left] == [row[0] for row in right]
    left, right = (table(directory / "job" / "Train_Samples_lr.csv")[1:] for directory in (theirs, mine))
    assert [float(row[1]) for row in right] == pytest.approx([float(row[1]) for row in left], rel=1e-9)
