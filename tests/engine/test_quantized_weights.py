"""Quantized frozen weights under adapters (QLoRA): shards of bytes that nothing may cast, at every ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.driving import STAGES, advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.zero.models import points

WIDTH, STEPS, LR = 4, 3, 0.01
STORAGES = {"uint8": torch.uint8, "bf16": torch.bfloat16, "fp32": torch.float32}
HOST = {"device": "cpu"}
BYTES = 3 * 8 * WIDTH**2  # of three layers


class Packed(nn.Parameter):
    """A parameter like bitsandbytes' `Params4bit`: bytes of another tensor, which `quant_state` describes."""

    quant_state: tuple[torch.dtype, torch.Size]

    @staticmethod
    def of(weight: Tensor, storage: torch.dtype) -> Packed:
        made = torch.Tensor._make_subclass(Packed, weight.view(storage).view(-1, 1), False)
        made.quant_state = weight.dtype, weight.shape
        return made  # type: ignore[return-value]

    def unpacked(self) -> Tensor:
        dtype, shape = self.quant_state
        return self.data.flatten().view(dtype).view(shape)


class Adapted(nn.Module):
    """A linear layer with packed weights and a LoRA adapter."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        # float64 weights: no dtype of a run is that of the packed values
        self.weight: Any = Packed.of(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5, storage)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.unpacked().to(x.dtype).T + self.b(self.a(x)))


class Model(nn.Module):
    def __init__(self, storage: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Adapted(STORAGES[storage]) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x.mean(1).float() - y.float()).square().mean()


def plain(storage: str) -> list[float]:
    model, losses = Model(storage), []
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LR, weight_decay=0.1)
    for step in range(STEPS):
        loss = model(*points(step, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(
    ctx: RankContext, config: dict[str, Any], storage: str, directory: Path
) -> tuple[list[float], list[float], int, bool]:
    """Return the losses, those after resuming from a checkpoint of the first step, the bytes of packed weights at rest,
    and whether all of its bytes are those of the start."""
    engine = engine_of(config, Model(storage))
    packed = [flat for flat in engine.zero.flats if isinstance(flat.slots[0].leaf, Packed)]
    at_rest = sum(flat.held_bytes for flat in packed)
    losses = advance(engine, ctx, range(1))
    engine.save_checkpoint(directory)
    losses += advance(engine, ctx, range(1, STEPS))
    again = engine_of(config, Model(storage))
    again.load_checkpoint(directory)
    resumed = advance(again, ctx, range(1, STEPS))
    engine.save_16bit_model(directory, "model.bin")
    saved = torch.load(directory / "model.bin")["layers.0.weight"]
    start = Model(storage).layers[0].weight.data
    return losses, resumed, at_rest, saved.dtype == start.dtype and torch.equal(saved.cpu(), start)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_changes_a_byte(pool: WorkerPool, tmp_path: Path, stage: int, storage: str) -> None:
    losses, resumed, at_rest, same = pool.run(trained, 2, config_of(stage), storage, tmp_path)[0]
    assert losses == pytest.approx(plain(storage), rel=1e-6) and resumed == losses[1:] and same
    assert at_rest == BYTES // (2 if stage == 3 else 1)


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
@pytest.mark.parametrize("storage", STORAGES)
def test_they_are_not_quantized_again(pool: WorkerPool, tmp_path: Path, storage: str, key: str) -> None:
    config = config_of(3, zero_optimization={key: True})
    losses, resumed, at_rest, same = pool.run(trained, 2, config, storage, tmp_path)[0]
    exact = 1e-2 if key == "zero_quantized_weights" else 1e-6  # it rounds the adapters
    assert losses == pytest.approx(plain(storage), rel=exact) and resumed == losses[1:]
    assert at_rest == BYTES // 2 and same


@pytest.mark.parametrize("storage", STORAGES)
def test_16_bit_runs_leave_them_alone(pool: WorkerPool, tmp_path: Path, storage: str) -> None:
    """The dtype of the storage is none of the model: a cast to bf16 would destroy the weights."""
    zero = {"offload_param": HOST, "offload_optimizer": HOST} if storage == "fp32" else {}
    config = config_of(3, bf16={"enabled": True}, zero_optimization=zero)
    losses, resumed, at_rest, same = pool.run(trained, 2, config, storage, tmp_path)[0]
    assert losses == pytest.approx(plain(storage), rel=2e-2) and resumed == losses[1:] and same
    assert at_rest == BYTES // 2
