"""`torch_autocast`: an fp32 model whose forward runs under torch.autocast."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.comm import record_collectives
from tests.engine.driving import LR, ROWS, STAGES, advance, config_of, engine_of, microbatches, whole_state
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_llama
from tests.pool.worker_pool import RanksFailed
from tests.zero.models import points, stack

STEPS = 6
LINEAR = ["torch.nn.Linear"]


def autocast(dtype: str | None, modules: list[str] | None = None, **keys: Any) -> dict[str, Any]:
    section = {"enabled": dtype is not None, "dtype": dtype, "lower_precision_safe_modules": modules}
    return {"torch_autocast": section, **keys}


Found = tuple[list[float], dict[str, Tensor], dict[str, int], dict[str, int], set[torch.dtype]]


def run(ctx: RankContext, stage: int, keys: dict[str, Any]) -> Found:
    """Return losses, master weights, bytes held, bytes sent by operation in the last step, and parameter dtypes."""
    engine = engine_of(config_of(stage, **keys))
    losses = advance(engine, ctx, range(STEPS - 1))
    with record_collectives() as records:
        losses += advance(engine, ctx, [STEPS - 1])
    sent: dict[str, int] = {}
    for record in records:
        sent[record.op] = sent.get(record.op, 0) + record.sent
    dtypes = {p.dtype for p in engine.module.parameters()}
    return losses, whole_state(engine), engine.held_bytes(), sent, dtypes


def plain(dtype: torch.dtype | None, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """Run the forward of an fp32 model under torch.autocast, with AdamW."""
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)
    losses = []
    for number in range(STEPS):
        x, y = points(number, ROWS)
        total = 0.0
        for part in zip(x.chunk(world), y.chunk(world), strict=True):
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                loss = model(*part)
            (loss / world).backward()
            total += loss.item() / world
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(found: Found, expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for name, value in expected[1].items():
        assert torch.allclose(found[1][name].view_as(value), value, rtol=1e-4, atol=1e-6), name


@pytest.mark.key("torch_autocast.enabled", "torch_autocast.dtype")
@pytest.mark.parametrize("stage", STAGES)
def test_the_numbers_are_those_of_torch_autocast(pool: WorkerPool, stage: int) -> None:
    """Weights, gradients and moments are fp32; bf16 and fp32 give different losses; null means bf16."""
    expected, full = plain(torch.bfloat16, 2), plain(None, 2)
    found = pool.run(run, 2, stage, autocast("bfloat16"))[0]
    assert_equal(found, expected)
    assert found[4] == {torch.float32} and found[2]["master"] == 0
    off = pool.run(run, 2, stage, autocast(None))[0]
    assert_equal(off, full)
    assert max(abs(a - b) / b for a, b in zip(found[0], off[0], strict=True)) > 1e-3
    if stage == 0:
        left_out = {"torch_autocast": {"enabled": True}}
        assert pool.run(run, 2, stage, left_out)[0][0] == found[0]


@pytest.mark.key("torch_autocast.lower_precision_safe_modules")
@pytest.mark.parametrize("stage", STAGES)
def test_named_modules_are_held_and_sent_in_the_lower_dtype(pool: WorkerPool, stage: int) -> None:
    """Autocast would have cast the weights, so results are equal, with half the bytes for the named layers."""
    usual, low = (pool.run(run, 2, stage, autocast("bfloat16", modules))[0] for modules in (None, LINEAR))
    if stage:  # an all-reduce rounds the sum to bf16, a reduce-scatter sums into fp32
        assert_equal(low, plain(torch.bfloat16, 2))
    assert low[0] == pytest.approx(usual[0], rel=1e-2)
    assert low[4] == {torch.bfloat16, torch.float32}
    for op in ["reduce_scatter", "all_gather"] if stage else ["all_reduce"]:
        assert 0.45 < low[3][op] / usual[3][op] < 0.65, op
    assert low[2]["parameters"] < 0.6 * usual[2]["parameters"]
    for kind in ("gradients", "optimizer"):  # as in fp32; two layouts divide into not quite the same shards
        assert low[2][kind] == pytest.approx(usual[2][kind], rel=0.02)


def sizes(ctx: RankContext, sections: dict[str, Any]) -> dict[str, int]:
    """Elements of the whole model by the dtype that they are stored in."""
    section = autocast("bfloat16", ["torch.nn.Linear"])
    engine = engine_of(config_of(1, **section, **sections), tiny_llama(layers=1))
    found: dict[str, int] = {}
    for slot in engine.zero.slots.values():
        found[str(slot.flat.dtype)] = found.get(str(slot.flat.dtype), 0) + slot.logical_numel
    return found


def test_split_layers_are_of_the_class_that_they_were(pool: WorkerPool) -> None:
    split = pool.run(sizes, 2, {"tensor_parallel": {"autotp_size": 2}})[0]
    assert split == pool.run(sizes, 1, {})[0] and len(split) == 2


def unknown(ctx: RankContext) -> None:
    engine_of(config_of(0, **autocast("bfloat16", ["torch.nn.Liner"])))


@pytest.mark.key("torch_autocast.lower_precision_safe_modules")
def test_a_class_that_cannot_be_imported_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(RanksFailed, match=r"'torch.nn.Liner' is not a module class"):
        pool.run(unknown, 1)


def scaled(ctx: RankContext, dtype: str) -> list[float]:
    """Return the loss scale over one good, two bad and two good steps."""
    fp16 = {"initial_scale_power": 10, "loss_scale_window": 1}
    engine = engine_of(config_of(2, **autocast(dtype, fp16=fp16)))
    scales = [engine.loss_scale()]
    for number, good in enumerate([True, False, False, True, True]):
        (x, y), *_ = microbatches(ctx, number)
        if not good and ctx.rank == 1:
            x[0, 0] = torch.inf
        engine.backward(engine(x, y))
        engine.step()
        assert engine.was_step_applied() is (good or dtype == "bfloat16")
        scales.append(engine.loss_scale())
    return scales


@pytest.mark.key("torch_autocast.dtype")
def test_float16_has_a_loss_scale(pool: WorkerPool) -> None:
    """It uses the values of the fp16 section, which stays disabled."""
    assert pool.run(scaled, 2, "float16") == [[1024, 1024, 1024, 512, 512, 1024]] * 2
    assert pool.run(scaled, 2, "bfloat16") == [[1.0] * 6] * 2


def first_loss(ctx: RankContext, keys: dict[str, Any]) -> float:
    engine = engine_of(config_of(3, bf16={"enabled": True}, **keys))
    x, y = points(0, ROWS)
    return float(engine(x, y))


def test_autocast_over_a_bf16_model(pool: WorkerPool) -> None:
    """As in DeepSpeed: weights are bf16, and operations that need it return float32."""
    model = stack().bfloat16()
    x, y = (points(0, ROWS)[i].bfloat16() for i in (0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        cast = model(x, y).item()
    assert pool.run(first_loss, 2, autocast("bf16"))[0] == cast
    assert pool.run(first_loss, 2, {})[0] == model(x, y).item() != cast
