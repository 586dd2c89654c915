"""`"partition": "profile"`: a slow layer gets a stage with fewer layers, and measuring leaves no trace."""

from __future__ import annotations

import re
import time
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.models.build import build_on_meta
from launcher.models.units import unit_modules
from launcher.pipe import LayerSpec, PipelineModule
from launcher.pipeline.hf.costs import deal
from launcher.pipeline.hf.measure import measure_model
from launcher.pipeline.partition.measure import MeasureOptions
from launcher.pipeline.sequential.measure import measure_row
from tests.models.tiny import config_of as model_config_of
from tests.pipeline.running import config_of, engine_of
from tests.pipeline.test_rows import refusal
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import batch, tiny_llama

CPU = torch.device("cpu")
NAP = 0.04  # much longer than what is asked to be shorter


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_takes = backward
        time.sleep(forward)
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_takes)
        return gradient, None, None


class Slow(nn.Module):
    def __init__(self, forward: float = NAP, backward: float = NAP) -> None:
        super().__init__()
        self.linear, self.takes = nn.Linear(4, 4), (forward, backward)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, states: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(_Nap.apply(states, *self.takes))


def slow_down(model: nn.Module, block: int) -> nn.Module:
    """Make a block of the model sleep in its forward."""
    inner = unit_modules(model)[block][1].self_attn
    inner.register_forward_pre_hook(lambda *_: time.sleep(NAP))
    return model


@pytest.mark.parametrize("kind", ["meta", "real"])
def test_a_slow_block_and_a_model_that_stays_as_it_was(kind: str) -> None:
    real = tiny_llama(layers=5, tied=True)
    model = slow_down(build_on_meta(real.config) if kind == "meta" else real, 1)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    ids = batch(0, 2)
    costs = measure_model(model, {"input_ids": ids, "labels": ids}, MeasureOptions(CPU))
    assert torch.equal(torch.get_rng_state(), state)
    assert costs.blocks[1] > NAP and max(costs.blocks[:1] + costs.blocks[2:]) < NAP / 2
    assert min(costs.before, costs.after, *costs.blocks) > 0
    assert deal(costs, 2) == [0, 2, 5]
    after = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    assert all(after[name] is tensor and tensor.grad is None for name, tensor in tensors.items())
    assert all(torch.equal(after[name], value) for name, value in values.items() if not value.is_meta)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_experts_under_autocast() -> None:
    model, ids = build_on_meta(model_config_of("mixtral")), batch(0, 2)
    costs = measure_model(
        model, {"input_ids": ids, "labels": ids}, MeasureOptions(CPU, torch.bfloat16, autocast=torch.bfloat16)
    )
    assert len(costs.blocks) == len(unit_modules(model)) and min(costs.blocks) > 0


def test_parameters_have_the_dtype_of_the_run() -> None:
    seen = set()
    linear = nn.Linear(4, 4)
    linear.register_forward_pre_hook(lambda *_: seen.add((linear.weight.dtype, linear.bias.dtype)))
    row = PipelineModule([lambda states: states.double(), linear])
    measure_row(row, torch.ones(2, 4), (), MeasureOptions(CPU, torch.float64, {"1.bias": torch.float64}))
    with pytest.raises(RuntimeError, match="dtype"):
        measure_row(row, torch.ones(2, 4), (), MeasureOptions(CPU, torch.bfloat16, {"1.bias": torch.float32}))
    assert seen == {(torch.float64, torch.float64), (torch.bfloat16, torch.float32)}


def test_layers_of_a_row_forward_backward_and_recomputed() -> None:
    made = Slow(NAP, 0)
    layers = [LayerSpec(nn.Linear, 4, 4), made, nn.ReLU(inplace=True), LayerSpec(Slow, 0, NAP)]

    def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
        time.sleep(NAP / 2)
        return (outputs - labels).square().mean()

    row = PipelineModule(layers, loss_fn=loss_of, partition_method="profile")
    x = torch.ones(2, 4)
    plain = measure_row(row, x, (x,), MeasureOptions(CPU))
    again = measure_row(row, x, (x,), MeasureOptions(CPU, recomputed=True))
    assert [round(cost / NAP, 1) for cost in plain] == pytest.approx([0, 1, 0, 1.5], abs=0.3)
    assert again[1] > 2 * NAP and 1.5 * NAP < again[3] < 2 * NAP
    assert made.calls == 0 and made.linear.weight.grad is None and torch.equal(x, torch.ones(2, 4))


def cut_by_measuring(ctx: RankContext) -> dict[str, Any]:
    model = slow_down(tiny_llama(layers=6), 0)
    pipeline = {"stages": 2, "partition": "profile"}
    with redirect_stdout(StringIO()) as told:
        engine = engine_of(config_of(0, 4, pipeline), model, seq_length=12)
    parts = iter([{"input_ids": ids, "labels": ids} for ids in batch(0).chunk(4)])
    loss = float(engine.train_batch(parts if engine.is_first_stage() else None))
    found = {"llama": engine.runtime.staged.boundaries, "loss": loss, "told": told.getvalue()}
    engine.destroy()

    def row() -> PipelineModule:
        return PipelineModule([Slow(), *(nn.Linear(4, 4) for _ in range(5))], loss_fn=nn.MSELoss())

    rows = [(torch.ones(4), torch.ones(4))] * 8
    engine = engine_of(config_of(0, 4, pipeline), row(), training_data=rows)
    found |= {"row": [name for name, _ in engine.module.named_children()]}
    engine.destroy()
    found["refused"] = refusal(engine_of, config_of(0, 4, pipeline), row())
    return found


def test_all_ranks_cut_where_rank_0_measured(pool: WorkerPool) -> None:
    first, last = pool.run(cut_by_measuring, 2)
    assert first["llama"] == last["llama"] == [0, 1, 6]
    assert first["loss"] == last["loss"]
    assert "measured with 2 x 12 tokens: " in first["told"] and last["told"] == ""
    assert re.search(r"stage 0  layer 0  +\d+\.\d ms, \d\d\.\d% of the cost", first["told"])
    assert first["row"] == ["0"] and last["row"] == ["1", "2", "3", "4", "5"]
    assert all("training_data" in found["refused"] for found in (first, last))
