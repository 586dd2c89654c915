"""Leaf modules are gathered as one unit, and results stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import launcher
from launcher.comm import record_collectives
from launcher.config import load
from launcher.engine.assemble import mark_leaves
from launcher.errors import ConfigError
from launcher.zero.features.leaf import with_leaves
from tests.engine.driving import advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.zero.models import Block, Stack, stack


class Encoder(nn.Module):
    """Two blocks, called as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(8), Block(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Neck(nn.Module):
    """Two small layers: 13 elements for each of the three modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Model(Stack):
    """A neck before the blocks, and an encoder with two more after them."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.neck, self.encoder = Neck(), Encoder()

    def forward(self, x: Tensor, y: Tensor, use_spare: bool = False) -> Tensor:
        h = self.first(self.neck(x))
        for block in [*self.blocks, self.encoder]:
            h = block(h)
        return nn.functional.mse_loss(self.last(h).squeeze(-1) * self.scale + self.offset.sum(), y)


def model_of() -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model()


def trained(ctx: RankContext, zero: dict[str, Any], mark: str) -> tuple[list[float], list[str], int]:
    """Return (losses, units, gathers of a step)."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, **zero}
    model = model_of()
    if mark:
        launcher.zero.set_z3_leaf_modules(model, [mark])
    engine = engine_of(config_of(3, zero_optimization=zero), model)
    losses = advance(engine, ctx, range(3))
    with record_collectives() as records:
        losses += advance(engine, ctx, [3])
    return losses, [unit.name for unit in engine.zero.units], sum(r.op == "all_gather" for r in records)


BLOCKS, INNER = ["blocks.0", "blocks.1"], ["encoder.layers.0", "encoder.layers.1"]
LEAVES = {
    "leaf_module.classes": ({"leaf_module": {"classes": "Encoder"}}, [*BLOCKS, "encoder", "root"]),
    "leaf_module.names": ({"leaf_module": {"names": ["neck"]}}, [*BLOCKS, "neck", *INNER, "root"]),
    "leaf_module.name_suffixes": (
        {"leaf_module": {"name_suffixes": ["first", ".up"]}},  # .up is inside a block
        ["first", *BLOCKS, "neck.first", *INNER, "root"],
    ),
    "stage3_module_granularity_threshold": (
        {"stage3_module_granularity_threshold": 13},
        [*BLOCKS, "neck", *INNER, "root"],
    ),
    "a list inside of another leaf": (
        {"leaf_module": {"names": ["encoder"], "name_suffixes": ["encoder.layers"]}},
        [*BLOCKS, "encoder", "root"],
    ),
    "the whole": ({"leaf_module": {"classes": [f"{__name__}.Model"]}}, ["root"]),
}


@pytest.mark.key(
    "zero_optimization.leaf_module",
    "zero_optimization.leaf_module.classes",
    "zero_optimization.leaf_module.names",
    "zero_optimization.leaf_module.name_suffixes",
    "zero_optimization.stage3_module_granularity_threshold",
)
def test_leaves_are_units(pool: WorkerPool) -> None:
    """Around blocks, next to them, inside them; each key changes units and gathers, and never the results."""
    losses, units, plain = pool.run(trained, 2, {}, "")[0]
    assert units == [*BLOCKS, *INNER, "root"]
    for zero, want in LEAVES.values():
        got, units, gathers = pool.run(trained, 2, zero, "")[0]
        assert got == pytest.approx(losses, rel=1e-6)
        assert units == want
        assert (gathers > plain) == (len(want) > 5) and (gathers < plain) == (len(want) < 5)


def test_marked_in_code(pool: WorkerPool) -> None:
    """Uses the functions of deepspeed.utils."""
    losses, units, _ = pool.run(trained, 2, {}, "Encoder")[0]
    assert units == [*BLOCKS, "encoder", "root"] and losses == pool.run(trained, 2, {}, "")[0][0]
    model, zero = model_of(), launcher.zero
    assert zero.set_z3_leaf_modules(model, [Block, "Neck"]) == zero.get_z3_leaf_modules(model)
    assert len(zero.unset_z3_leaf_modules(model, [Block])) == 4
    assert zero.get_z3_leaf_modules(model) == [model.neck]
    zero.set_z3_leaf_module(model.neck, False)
    assert zero.set_z3_leaf_modules_by_name(model, ["neck", "nose"], raise_if_not_found=False)[1] == ["nose"]
    assert zero.set_z3_leaf_modules_by_suffix(model, [".up"])[0][0] is model.blocks[0].up
    assert not zero.get_z3_leaf_modules(stack())


@pytest.mark.key("zero_optimization.leaf_module")
@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        ({"classes": ["Encodr"]}, "no module has the class Encodr"),
        ({"names": "blocks.7"}, r"no module name matches: blocks\.7"),
    ],
)
def test_what_cannot_be_a_leaf_is_said(leaf: dict[str, Any], said: str) -> None:
    model, config = model_of(), load({"zero_optimization": {"stage": 3, "leaf_module": leaf}})
    with pytest.raises(ConfigError, match=said):
        mark_leaves(model, config)


def test_a_list_of_modules_is_no_unit() -> None:
    """It has no forward before which its parameters could be gathered."""
    model = model_of()
    assert launcher.zero.set_z3_leaf_modules_by_name(model, ["encoder.layers"])[0] == [model.encoder.layers]
    with pytest.raises(ConfigError, match=r"encoder\.layers is a ModuleList, which cannot be a leaf"):
        with_leaves(model, [])
