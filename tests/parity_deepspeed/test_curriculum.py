"""Sequence lengths of DeepSpeed's curriculum and ours, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config import load
from launcher.engine.curriculum import Curriculum
from tests.config.test_data_efficiency import sections
from tests.parity_deepspeed.conftest import run_deepspeed

STEPS = 120


def seqlen(kind: str, low: int, high: int, **pace: Any) -> dict[str, Any]:
    return {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": pace}


CASES = [
    seqlen("fixed_linear", 8, 1024, total_curriculum_step=100, difficulty_step=8),
    seqlen("fixed_linear", 64, 2048, total_curriculum_step=77, difficulty_step=64),
    seqlen("fixed_linear", 8, 100, total_curriculum_step=50, difficulty_step=16),
    seqlen("fixed_linear", 10, 12, total_curriculum_step=50, difficulty_step=8),
    seqlen("fixed_linear", 7, 300, total_curriculum_step=200, difficulty_step=1),
    seqlen("fixed_linear", 64, 64, total_curriculum_step=50, difficulty_step=8),
    *(
        seqlen("fixed_root", 8, 1024, total_curriculum_step=90, difficulty_step=8, root_degree=d)
        for d in (1, 2, 3, 5)
    ),
    seqlen("fixed_root", 81, 1024, total_curriculum_step=110, difficulty_step=3, root_degree=2),
    seqlen("fixed_discrete", 8, 64, difficulty=[8, 32, 64], max_step=[20, 50]),
    seqlen("fixed_discrete", 16, 64, difficulty=[8, 80, 64, 32], max_step=[1, 5, 50]),
    seqlen("fixed_discrete", 8, 1000, difficulty=[8, 80, 16], max_step=[10, 11]),
    seqlen("fixed_discrete", 8, 8, difficulty=[16, 32], max_step=[10]),
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    given = [{"config": case, "steps": STEPS} for case in CASES]
    lengths: list[list[int]] = run_deepspeed("difficulties", given, 1, tmp_path_factory.mktemp("ds"))
    return lengths


@pytest.mark.parametrize("index", range(len(CASES)))
def test_lengths_are_deepspeeds(theirs: list[list[int]], index: int) -> None:
    curriculum = Curriculum.of(load(sections(CASES[index])).data_efficiency)
    assert [curriculum.seqlen(done) for done in range(STEPS)] == theirs[index]
