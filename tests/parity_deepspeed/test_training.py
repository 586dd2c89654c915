"""The same JSON, model and data in DeepSpeed and in the launcher give the same run, step by step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.parity_deepspeed.conftest import run_deepspeed
from tests.parity_deepspeed.job import STEPS, WORLD, Job, train
from tests.pool import RankContext, WorkerPool

FP32 = [
    *(Job(stage) for stage in range(4)),
    Job(0, accumulation=1, clip=0.0, tied=True, scheduler="WarmupCosineLR"),
    Job(2, accumulation=3, clip=0.0, tied=True, scheduler="WarmupDecayLR"),
    Job(3, accumulation=1, clip=0.0, tied=True, scheduler="WarmupCosineLR"),
    Job(1, managed=False),
    Job(2, managed=False),
]
BF16 = [Job(stage, "bf16") for stage in range(4)]


def name(job: Job) -> str:
    return job.name


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Any]]]:
    given = [dataclasses.asdict(job) for job in FP32 + BF16]
    results: dict[str, dict[str, list[Any]]] = run_deepspeed(
        "train", given, WORLD, tmp_path_factory.mktemp("ds")
    )
    return results


def ours(ctx: RankContext, job: Job) -> dict[str, list[Any]]:
    import launcher

    engine = launcher.initialize(model=job.model(), config=job.config())[0]
    return train(engine, job)


def both(
    pool: WorkerPool, theirs: dict[str, dict[str, list[Any]]], job: Job
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return (ours, DeepSpeed's), after checking that our ranks agree and the loss falls."""
    ranks = pool.run(ours, WORLD, job)
    assert ranks[0] == ranks[1]
    assert len(ranks[0]["losses"]) == STEPS
    assert ranks[0]["losses"][-1] < 0.9 * ranks[0]["losses"][0]
    return ranks[0], theirs[job.name]


@pytest.mark.parametrize("job", FP32, ids=name)
def test_fp32_runs_are_equal(pool: WorkerPool, theirs: dict[str, dict[str, list[Any]]], job: Job) -> None:
    mine, deepspeed = both(pool, theirs, job)
    assert mine["losses"] == pytest.approx(deepspeed["losses"], rel=1e-5)
    assert mine["rates"] == pytest.approx(deepspeed["rates"], rel=1e-9)
    if job.stage > 0:  # DeepSpeed keeps no norm at stage 0 in fp32
        assert mine["norms"] == pytest.approx(deepspeed["norms"], rel=1e-5)
    else:
        assert deepspeed["norms"] == [None] * STEPS
        assert all(norm > 0 for norm in mine["norms"])


@pytest.mark.parametrize("job", BF16, ids=name)
def test_bf16_runs_are_equal_up_to_its_rounding(
    pool: WorkerPool, theirs: dict[str, dict[str, list[Any]]], job: Job
) -> None:
    mine, deepspeed = both(pool, theirs, job)
    assert mine["losses"] == pytest.approx(deepspeed["losses"], rel=1e-3)
    assert mine["norms"] == pytest.approx(deepspeed["norms"], rel=1e-2)
