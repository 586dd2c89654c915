"""A run resumes from a checkpoint as if it had never stopped, on the same topology or another one."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from launcher.errors import CheckpointError
from tests.engine.driving import (
    ADAMW,
    LR,
    advance,
    config_of,
    engine_of,
    microbatches,
    truth,
    whole_state,
    whole_weights,
)
from tests.pool import RankContext, RanksFailed, WorkerPool
from tests.zero.models import Stack, stack

BEFORE, AFTER = range(3), range(3, 6)
WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.002, "warmup_num_steps": 4, "warmup_type": "linear"},
}
FP16 = {"enabled": True, "auto_cast": True, "initial_scale_power": 8, "loss_scale_window": 2}
PRECISION: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": FP16},
}
MOVES = [  # ranks and stage that save, ranks and stage that load
    ((2, 3), (1, 1)), ((2, 3), (4, 2)), ((2, 3), (2, 0)), ((1, 0), (2, 3)), ((1, 0), (4, 1)), ((4, 2), (2, 3)),
    ((4, 2), (1, 0)), ((2, 1), (4, 3)), ((4, 3), (2, 2)), ((2, 0), (4, 0)),
]  # fmt: skip


def config(stage: int, precision: str = "fp32", accumulation: int = 1) -> dict[str, Any]:
    return config_of(stage, accumulation, scheduler=WARMUP, **PRECISION[precision])


def save(
    ctx: RankContext, stage: int, precision: str, directory: Path
) -> tuple[dict[str, Tensor], list[float]]:
    """Train the first steps and save; return the state, and the losses that follow without a stop."""
    engine = engine_of(config(stage, precision))
    advance(engine, ctx, BEFORE)
    state = whole_state(engine)
    engine.save_checkpoint(directory, client_state={"epoch": 2, "best": [0.5, None]})
    return state, advance(engine, ctx, AFTER)


def load(ctx: RankContext, stage: int, precision: str, directory: Path) -> tuple[Any, ...]:
    engine = engine_of(config(stage, precision), stack(seed=1))
    path, client = engine.load_checkpoint(directory)
    assert path == str(directory / "global_step3")
    assert client == {"epoch": 2, "best": [0.5, None]}
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (3, 24, 3)
    state, rates, scale = whole_state(engine), engine.get_lr(), engine.loss_scale()
    return state, rates, scale, advance(engine, ctx, AFTER), engine.get_lr()


@cache
def uninterrupted() -> list[float]:
    """Train without a stop. The first two steps use the learning rate of iteration 0, as in DeepSpeed."""
    model = stack()
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    losses = []
    for step in (*BEFORE, *AFTER):
        adamw.param_groups[0]["lr"] = 0.002 + (LR - 0.002) * min(1.0, max(0, step - 1) / 4)
        losses += truth(adamw, model, [step])
    return losses[len(BEFORE) :]


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return (ranks, stage, precision) -> directory, state when saved, losses after it; each is created once."""

    @cache
    def make(world: int, stage: int, precision: str) -> tuple[Path, dict[str, Tensor], list[float]]:
        directory = tmp_path_factory.mktemp("saved")
        state, losses = pool.run(save, world, stage, precision, directory)[0]
        return directory, state, losses

    return make


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.pairwise
@pytest.mark.parametrize(("precision", "source", "target"), [
    *[("fp32", *move) for move in MOVES],
    *[("bf16", *move) for move in MOVES[:4]],
    *[("fp16", *move) for move in MOVES[:4]],
], ids=str)  # fmt: skip
def test_another_topology(
    pool: WorkerPool, saved: Any, precision: str, source: tuple[int, int], target: tuple[int, int]
) -> None:
    """Master weights, moments and step counts are bit-identical; then losses match an uninterrupted process."""
    directory, state, after = saved(*source, precision)
    for got, rates, scale, losses, last in pool.run(load, target[0], target[1], precision, directory):
        assert_same(got, state)
        assert {name.split("/")[0] for name in got if "/" in name} == {"exp_avg", "exp_avg_sq", "step"}
        assert rates == pytest.approx([0.002 + 0.008 * 2 / 4]) and last == pytest.approx([LR])
        assert scale == (2.0**9 if precision == "fp16" else 1)  # doubled after two good steps
        assert losses == pytest.approx(after, rel=1e-5 if precision == "fp32" else 2e-2)
        if precision == "fp32":
            assert losses == pytest.approx(uninterrupted(), rel=1e-5)


