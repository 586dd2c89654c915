"""Directories that store each expert separately are read by slice: a rank reads only its own experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import launcher
from launcher.engine.weights import model_with_source
from launcher.models.build import load_config
from launcher.models.load import SafetensorsSource
from tests.experts.families import FAMILIES, model_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.tensor.running import whole_state

ONE_BY_ONE = [family for family in FAMILIES if family not in ("biases", "shared by layers", "deep")]


@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_fused_tensors_are_read_by_boxes(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    source = SafetensorsSource(tmp_path)
    stored = sorted(source.names())
    assert any("experts.0." in name for name in stored)
    names = source.match_names(AutoModelForCausalLM.from_config(model.config))
    assert names is not None
    generator = torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():
        for _ in range(4):
            ends = [
                sorted(torch.randint(size + 1, (2,), generator=generator).tolist()) for size in value.shape
            ]
            box = tuple(slice(low, high) for low, high in ends)
            read = source.read_box(names[name], [low for low, _ in ends], [high - low for low, high in ends])
            assert torch.equal(read, value.detach()[box]), name


def loaded(ctx: RankContext, directory: Path, size: int) -> tuple[dict[str, Tensor], int, str]:
    """Return (weights, expert elements that were read, how they were found)."""
    made = model_with_source(load_config(str(directory)), str(directory), from_scratch=False, seed=0)
    read, elements = SafetensorsSource.read_box, 0

    def counted(self: SafetensorsSource, name: str, *box: Any) -> Tensor:
        nonlocal elements
        found = read(self, name, *box)
        elements += found.numel() if ".experts." in name and name not in self._fused else 0
        return found

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "expert_parallel": {"size": size},
    }
    with patch.object(SafetensorsSource, "read_box", counted):
        engine = launcher.initialize(model=made.model, config=config, source=made.source, device=DEVICE)[0]
    weights = {name: value for name, value in whole_state(engine).items() if "/" not in name}
    engine.destroy()
    return weights, elements, made.how


@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_reads_its_own_experts(pool: WorkerPool, tmp_path: Path, size: int) -> None:
    model = model_of("tied")
    model.save_pretrained(tmp_path)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    for weights, elements, how in pool.run(loaded, 2, tmp_path, size):
        assert "each rank reads its slices" in how and elements <= experts / 2 * 1.2  # slices of flat buffers
        for name, value in model.named_parameters():
            assert torch.equal(weights[name], value), name
