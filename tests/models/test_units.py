"""Which modules are units."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from launcher.models.build import build_on_meta
from launcher.models.units import unit_modules
from tests.models.tiny import config_of


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["model.layers.0", "model.layers.1", "model.layers.2"]),
        ("gpt2", ["transformer.h.0", "transformer.h.1", "transformer.h.2"]),
        ("opt", ["model.decoder.layers.0", "model.decoder.layers.1", "model.decoder.layers.2"]),
        ("mamba", ["backbone.layers.0", "backbone.layers.1"]),
        ("openai-gpt", ["transformer.h.0", "transformer.h.1"]),
    ],
)
def test_blocks_of_hf_models(family: str, names: list[str]) -> None:
    model = build_on_meta(config_of(family))
    units = unit_modules(model)
    assert [name for name, _ in units] == names
    assert all(model.get_submodule(name) is module for name, module in units)


def test_encoder_and_decoder() -> None:
    config = T5Config(d_model=16, d_ff=16, num_layers=2, num_decoder_layers=3, vocab_size=32)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    names = [name for name, _ in unit_modules(model)]
    assert names == [f"encoder.block.{i}" for i in range(2)] + [f"decoder.block.{i}" for i in range(3)]


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((expert(x) for expert in self.experts), x)


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(2, 2)])
        self.mixed = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2)])
        self.dropouts = nn.ModuleList(nn.Dropout() for _ in range(9))
        self.pairs = nn.ModuleList(nn.ModuleDict({"one": nn.Linear(2, 2)}) for _ in range(7))
        self.blocks = nn.ModuleList(_Experts() for _ in range(3))


def test_plain_module_longest_list_and_no_experts() -> None:
    """Lists of different classes, without parameters, of modules without forward, or inside a block are not units,
    however long.
    """
    assert [name for name, _ in unit_modules(_Plain())] == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_block_used_twice_is_one_unit() -> None:
    model = nn.Module()
    block = nn.Linear(2, 2)
    model.layers = nn.ModuleList([block, nn.Linear(2, 2), block])
    assert [name for name, _ in unit_modules(model)] == ["layers.0", "layers.1"]


def test_no_blocks() -> None:
    assert unit_modules(nn.Linear(2, 2)) == []
    assert unit_modules(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
