"""One parameter's fp32 weights, optimizer states and gradient, read and written in full or in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.engine import fragments
from launcher.errors import LauncherError
from tests.engine.driving import LR, ROWS, STAGES, config_of, engine_of, microbatches, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import points, stack

SGD = {"type": "SGD", "params": {"lr": LR}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def first_weight(engine: Any) -> Tensor:
    """Return a parameter that is sharded over two ranks, or not sharded."""
    return engine.module.blocks[0].up.weight  # type: ignore[no-any-return]


def read(ctx: RankContext, stage: int, zero: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(config_of(stage, zero_optimization=zero))
    name = "blocks.0.up.weight"
    param = first_weight(engine)
    found: dict[str, Any] = {"no state": fragments.safe_get_full_optimizer_state(param, "exp_avg")}
    found["no gradient"] = fragments.safe_get_full_grad(param)
    engine.backward(engine(*microbatches(ctx, 0)[0]))
    found["gradient"] = fragments.safe_get_full_grad(param)
    found["piece of the gradient"] = fragments.safe_get_local_grad(param)
    engine.step()
    found["gone"] = fragments.safe_get_full_grad(param)
    found["weights"] = fragments.safe_get_full_fp32_param(param)
    found["moment"] = fragments.safe_get_full_optimizer_state(param, "exp_avg")
    found["steps"] = fragments.safe_get_full_optimizer_state(param, "step")
    found["truth"] = whole_weights(engine)[name]
    return found


@pytest.mark.parametrize("zero", [{}, OFFLOADED], ids=["", "offloaded"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_read_is_that_of_one_process(pool: WorkerPool, stage: int, zero: dict[str, Any]) -> None:
    if zero and not stage:
        return
    model = stack()
    model(*points(0, ROWS)).backward()
    gradient = model.blocks[0].up.weight.grad  # type: ignore[union-attr]
    ranks = pool.run(read, 2, stage, zero)
    for found in ranks:
        assert found["no state"] is found["no gradient"] is found["gone"] is None
        torch.testing.assert_close(found["gradient"], gradient, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found["moment"], gradient * 0.1, rtol=1e-5, atol=1e-7)
        assert torch.equal(found["weights"], found["truth"]) and float(found["steps"]) == 1.0
    pieces = [found["piece of the gradient"] for found in ranks]
    whole = torch.cat(pieces) if stage else pieces[0]
    torch.testing.assert_close(whole.view(gradient.shape), gradient, rtol=1e-5, atol=1e-7)


def written(ctx: RankContext, stage: int, local: bool) -> dict[str, Tensor]:
    """Replace weights and gradient, then step."""
    engine = engine_of(config_of(stage, optimizer=SGD))
    param = first_weight(engine)
    kind = "local" if local else "full"
    get, set_ = (getattr(fragments, f"safe_{verb}_{kind}_fp32_param") for verb in ("get", "set"))
    set_(param, torch.full_like(get(param), 3.0))
    engine.backward(engine(*microbatches(ctx, 0)[0]))
    get, set_ = (getattr(fragments, f"safe_{verb}_{kind}_grad") for verb in ("get", "set"))
    set_(param, torch.full_like(get(param), 7.0))
    engine.step()
    return {"weights": whole_weights(engine)["blocks.0.up.weight"]}


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_written_is_used(pool: WorkerPool, stage: int, local: bool) -> None:
    for found in pool.run(written, 2, stage, local):
        torch.testing.assert_close(found["weights"], torch.full((16, 8), 3.0 - LR * 7.0))


def before_the_reduction(ctx: RankContext, stage: int) -> dict[str, Any]:
    """Run two backwards inside no_sync(); this rank then doubles its gradient, and the step uses that."""
    engine = engine_of(config_of(stage, 2, optimizer=SGD))
    param, parts = first_weight(engine), microbatches(ctx, 0, 2)
    found: dict[str, Any] = {"none": fragments.safe_get_full_grad(param)}
    with engine.no_sync():
        for part in parts:
            engine.backward(engine(*part))
            found["own"] = fragments.safe_get_full_grad(param)
        found["piece"] = fragments.safe_get_local_grad(param)
        if ctx.rank == 0:
            fragments.safe_set_full_grad(param, found["own"] * 2)
            fragments.safe_set_local_grad(param, found["piece"] * 2)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    return found | {"weights": whole_weights(engine)["blocks.0.up.weight"]}


@pytest.mark.parametrize("stage", STAGES)
def test_before_the_reduction_a_rank_has_its_own_gradient(pool: WorkerPool, stage: int) -> None:
    want = []
    for rank in range(2):
        model = stack()
        for part in microbatches(RankContext(rank, 2, None), 0, 2):
            (model(*part) / 2).backward()
        want.append(model.blocks[0].up.weight.grad)  # type: ignore[union-attr]
    ranks = pool.run(before_the_reduction, 2, stage)
    for found, own in zip(ranks, want, strict=True):
        assert found["none"] is None
        torch.testing.assert_close(found["own"], own, rtol=1e-5, atol=1e-7)
        step = (2 * want[0] + want[1]) / 2 * LR
        torch.testing.assert_close(found["weights"], stack().blocks[0].up.weight - step, rtol=1e-5, atol=1e-7)  # type: ignore[union-attr]
    piece = ranks[0]["piece"]
    torch.testing.assert_close(piece, want[0].reshape(-1)[: piece.numel()], rtol=1e-5, atol=1e-7)


def every_parameter(ctx: RankContext, stage: int) -> list[int]:
    """Set all states and gradients, whichever rank owns them; return how much of each parameter this rank owns."""
    engine = engine_of(config_of(stage))
    engine.backward(engine(*microbatches(ctx, 0)[0]))
    params = [engine.module.get_parameter(name) for name in engine.zero.slots]
    before = [fragments.safe_get_full_grad(param) for param in params]
    fragments.safe_update_full_grad_vectorized(params, lambda gradient, param: gradient * 2 + param.dim())
    for param, gradient in zip(params, before, strict=True):
        torch.testing.assert_close(fragments.safe_get_full_grad(param), gradient * 2 + param.dim())
    engine.step()
    owned = []
    for param in params:
        value = torch.full_like(fragments.safe_get_full_fp32_param(param), 5.0)
        fragments.safe_set_full_optimizer_state(param, value, "exp_avg")
        assert torch.equal(fragments.safe_get_full_optimizer_state(param, "exp_avg"), value)
        piece = fragments.safe_get_local_optimizer_state(param, "exp_avg")
        assert piece.shape == fragments.safe_get_local_fp32_param(param).shape
        fragments.safe_set_local_optimizer_state(param, piece, "exp_avg")
        owned.append(piece.numel())
    return owned


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_owns_nothing_of_a_parameter_takes_part(pool: WorkerPool, stage: int) -> None:
    first, second = pool.run(every_parameter, 2, stage)
    assert (0 in first or 0 in second) == (stage > 0)


def refused(ctx: RankContext) -> list[str]:
    engine = engine_of(config_of(2))
    said = []
    for attempt in (
        lambda: fragments.safe_set_full_grad(first_weight(engine), torch.zeros(16, 8)),
        lambda: fragments.safe_set_full_fp32_param(first_weight(engine), torch.zeros(3)),
        lambda: fragments.safe_set_full_fp32_param(torch.zeros(3), torch.zeros(3)),
    ):
        with pytest.raises(LauncherError) as error:
            attempt()
        said.append(str(error.value))
    return said


def test_what_cannot_be_set_is_told(pool: WorkerPool) -> None:
    for early, shape, stranger in pool.run(refused, 2):
        assert "gradients after backward" in early
        assert "has shape (16, 8) on this rank, but the value has shape (3,)" in shape
        assert "not a trainable parameter of an engine" in stranger
