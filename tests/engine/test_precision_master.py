"""16-bit master weights and moments: the saved bytes, and the results of plain PyTorch with the same precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.driving import LR, ROWS, STAGES, advance, config_of, engine_of, whole_state, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import points, stack

STEPS = 6
SCALE = 64.0
FP16: dict[str, Any] = {"enabled": True, "auto_cast": True, "loss_scale": SCALE}
SECTIONS: dict[str, dict[str, Any]] = {
    "fp16": {"fp16": FP16},
    "fp16-master": {"fp16": {**FP16, "fp16_master_weights_and_grads": True}},
    "bf16": {"bf16": {"enabled": True}},
    "bf16-master": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "bf16-states": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    },
}
ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1, "fp32_optimizer_states": False}}
SECTIONS["narrow"] = {**SECTIONS["bf16-master"], "optimizer": ADAMW}  # another way to say bf16-states
SECTIONS["narrow-alone"] = {
    **SECTIONS["bf16"],
    "optimizer": ADAMW,
}  # says nothing: master weights are float32
# bytes of each owned element: master weights beside the parameter, Adam's two moments
MASTER = {"fp16": 4, "fp16-master": 0, "bf16": 4, "bf16-master": 0, "bf16-states": 0}
MASTER |= {"narrow": 0, "narrow-alone": 4}
MOMENTS = {"fp16": 8, "fp16-master": 8, "bf16": 8, "bf16-master": 8, "bf16-states": 4}
MOMENTS |= {"narrow": 4, "narrow-alone": 8}


def held(ctx: RankContext, stage: int, name: str) -> dict[str, int]:
    """Return the bytes of this rank after a step, and their number of elements."""
    engine = engine_of(config_of(stage, **SECTIONS[name]))
    advance(engine, ctx, [0])
    owned = sum(flat.owned.stop - flat.owned.start for flat in engine.zero.flats)
    stepped = sum(piece.data.numel() for piece in engine.zero.slices())
    return {**engine.held_bytes(), "owned": owned, "stepped": stepped}


@pytest.mark.pairwise
@pytest.mark.key(
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "optimizer.params.fp32_optimizer_states",
)
@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_held(pool: WorkerPool, stage: int, name: str) -> None:
    """Exact bytes: parameters and gradients 2 + 2, master 4 or 0, moments 8 or 4, of this rank's shard."""
    for rank in pool.run(held, 2, stage, name):
        assert rank["master"] == MASTER[name] * rank["owned"]
        # Adam's moments; a parameter of one element has a moment without dims, which is not counted
        assert 0 <= MOMENTS[name] * rank["stepped"] - rank["optimizer"] <= MOMENTS[name]
        if stage == 3:
            assert rank["parameters"] == rank["gradients"] == 2 * rank["owned"]


def run(ctx: RankContext, stage: int, name: str) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(config_of(stage, **SECTIONS[name]))
    return advance(engine, ctx, range(STEPS)), whole_weights(engine)


def plain(name: str, world: int) -> tuple[list[float], dict[str, Tensor]]:
    """Run the same arithmetic in a loop: gradients of each share summed in 16 bits, then AdamW on the 16-bit weights.

    With fp32 moments, on their fp32 values, which are rounded after the step.
    """
    dtype = torch.float16 if name.startswith("fp16") else torch.bfloat16
    scale = SCALE if dtype == torch.float16 else 1.0
    model = stack().to(dtype)
    wide = name != "bf16-states"
    stepped = [p.detach().float() if wide else p for p in model.parameters()]
    optimizer = torch.optim.AdamW(stepped, lr=LR, weight_decay=0.1, fused=True)
    losses = []
    for number in range(STEPS):
        x, y = points(number, ROWS)
        total = 0.0
        for part in zip(x.to(dtype).chunk(world), y.to(dtype).chunk(world), strict=True):
            loss = model(*part)
            (loss * scale).backward()
            total += loss.item() / world
        for p, s in zip(model.parameters(), stepped, strict=True):
            assert p.grad is not None
            s.data.copy_(p.data)
            s.grad = p.grad.to(s.dtype) / (scale * world)
        optimizer.step()
        for p, s in zip(model.parameters(), stepped, strict=True):
            p.data.copy_(s.data)
            p.grad = None
        losses.append(total)
    return losses, {key: p.detach().clone() for key, p in model.named_parameters()}


@pytest.mark.key(
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "optimizer.params.fp32_optimizer_states",
)
@pytest.mark.parametrize("name", ["fp16-master", "bf16-master", "bf16-states"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_numbers_are_those_of_plain_pytorch(pool: WorkerPool, stage: int, name: str) -> None:
    expected, weights = plain(name, 2)
    for losses, found in pool.run(run, 2, stage, name):
        assert losses == expected
        assert all(torch.equal(found[key], value) for key, value in weights.items())


@pytest.mark.key(
    "fp16.fp16_master_weights_and_grads",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "optimizer.params.fp32_optimizer_states",
)
def test_each_key_changes_the_losses(pool: WorkerPool) -> None:
    losses = {name: tuple(pool.run(run, 2, 2, name)[0][0]) for name in SECTIONS}
    assert losses.pop("narrow") == losses["bf16-states"]
    assert losses.pop("narrow-alone") == losses["bf16"]
    assert len(set(losses.values())) == len(losses)


def resume(ctx: RankContext, directory: str) -> bool:
    """Save with fp32 moments and master weights, load without either."""
    first = engine_of(config_of(1, **SECTIONS["bf16"]))
    advance(first, ctx, range(2))
    first.save_checkpoint(directory)
    second = engine_of(config_of(3, **SECTIONS["bf16-states"]))
    second.load_checkpoint(directory)
    kept, loaded = whole_state(first), whole_state(second)
    rounded = all(
        torch.equal(loaded[name], value.bfloat16().float()) for name, value in kept.items() if value.dim()
    )
    advance(second, ctx, [2])
    return rounded


def test_a_checkpoint_of_another_precision_is_taken(pool: WorkerPool, tmp_path: Any) -> None:
    assert pool.run(resume, 2, str(tmp_path)) == [True, True]
