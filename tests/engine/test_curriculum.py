"""Curriculum learning in an engine matches plain PyTorch on manually truncated sequences."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from launcher.run import Run
from launcher.train import Training
from tests.config.test_data_efficiency import LEARNING, METRIC, SEQLEN, both_names, sections
from tests.engine.driving import ADAMW
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, share, tiny_llama

SEQUENCES, STEPS = 4, 5
RISING = SEQLEN | {
    "min_difficulty": 4,
    "max_difficulty": 16,
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2},
}
LENGTHS = [6, 10, 12, 16, 16]
Trained = tuple[list[float], list[int | None]]


def engine_of(stage: int, data: dict[str, Any], accumulation: int = 1) -> Any:
    import launcher

    config = {
        "train_batch_size": SEQUENCES,
        "gradient_accumulation_steps": accumulation,
        "optimizer": ADAMW,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **data,
    }
    return launcher.initialize(model=tiny_llama(layers=2), config=config, device=DEVICE)[0]


def advance(engine: Any, ctx: RankContext, steps: range) -> Trained:
    """Return the losses, averaged over ranks, and the lengths of these steps."""
    losses, lengths = [], []
    for step in steps:
        lengths.append(engine.curriculum_seqlen())
        parts = share(batch(step, SEQUENCES), ctx.rank, ctx.world, engine.gradient_accumulation_steps())
        losses.append(float(engine.train_batch(iter([{"input_ids": ids, "labels": ids} for ids in parts]))))
    return losses, lengths


def trained(ctx: RankContext, stage: int, data: dict[str, Any], accumulation: int = 1) -> Trained:
    return advance(engine_of(stage, data, accumulation), ctx, range(STEPS))


def plain(lengths: list[int]) -> list[float]:
    model = tiny_llama(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW["params"])  # type: ignore[arg-type]
    losses = []
    for step, length in enumerate(lengths):
        ids = batch(step, SEQUENCES)[:, :length]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.key(
    "data_efficiency",
    "data_efficiency.enabled",
    "data_efficiency.data_sampling.enabled",
    f"{LEARNING}.enabled",
    METRIC,
)
@pytest.mark.parametrize("stage", [1, 3])
def test_training_is_that_on_sequences_cut_by_hand(pool: WorkerPool, stage: int) -> None:
    losses, lengths = pool.run(trained, 2, stage, sections(RISING), stage - stage // 3)[0]
    assert lengths == LENGTHS
    assert losses == pytest.approx(plain(LENGTHS), rel=1e-5)
    if stage == 3:
        off, none = pool.run(trained, 2, stage, sections(RISING, outer=False))[0]
        assert none == [None] * STEPS and off == pytest.approx(plain([16] * STEPS), rel=1e-5)


DISCRETE = {
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [4, 8, 16], "max_step": [1, 3]},
}
ROOT = {
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2, "root_degree": 2},
}
CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("min_difficulty", RISING, {"min_difficulty": 8}),
    ("max_difficulty", RISING, {"max_difficulty": 12}),
    ("schedule_type", RISING, ROOT),
    ("schedule_config.total_curriculum_step", RISING, {"total_curriculum_step": 8}),
    ("schedule_config.difficulty_step", RISING, {"difficulty_step": 8}),
    ("schedule_config.root_degree", RISING | ROOT, {"root_degree": 4}),
    ("schedule_config.difficulty", RISING | DISCRETE, {"difficulty": [6, 8, 16]}),
    ("schedule_config.max_step", RISING | DISCRETE, {"max_step": [2, 3]}),
]


def many_trained(ctx: RankContext, configs: list[dict[str, Any]]) -> list[Trained]:
    return [trained(ctx, 0, sections(config)) for config in configs]


@pytest.mark.key(*both_names(key for key, _, _ in CHANGES))
def test_every_key_of_the_pace_changes_lengths_and_losses(pool: WorkerPool) -> None:
    configs = []
    for _, base, change in CHANGES:
        inner = change.keys() <= base["schedule_config"].keys()
        pace = {"schedule_config": base["schedule_config"] | change} if inner else change
        configs += [base, base | pace]
    runs = pool.run(many_trained, 1, configs)[0]
    for index, (key, _, _) in enumerate(CHANGES):
        (losses, lengths), (other_losses, other_lengths) = runs[2 * index : 2 * index + 2]
        assert lengths != other_lengths and losses != other_losses, key


def resumed(ctx: RankContext, directory: str) -> tuple[Trained, Trained]:
    engine = engine_of(2, sections(RISING))
    advance(engine, ctx, range(2))
    engine.save_checkpoint(directory)
    fresh = engine_of(2, sections(RISING))
    fresh.load_checkpoint(directory)
    rest = range(2, STEPS)
    return advance(engine, ctx, rest), advance(fresh, ctx, rest)


def test_a_resumed_run_keeps_its_place(pool: WorkerPool, tmp_path: Path) -> None:
    went_on, fresh = pool.run(resumed, 2, str(tmp_path))[0]
    assert went_on == fresh and fresh[1] == LENGTHS[2:]


def evaluated(ctx: RankContext) -> list[float]:
    ids = batch(0, SEQUENCES)
    losses = []
    for data in ({}, sections(RISING)):
        engine = engine_of(0, data)
        losses.append(float(engine.eval_batch(iter([{"input_ids": ids, "labels": ids}]))))
    return losses


def test_evaluation_sees_whole_sequences(pool: WorkerPool) -> None:
    whole, with_curriculum = pool.run(evaluated, 1)[0]
    assert whole == with_curriculum


PROMPT = 8  # tokens of each row that are not learned


def conversations() -> list[dict[str, torch.Tensor]]:
    ids = batch(0, 40)
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def by_recipe(
    ctx: RankContext, directory: str, more: dict[str, Any], steps: int = STEPS
) -> list[dict[str, Any]]:
    """Return the records of the recipes' loop with two microbatches per step."""
    engine = engine_of(1, {**sections(RISING, **more.pop("sampling", {})), **more}, accumulation=2)
    run = Run(Namespace(seed=0), engine.resolved, Path(directory), DEVICE, Console(quiet=True), ctx.rank)
    training = Training(run, engine, conversations(), None, steps, "tiny")
    loader = training.loader.steps()
    return [training._step(next(loader)) for _ in range(steps)]


