"""`data_types`: parameters and buffers with another dtype than the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.driving import STAGES, advance, config_of, engine_of, whole_state, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.worker_pool import RanksFailed
from tests.zero.models import Stack, points, stack

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
STEPS = 5


class Careful(Stack):
    """Computes its last layer in that layer's dtype, as Hugging Face's T5 does, and has a buffer.

    Attributes:
        strict, under_fp16: Hugging Face's lists of modules that stay fp32.
    """

    def __init__(self, strict: tuple[str, ...] = (), under_fp16: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._keep_in_fp32_modules_strict, self._keep_in_fp32_modules = list(strict), list(under_fp16)
        self.register_buffer("third", torch.tensor(1 / 3))

    def forward(self, x: Tensor, y: Tensor, use_spare: bool = False) -> Tensor:
        h = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            h = block(h)
        out = self.last(h.to(self.last.weight.dtype)).squeeze(-1) * self.scale + self.offset.sum()
        return nn.functional.mse_loss(out.float(), y.float()) * (1 + self.third)


def careful(*lists: tuple[str, ...]) -> Careful:
    model = Careful(*lists)
    model.load_state_dict(stack().state_dict(), strict=False)
    return model


Found = tuple[list[float], dict[str, torch.dtype], dict[str, Tensor], dict[str, int], dict[str, Tensor]]


def run(ctx: RankContext, stage: int, lists: tuple[tuple[str, ...], ...], keys: dict[str, Any]) -> Found:
    """Return losses, dtypes of parameters and buffers, weights, bytes, master weights and moments."""
    engine = engine_of(config_of(stage, 2, **keys), careful(*lists))
    losses = advance(engine, ctx, range(STEPS))
    dtypes = {
        name: p.dtype for name, p in (*engine.module.named_parameters(), *engine.module.named_buffers())
    }
    return losses, dtypes, whole_weights(engine), engine.held_bytes(), whole_state(engine)


def fp32_names(found: Found) -> set[str]:
    return {name for name, dtype in found[1].items() if dtype == torch.float32}


LAST = {"last.weight", "last.bias"}


@pytest.mark.key("data_types.keep_in_fp32_modules")
@pytest.mark.parametrize("stage", STAGES)
def test_named_parameters_stay_fp32_in_a_16_bit_model(pool: WorkerPool, stage: int) -> None:
    """In the model, in gathers and in gradients.

    Their values are not bf16 values, and the loss is close to the others.
    """
    keys = {**BF16, "data_types": {"keep_in_fp32_modules": ["last.*"]}}
    found, plain = (pool.run(run, 2, stage, (), k)[0] for k in (keys, BF16))
    assert fp32_names(found) == LAST | {"third"} and fp32_names(plain) == {"third"}
    for name in LAST:
        assert not torch.equal(found[2][name], found[2][name].bfloat16().float())
        assert torch.equal(found[2][name].view(-1), found[4][name])  # no master copy beside it
    assert found[0] != plain[0] and found[0] == pytest.approx(plain[0], rel=0.05)
    assert found[3]["master"] < plain[3]["master"]


def truth(steps: int) -> list[float]:
    """Return the losses of plain PyTorch: a bf16 copy of fp32 master weights, except the last layer."""
    model, master = careful().bfloat16(), careful()
    model.last.float().load_state_dict(master.last.state_dict())
    optimizer = torch.optim.AdamW(master.parameters(), lr=0.01, weight_decay=0.1)
    losses = []
    for number in range(steps):
        x, y = (value.bfloat16() for value in points(number))
        total = 0.0
        for part in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = model(*part)
            (loss / 2).backward()
            total += loss.item() / 2
        for p, m in zip(model.parameters(), master.parameters(), strict=True):
            m.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        optimizer.step()
        for p, m in zip(model.parameters(), master.parameters(), strict=True):
            p.data.copy_(m.data)
        losses.append(total)
    return losses


def losses_alone(ctx: RankContext, stage: int) -> list[float]:
    keys = {**BF16, "data_types": {"keep_in_fp32_modules": ["last.*"], "buffer_dtype": "bf16"}}
    model = careful()
    model.third.data = model.third.bfloat16()
    return advance(engine_of(config_of(stage, 1, **keys), model), ctx, range(STEPS))


@pytest.mark.key("data_types.keep_in_fp32_modules")
@pytest.mark.parametrize("stage", STAGES)
def test_the_numbers_are_those_of_plain_pytorch(pool: WorkerPool, stage: int) -> None:
    """2 ranks sum 16-bit gradients, like the loop; tolerance for a small bf16 model: 1 in 1000."""
    assert pool.run(losses_alone, 2, stage)[0] == pytest.approx(truth(STEPS), rel=1e-3)


@pytest.mark.key("data_types.keep_in_fp32_modules")
def test_auto_follows_the_models_own_lists(pool: WorkerPool) -> None:
    """`_keep_in_fp32_modules_strict` applies always, `_keep_in_fp32_modules` only with fp16; [] keeps nothing."""
    lists = (("last",), ("offset",))
    fp16 = {"fp16": {"enabled": True, "loss_scale": 8}}
    auto = {"data_types": {"keep_in_fp32_modules": "auto"}}
    assert fp32_names(pool.run(run, 1, 3, lists, {**BF16, **auto})[0]) == LAST | {"third"}
    assert fp32_names(pool.run(run, 1, 3, lists, BF16)[0]) == LAST | {"third"}
    assert fp32_names(pool.run(run, 1, 3, lists, {**fp16, **auto})[0]) == LAST | {"offset", "third"}
    none = {"data_types": {"keep_in_fp32_modules": []}}
    assert fp32_names(pool.run(run, 1, 3, lists, {**BF16, **none})[0]) == {"third"}


@pytest.mark.key("data_types.buffer_dtype", "data_types.keep_in_fp32_modules")
def test_buffers_are_cast_unless_they_are_kept(pool: WorkerPool) -> None:
    fp32 = pool.run(run, 2, 0, (), {})[0]
    cast = pool.run(run, 2, 0, (), {"data_types": {"buffer_dtype": "bf16"}})[0]
    assert fp32[1]["third"] == torch.float32 and cast[1]["third"] == torch.bfloat16
    assert fp32[0][0] != cast[0][0] == pytest.approx(fp32[0][0], rel=1e-2)
    kept = {"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["third"]}}
    assert pool.run(run, 2, 0, (), {**BF16, **kept})[0][1]["third"] == torch.float32


def misspelt(ctx: RankContext) -> None:
    engine_of(config_of(0, **BF16, data_types={"keep_in_fp32_modules": ["lost"]}))


@pytest.mark.key("data_types.keep_in_fp32_modules")
def test_a_pattern_that_fits_nothing_is_an_error(pool: WorkerPool) -> None:
    with pytest.raises(
        RanksFailed, match=r"'lost' matches no parameter[\s\S]*data_types.keep_in_fp32_modules"
    ):
        pool.run(misspelt, 1)
