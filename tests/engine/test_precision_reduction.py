"""Dtypes of accumulation and communication, and division before the reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.comm import record_collectives
from launcher.config import ConfigProblems, load
from launcher.optim.loss_scale import LossScaleExhausted
from launcher.zero.leaf_hooks import torchs_register_hook
from tests.engine.driving import STAGES, advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

LARGE = 40_000.0  # fits float16, whose largest number is 65504; two of them do not


class Given(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def large_step(
    ctx: RankContext, stage: int, keys: dict[str, Any], value: float = LARGE
) -> tuple[bool, float, str]:
    """Take a step whose gradient is `value` on every rank; return whether it was applied, the weight, and the norm."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "loss_scale": 1},
        "optimizer": {"type": "SGD", "params": {"lr": 2.0**-12}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **keys,
    }
    engine = engine_of(config, Given())
    engine.backward(engine(torch.full((64,), value, dtype=torch.float16)))
    engine.step()
    weight = float(whole_weights(engine)["weight"][7])
    return engine.was_step_applied(), weight, f"{engine.get_global_grad_norm():.0f}"


@pytest.mark.key("prescale_gradients", "gradient_predivide_factor")
@pytest.mark.parametrize(
    ("stage", "reduce_scatter"), [*((stage, True) for stage in STAGES), (1, False), (3, False)]
)
def test_division_before_the_sum_keeps_float16_finite(
    pool: WorkerPool, stage: int, reduce_scatter: bool
) -> None:
    """The sum of two large gradients is infinite, that of their halves is not.

    DeepSpeed refuses this at stages 1 to 3 with reduce_scatter.
    """
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_scatter": reduce_scatter}
    plain = pool.run(large_step, 2, stage, {"zero_optimization": zero})
    assert plain == [(False, 0.0, "inf")] * 2
    mean = (True, float(torch.tensor(-LARGE / 2**12).half()), f"{8 * LARGE:.0f}")
    for keys in ({"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}):
        assert pool.run(large_step, 2, stage, {"zero_optimization": zero, **keys}) == [mean] * 2


def exhausted(ctx: RankContext, stage: int, value: float) -> str:
    """Return the error when a float16 gradient of this value on every rank overflows at the minimum scale."""
    fp16 = {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 1, "hysteresis": 1}
    with pytest.raises(LossScaleExhausted) as caught:
        large_step(ctx, stage, {"fp16": fp16, "zero_optimization": {"stage": stage}}, value)
    return str(caught.value)


@pytest.mark.key("prescale_gradients")
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_in_the_sum_alone_is_told_apart(pool: WorkerPool, stage: int) -> None:
    """No rank's own gradient overflows, so the error suggests prescale_gradients."""
    for message in pool.run(exhausted, 2, stage, LARGE):
        assert "weight (only in the sum over ranks)" in message and '"prescale_gradients": true' in message
    for message in pool.run(exhausted, 2, stage, torch.inf):
        assert "weight (ranks 0, 1)" in message and "prescale" not in message


def trained(ctx: RankContext, stage: int, keys: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(config_of(stage, 2, gradient_clipping=1.0, **keys))
    return advance(engine, ctx, range(4)), whole_weights(engine)


@pytest.mark.key("prescale_gradients", "gradient_predivide_factor")
@pytest.mark.parametrize("stage", STAGES)
def test_the_mean_is_the_same_up_to_rounding(pool: WorkerPool, stage: int) -> None:
    """Powers of two are bit-identical; clipping uses the same norm."""
    losses, weights = pool.run(trained, 2, stage, {})[0]
    exact = [{"prescale_gradients": True}, {"gradient_predivide_factor": 0.5}]
    for keys in exact:
        found, others = pool.run(trained, 2, stage, keys)[0]
        assert found == losses and all(torch.equal(others[name], value) for name, value in weights.items())
    found, others = pool.run(trained, 2, stage, {"gradient_predivide_factor": 3.0})[0]
    assert found == pytest.approx(losses, rel=1e-5)
    assert any(not torch.equal(others[name], value) for name, value in weights.items())


def test_prescale_wins_over_the_factor() -> None:
    notes = [str(note) for note in load({"prescale_gradients": True, "gradient_predivide_factor": 2.0}).notes]
    assert [note for note in notes if "gradient_predivide_factor" in note and "not used" in note]
    with pytest.raises(ConfigProblems, match="gradient_predivide_factor"):
        load({"gradient_predivide_factor": 0})


def sent(ctx: RankContext, stage: int, keys: dict[str, Any]) -> int:
    """Return the bytes of the reductions of one bf16 step."""
    engine = engine_of(config_of(stage, bf16={"enabled": True}, **keys))
    with record_collectives() as records:
        advance(engine, ctx, [0])
    return sum(
        r.sent for r in records if r.op in ("reduce_scatter", "all_reduce") and r.tag.endswith("/backward")
    )


@pytest.mark.key("communication_data_type")
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_on_the_wire(pool: WorkerPool, stage: int) -> None:
    own, fp32, bf16, fp16 = (
        pool.run(sent, 2, stage, {"communication_data_type": dtype})[0]
        for dtype in (None, "fp32", "bf16", "fp16")
    )
    assert own == bf16 == fp16 > 0
    assert fp32 == 2 * own


def accumulated(ctx: RankContext, stage: int, dtype: str | None) -> tuple[int, list[float]]:
    """Return the bytes of the bf16 gradients, and the losses with four microbatches per step."""
    engine = engine_of(config_of(stage, 4, bf16={"enabled": True}, data_types={"grad_accum_dtype": dtype}))
    losses = advance(engine, ctx, range(4))
    return engine.held_bytes()["gradients"], losses


@pytest.mark.key("data_types.grad_accum_dtype")
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_accumulated_in_their_dtype(pool: WorkerPool, stage: int) -> None:
    own, bf16, fp32 = (pool.run(accumulated, 2, stage, dtype)[0] for dtype in (None, "bf16", "fp32"))
    assert own == bf16
    assert fp32[0] == 2 * own[0]
    assert fp32[1] != own[1] and fp32[1] == pytest.approx(own[1], rel=0.05)


@pytest.mark.key("seq_parallel_communication_data_type")
def test_ranks_that_share_a_sequence_are_reduced_over_with_the_others() -> None:
    notes = load({"seq_parallel_communication_data_type": "bf16"}).notes
    assert [note for note in notes if "seq_parallel" in str(note) and "no effect" in str(note)]


def live(ctx: RankContext, immediate: bool) -> int:
    """Return the peak number of 16-bit gradient elements on leaves in a backward with an fp32 buffer."""
    config = config_of(
        1, bf16={"enabled": True, "immediate_grad_update": immediate}, data_types={"grad_accum_dtype": "fp32"}
    )
    engine = engine_of(config)
    most = 0

    def look(_: Tensor) -> None:
        nonlocal most
        held = [p.grad.numel() for p in engine.module.parameters() if p.grad is not None]
        most = max(most, sum(held))

    for p in engine.module.parameters():
        torchs_register_hook(p, look)  # called after ours, as the hooks of scripts are not
    advance(engine, ctx, [0])
    return most


@pytest.mark.key("bf16.immediate_grad_update")
def test_gradients_go_into_their_buffer_unit_by_unit_whatever_the_key_says(pool: WorkerPool) -> None:
    model = stack()
    largest_unit, everything = (
        sum(p.numel() for p in part.parameters()) for part in (model.blocks[0], model)
    )
    always, asked = pool.run(live, 2, False)[0], pool.run(live, 2, True)[0]
    assert always == asked <= largest_unit < everything / 2
    notes = load({"bf16": {"enabled": True, "immediate_grad_update": True}}).notes
    assert [note for note in notes if "immediate_grad_update" in str(note) and "no effect" in str(note)]