class Dropping(Stack):
    """Uses random numbers of torch, NumPy and Python, and counts its training forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor, use_spare: bool = False) -> Tensor:
        self.seen += 1
        x = x * random.random() + np.random.rand()
        return super().forward(nn.functional.dropout(x, 0.3), y, use_spare)


def stop_and_go(ctx: RankContext, stage: int, accumulation: int, directory: Path) -> None:
    def fresh() -> Any:
        return engine_of(config(stage, accumulation=accumulation), Dropping())

    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + ctx.rank)
    engine = fresh()
    advance(engine, ctx, BEFORE)
    engine.save_checkpoint(directory)
    losses, weights = advance(engine, ctx, AFTER), whole_weights(engine)
    again = fresh()
    again.load_checkpoint(directory)
    assert advance(again, ctx, AFTER) == losses
    assert_same(whole_weights(again), weights)
    assert again.module.seen == 6 * accumulation
    back = engine.load_checkpoint(directory)  # an engine that has gone on goes back
    assert back[0] and advance(engine, ctx, AFTER) == losses


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_topology_is_bit_identical(
    pool: WorkerPool, tmp_path: Path, stage: int, accumulation: int
) -> None:
    """This includes random numbers, which differ by rank."""
    pool.run(stop_and_go, 2, stage, accumulation, tmp_path)


def skip_and_save(ctx: RankContext, stage: int, directory: Path) -> list[Any]:
    def facts(engine: Any) -> list[Any]:
        scaler = engine.loss_scaler
        return [engine.global_steps, engine.skipped_steps, engine.get_lr(), scaler.state_dict()]

    engine = engine_of(config(stage, "fp16"))
    advance(engine, ctx, [0])
    ((x, y),) = microbatches(ctx, 1)
    engine.backward(engine(x * torch.inf, y))
    engine.step()
    engine.save_checkpoint(directory)
    again = engine_of(config(stage, "fp16"))
    again.load_checkpoint(directory)
    assert facts(again) == facts(engine)
    return facts(again)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_loss_scale_goes_on(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    steps, skipped, _, scale = pool.run(skip_and_save, 2, stage, tmp_path)[0]
    assert (steps, skipped) == (2, 1)
    assert scale == {"dynamic": True, "scale": 256.0, "tolerance": 1, "step": 2, "last_overflow": 1}


# ---- what is loaded -----------------------------------------------------------------------------


def load_parts(ctx: RankContext, directory: Path, arguments: dict[str, Any]) -> tuple[Any, ...]:
    engine = engine_of(config(3), stack(seed=1))
    engine.load_checkpoint(directory, **arguments)
    steps, rates = engine.lr_scheduler.last_batch_iteration, engine.get_lr()
    return whole_state(engine), engine.global_steps, steps, rates


@pytest.mark.parametrize(("arguments", "moments", "steps", "iterations"), [
    ({}, True, 3, 2),
    ({"load_module_only": True}, False, 0, -1),
    ({"load_optimizer_states": False}, False, 3, 2),
    ({"load_lr_scheduler_states": False}, True, 3, -1),
    ({"load_optimizer_states": False, "load_lr_scheduler_states": False}, False, 3, -1),
], ids=lambda value: "+".join(value) if isinstance(value, dict) else None)  # fmt: skip
def test_only_what_is_asked_for(
    pool: WorkerPool, saved: Any, arguments: dict[str, Any], moments: bool, steps: int, iterations: int
) -> None:
    directory, state, _ = saved(2, 3, "fp32")
    want = {name: value for name, value in state.items() if moments or "/" not in name}
    for got, counted, stepped, _ in pool.run(load_parts, 2, directory, arguments):
        assert_same(got, want)
        assert (counted, stepped) == (steps, iterations)


def tags(ctx: RankContext, directory: Path) -> list[str]:
    engine = engine_of(config(3))
    assert engine.load_checkpoint(directory / "nothing") == (None, {})
    weights = {}
    for tag, steps in {"first": [0], "second": [1], None: [2]}.items():
        advance(engine, ctx, steps)
        assert engine.save_checkpoint(directory, tag, save_latest=tag != "second")
        weights[tag or "global_step3"] = whole_weights(engine)
        if tag == "second":
            assert (directory / "latest").read_text() == "first\n"
    for tag, want in weights.items():
        path, _ = engine.load_checkpoint(directory, tag)
        assert path == str(directory / tag)
        assert_same(whole_weights(engine), want)
    engine.load_checkpoint(directory, "first")
    path, _ = engine.load_checkpoint(directory)
    assert_same(whole_weights(engine), weights["global_step3"])
    return sorted(entry.name for entry in directory.iterdir())


def test_tags(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(tags, 2, tmp_path)[0] == ["first", "global_step3", "latest", "second"]


def load_other(ctx: RankContext, directory: Path, strict: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    engine = engine_of(config(3), stack(seed=1, **options))
    engine.load_checkpoint(directory, load_module_strict=strict)
    return whole_weights(engine)


@pytest.mark.parametrize(("options", "said"), [
    ({"depth": 4}, r"missing: model/blocks\.3"),
    ({"depth": 2}, r"the model does not have: model/blocks\.2"),
])  # fmt: skip
def test_another_model_is_refused_when_strict(
    pool: WorkerPool, saved: Any, options: dict[str, Any], said: str
) -> None:
    directory, state, _ = saved(2, 3, "fp32")
    with pytest.raises(RanksFailed, match=said):
        pool.run(load_other, 2, directory, True, options)
    got = pool.run(load_other, 2, directory, False, options)[0]
    fresh = stack(seed=1, **options)
    for name, value in got.items():
        want = state[name] if name in state else fresh.get_parameter(name)
        assert torch.equal(value.flatten(), want.flatten()), name


def load_with(ctx: RankContext, directory: Path, optimizer: Any) -> None:
    engine = engine_of(config_of(2, optimizer=optimizer, scheduler=WARMUP if optimizer else None))
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        engine.load_checkpoint(directory)
    engine.load_checkpoint(directory, load_optimizer_states=False)
    advance(engine, ctx, AFTER)


def save_without_optimizer(ctx: RankContext, directory: Path) -> None:
    engine_of(config_of(2, optimizer=None)).save_checkpoint(directory)


def test_another_optimizer_is_refused(pool: WorkerPool, saved: Any, tmp_path: Path) -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}
    pool.run(load_with, 2, saved(2, 3, "fp32")[0], sgd)
    pool.run(save_without_optimizer, 2, tmp_path)
    pool.run(load_with, 2, tmp_path, ADAMW)


def resume_a_client(ctx: RankContext, stage: int, directory: Path) -> None:
    """Resume a schedule with an integer count, and an optimizer that counts its steps as Python numbers."""

    def fresh() -> Any:
        model = stack()
        optimizer = Counting(model.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 5], gamma=0.1)
        return engine_of(
            config_of(stage, optimizer=None, zero_allow_untested_optimizer=True),
            model,
            optimizer=optimizer,
            lr_scheduler=schedule,
        )

    engine = fresh()
    advance(engine, ctx, BEFORE)
    engine.save_checkpoint(directory, client_state={"range": (1, 2), "seen": {3: "three"}})
    losses, weights = advance(engine, ctx, AFTER), whole_weights(engine)
    again = fresh()
    assert again.load_checkpoint(directory)[1] == {"range": (1, 2), "seen": {3: "three"}}
    assert advance(again, ctx, AFTER) == losses
    assert_same(whole_weights(again), weights)
    assert again.lr == pytest.approx(LR / 100)


class Counting(torch.optim.SGD):
    """Each step is smaller: lr / number of the step."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.grad is not None]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                assert type(state["step"]) is int
                p.data.sub_(p.grad, alpha=group["lr"] / state["step"])


@pytest.mark.parametrize("stage", [0, 3])
def test_state_that_is_no_tensor(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    pool.run(resume_a_client, 2, stage, tmp_path)
