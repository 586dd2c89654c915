"""Expert-parallel checkpoints load at other degrees; the exported model is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import launcher
from tests.experts.families import VOCAB, model_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.tensor.running import whole_state

IDS = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(5))


def engine_of(size: int = 1, stage: int = 1, **sections: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "eps": 1e-4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {"size": size},
        **sections,
    }
    return launcher.initialize(model=model_of("biases"), config=config, device=DEVICE)[0]


def saved(ctx: RankContext, directory: Path, size: int, stage: int) -> dict[str, Tensor]:
    engine = engine_of(size, stage)
    engine.train_batch(iter([{"input_ids": IDS, "labels": IDS}]))
    engine.save_checkpoint(directory / "checkpoint")
    engine.save_16bit_model(directory / "pickled", "pytorch_model.bin")
    engine.save_16bit_model(directory / "model")
    state = whole_state(engine)
    engine.destroy()
    return state


def loaded(ctx: RankContext, directory: Path, sections: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    engine = engine_of(**sections)
    engine.load_checkpoint(directory / "checkpoint")
    state = whole_state(engine)
    loss = float(engine.train_batch(iter([{"input_ids": IDS, "labels": IDS}])))
    engine.destroy()
    return state, loss


def test_checkpoints_go_to_other_degrees_bit_for_bit(pool: WorkerPool, tmp_path: Path) -> None:
    """ep 2 over 4 ranks -> ep 4 at stage 3, one rank, tp 2; the next loss is equal on each."""
    wanted = pool.run(saved, 4, tmp_path, 2, 2)[0]
    losses = []
    for world, sections in (
        (4, {"size": 4, "stage": 3}),
        (1, {"stage": 0}),
        (2, {"tensor_parallel": {"autotp_size": 2}}),
    ):
        state, loss = pool.run(loaded, world, tmp_path, sections)[0]
        losses.append(loss)
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], value) for name, value in wanted.items())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32),
        torch.load(tmp_path / "pickled" / "pytorch_model.bin"),
    ):
        values = model if isinstance(model, dict) else dict(model.named_parameters())
        assert all(torch.equal(values[name], value) for name, value in wanted.items() if "/" not in name)


def exported(ctx: RankContext, family: str, stage: int, directory: Path) -> dict[str, Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "expert_parallel": {"size": 2},
    }
    engine: Any = launcher.initialize(model=model_of(family), config=config, device=DEVICE)[0]
    engine.train_batch(iter([{"input_ids": IDS, "labels": IDS}]))
    engine.save_16bit_model(directory)
    state = whole_state(engine)
    engine.destroy()
    return {name: value for name, value in state.items() if "/" not in name}


@pytest.mark.parametrize(("family", "stage"), [("plain", 1), ("tied", 3), ("groups and dense layers", 2)])
def test_experts_are_written_as_the_hub_has_them(
    pool: WorkerPool, tmp_path: Path, family: str, stage: int
) -> None:
    """Writes the same tensors and names as save_pretrained() of transformers, one per expert."""
    wanted = pool.run(exported, 2, family, stage, tmp_path / "ours")[0]
    model = model_of(family)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(wanted[name])
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and any(".experts.0." in name for name in ours)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    read = dict(
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).named_parameters()
    )
    assert all(torch.equal(read[name], value) for name, value in wanted.items())
