"""The states of Lion, Lamb and Muon are saved in slices and loaded on another topology; the losses continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.driving import advance, config_of, engine_of, whole_state
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Lion": {"type": "Lion", "params": {"lr": 0.003, "weight_decay": 0.1}},
    "Lamb": {"type": "Lamb", "params": {"lr": 0.02, "weight_decay": 0.1}},
    "Muon": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.01}},
    "Adam, uncorrected": {"type": "Adam", "params": {"lr": 0.003, "bias_correction": False}},
}
STATES = {
    "Lion": {"exp_avg"},
    "Lamb": {"exp_avg", "exp_avg_sq"},
    "Muon": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
    "Adam, uncorrected": {"exp_avg", "exp_avg_sq"},
}
BEFORE, AFTER = range(4), range(4, 8)


def save(ctx: RankContext, stage: int, name: str, directory: Path) -> tuple[dict[str, Tensor], list[float]]:
    engine = engine_of(config_of(stage, optimizer=OPTIMIZERS[name]))
    advance(engine, ctx, BEFORE)
    state = _tensors(engine)
    engine.save_checkpoint(directory)
    return state, advance(engine, ctx, AFTER)


def load(ctx: RankContext, stage: int, name: str, directory: Path) -> tuple[dict[str, Tensor], list[float]]:
    engine = engine_of(config_of(stage, optimizer=OPTIMIZERS[name]), stack(seed=1))
    engine.load_checkpoint(directory)
    return _tensors(engine), advance(engine, ctx, AFTER)


def _tensors(engine: Any) -> dict[str, Tensor]:
    """Return weights and states; step counts may be plain numbers, which have no slices."""
    for state in engine.optimizer.inner.state.values():
        state.update({key: torch.tensor(value) for key, value in state.items() if isinstance(value, int)})
    whole = whole_state(engine)
    for state in engine.optimizer.inner.state.values():
        state.update({k: v.item() for k, v in state.items() if v.dim() == 0 and v.dtype == torch.int64})
    return whole


@pytest.mark.pairwise
@pytest.mark.parametrize("source, target", [((2, 3), (1, 1)), ((1, 0), (2, 3)), ((2, 1), (4, 2))], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_topology(
    pool: WorkerPool, tmp_path: Path, name: str, source: tuple[int, int], target: tuple[int, int]
) -> None:
    (saved_on, saved_stage), (loaded_on, loaded_stage) = source, target
    state, goes_on = pool.run(save, saved_on, saved_stage, name, tmp_path)[0]
    loaded, resumed = pool.run(load, loaded_on, loaded_stage, name, tmp_path)[0]
    kinds = {key.partition("/")[0] for key, value in state.items() if "/" in key and value.dim() == 1}
    assert kinds == STATES[name]
    assert loaded.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(loaded[key], value), key
    assert resumed == pytest.approx(goes_on, rel=1e-5)
