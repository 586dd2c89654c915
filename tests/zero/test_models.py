"""Modules used twice, frozen and unused parameters, empty slices, no_sync: results match one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import launcher
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.logical import logical_parameters
from tests.zero.models import Stack, points, stack

STEPS = 6
ZERO = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def engine_of(model: Stack, stage: int, accumulation: int = 1, world: int = 2, **zero: Any) -> Any:
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, **ZERO, **zero},
    }
    return launcher.initialize(model=model, config=config, device=DEVICE)[0]


def shares(ctx: RankContext, step: int, accumulation: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = points(step)
    parts = ctx.world * accumulation
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))[ctx.rank :: ctx.world]


def run(
    ctx: RankContext,
    stage: int,
    accumulation: int,
    options: dict[str, Any],
    spare_steps: tuple[int, ...],
    no_sync: bool,
) -> Any:
    """Return the losses and final weights of a Stack with the engine."""
    engine = engine_of(stack(**options), stage, accumulation, ctx.world)
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        parts = shares(ctx, step, accumulation)
        for i, (x, y) in enumerate(parts):
            if no_sync and i < len(parts) - 1:
                with engine.no_sync():
                    total += engine.backward(engine(x, y, step in spare_steps)).double().cpu()
            else:
                total += engine.backward(engine(x, y, step in spare_steps)).double().cpu()
            engine.step()
        dist.all_reduce(total)
        losses.append(float(total) / ctx.world)
    return losses, {name: value.cpu().clone() for name, value in logical_parameters(engine.zero)}


def truth(parts: int, options: dict[str, Any], spare_steps: tuple[int, ...] = ()) -> Any:
    model = stack(**options)
    adamw = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1, fused=True
    )
    losses = []
    for step in range(STEPS):
        x, y = points(step)
        total = 0.0
        for part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = model(*part, step in spare_steps) / parts
            loss.backward()
            total += loss.item()
        adamw.step()
        adamw.zero_grad()
        losses.append(total)
    return losses, {name: p.detach().cpu() for name, p in model.named_parameters()}


def assert_like(got: Any, want: Any) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert got[1].keys() == want[1].keys()
    for name, value in want[1].items():
        torch.testing.assert_close(
            got[1][name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


CASES = {
    "plain": ({}, ()),
    "used twice": ({"repeat": 2}, ()),
    "frozen middle": ({"frozen": (1,)}, ()),
    "frozen ends": ({"frozen": (0, 2)}, ()),
    "sometimes unused": ({"spare": True}, (1, 2, 4)),
    "never used": ({"spare": True}, ()),
}


# Gradients travel inside the backward at stages 2 and 3, so what is unused matters there for four ranks, too.
@pytest.mark.pairwise
@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), (4, 2), (4, 3)])
@pytest.mark.parametrize("case", CASES)
def test_like_one_process(pool: WorkerPool, case: str, world: int, stage: int) -> None:
    """An unused parameter does not decay, as in plain PyTorch. With 4 ranks some slices are empty."""
    options, spare_steps = CASES[case]
    assert_like(
        pool.run(run, world, stage, 1, options, spare_steps, False)[0], truth(world, options, spare_steps)
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", ["plain", "used twice", "sometimes unused"])
def test_no_sync_is_accumulation(pool: WorkerPool, case: str, stage: int) -> None:
    options, spare_steps = CASES[case]
    assert_like(pool.run(run, 2, stage, 2, options, spare_steps, True)[0], truth(4, options, spare_steps))


def count_no_sync(ctx: RankContext, stage: int) -> list[int]:
    from launcher.comm import record_collectives

    engine = engine_of(stack(), stage, 2, ctx.world)
    counts = []
    for i, (x, y) in enumerate(shares(ctx, 0, 2)):
        with record_collectives() as records:
            if i == 0:
                with engine.no_sync():
                    engine.backward(engine(x, y))
            else:
                engine.backward(engine(x, y))
        counts.append(sum(r.op != "all_gather" for r in records))
        engine.step()
    return counts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_reduces_nothing(pool: WorkerPool, stage: int) -> None:
    first, last = pool.run(count_no_sync, 2, stage)[0]
    assert first == 0
    assert last > 0


# What rank 1 does otherwise than rank 0.
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "a layer of each block": {"use_spare": True},
    "no gradients for some blocks": {"without_grad": (0, 3, 4, 7)},
}


def one_rank_goes_another_way(ctx: RankContext, stage: int, depth: int, way: dict[str, Any]) -> Any:
    """All ranks must launch the same collectives, and none may wait for one that another launches later."""
    engine = engine_of(stack(spare=True, depth=depth), stage, 1, ctx.world)
    for step in range(3):
        ((x, y),) = shares(ctx, step)
        engine.backward(engine(x, y, **(way if ctx.rank == 1 else {})))
        engine.step()
    return {name: value.clone() for name, value in logical_parameters(engine.zero)}


@pytest.mark.pairwise
@pytest.mark.parametrize("depth", [3, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_ranks_that_use_different_parameters(pool: WorkerPool, way: str, stage: int, depth: int) -> None:
    model = stack(spare=True, depth=depth)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=True)
    for step in range(3):
        x, y = points(step)
        for rank, part in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            (model(*part, **(OTHER_WAYS[way] if rank == 1 else {})) / 2).backward()
        adamw.step()
        adamw.zero_grad()
    ranks = pool.run(one_rank_goes_another_way, 2, stage, depth, OTHER_WAYS[way], timeout=60)
    for got in ranks:
        for name, p in model.named_parameters():
            torch.testing.assert_close(got[name], p.detach(), rtol=1e-4, atol=2e-6)


def compiled(ctx: RankContext, stage: int) -> list[float]:
    engine = engine_of(stack(), stage, 1, ctx.world)
    engine.compile(backend="aot_eager")
    losses = []
    for step in range(4):
        ((x, y),) = shares(ctx, step)
        losses.append(float(engine.backward(engine(x, y))))
        engine.step()
    return losses


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_compiled_blocks(pool: WorkerPool, stage: int) -> None:
    got = pool.run(compiled, 2, stage)
    mean = [sum(step) / 2 for step in zip(*got, strict=True)]
    assert mean == pytest.approx(truth(2, {})[0][:4], rel=1e-5)