@pytest.mark.key(METRIC, "managed_gradient_accumulation")
def test_the_recipes_cut_and_count_what_is_left(pool: WorkerPool, tmp_path: Path) -> None:
    """Without the engine's microbatch count, they take one step for all microbatches."""
    managed, by_caller = (
        pool.run(by_recipe, 2, str(tmp_path), {"managed_gradient_accumulation": managed})[0]
        for managed in (True, False)
    )
    assert [record["seqlen"] for record in managed] == LENGTHS
    assert [record["step"] for record in managed] == [1, 2, 3, 4, 5]
    assert [record["tokens"] for record in managed] == [
        SEQUENCES * sum(LENGTHS[: i + 1]) for i in range(STEPS)
    ]
    assert managed[0]["loss"] == 0.0  # nothing but prompts is left of the first sequences
    assert all(2 < record["loss"] < 6 for record in managed[1:])
    for one, other in zip(managed, by_caller, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.key("scheduler.params.total_steps")
def test_the_recipes_refuse_a_schedule_that_ends_before_they_do(pool: WorkerPool, tmp_path: Path) -> None:
    schedule = {"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": 4}}
    with pytest.raises(Exception, match=r"the schedule ends after 4 optimizer steps, but the run has 5"):
        pool.run(by_recipe, 1, str(tmp_path), {"scheduler": schedule})


@pytest.mark.key("data_efficiency.data_sampling.num_epochs")
def test_the_recipes_refuse_more_passes_than_are_allowed(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"15 steps need 1\.5 passes over the data, but num_epochs is 1"):
        pool.run(by_recipe, 1, str(tmp_path), {"sampling": {"num_epochs": 1}}, 15)
