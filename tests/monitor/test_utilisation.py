"""Model FLOPs utilization: the formula compared with torch's counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import launcher
from launcher.engine import report
from launcher.experts.modules import experts_in, number_of
from launcher.monitor.utilisation import Utilisation, flops_per_token, peak_of
from tests.experts.families import model_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_llama

LENGTH = 64


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_what_torch_counts(tied: bool) -> None:
    model = tiny_llama(tied, layers=4)
    model.set_attn_implementation("eager")  # torch has no formula for the CPU's own attention
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    told = flops_per_token(model.config, parameters, LENGTH) * ids.numel()
    assert told == pytest.approx(counted.get_total_flops(), rel=0.05)


def test_it_is_a_part_of_the_peak_and_a_cpu_has_none() -> None:
    assert Utilisation(flops=6e9, peak=1e12).of(100.0) == pytest.approx(0.6)
    assert peak_of(torch.device("cpu")) is None


def active(ctx: RankContext) -> tuple[float, float]:
    """Return a mixture of experts' active parameters: sharded and expert-parallel, and by a loop."""
    model = model_of("plain")
    chosen = model.config.num_experts_per_tok
    idle = sum(
        sum(p.numel() for p in module.parameters()) * (1 - chosen / number_of(module))
        for _, module in experts_in(model)
    )
    whole = sum(p.numel() for p in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine: Any = launcher.initialize(model=model, config=config, device=torch.device("cpu"))[0]
    return report.active_parameters(engine), whole - idle


def test_of_experts_those_count_that_a_token_goes_through(pool: WorkerPool) -> None:
    for told, counted in pool.run(active, 2):
        assert told == pytest.approx(counted)
