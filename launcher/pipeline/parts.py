"""The parts of a Hugging Face model by where they run: before the blocks, the blocks, after them.

`base_model_pp_plan` of transformers says the same for some models, in the same order: registration order is what it
describes. What a model registers before its blocks and uses after them stands in `AFTER`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from launcher.errors import ConfigError
from launcher.models.units import ends_of, unit_modules

AFTER: dict[str, tuple[str, ...]] = {
    "opt": ("final_layer_norm", "project_out"),
}
"""model_type -> last names of modules that stand before the blocks and run after them."""

Named = list[tuple[str, nn.Module]]


class Parts(NamedTuple):
    """Modules of a model with their names. Those of the ends are outermost, and hold no block; some have no parameters.

    Attributes:
        before: run in front of the blocks: embeddings.
        blocks: one after the other.
        after: run behind them: the last norm, the head.
    """

    before: Named
    blocks: Named
    after: Named


def parts_of(model: nn.Module) -> Parts:
    """Where each part of a causal LM runs.

    Raises:
        ConfigError: it has no blocks, or not one row of them, or a parameter that belongs to no part.
    """
    config = getattr(model, "config", None)
    if getattr(
        config, "output_router_logits", False
    ):  # each stage would see the routers of its own blocks only
        raise ConfigError(
            "the auxiliary loss of the routers needs all blocks, and a pipeline stage has some of them",
            where="pipeline.stages",
            fix="set output_router_logits of the model's config to false, or delete the section pipeline",
        )
    blocks = unit_modules(model)
    rows = {name.rpartition(".")[0] for name, _ in blocks}
    if len(rows) != 1:
        raise _uncuttable(model, "its blocks are not one row" if rows else "it has no list of blocks")
    parts, ids, passed = Parts([], blocks, []), {id(block) for _, block in blocks}, False
    late = AFTER.get(getattr(config, "model_type", ""), ())
    embedding, head = ends_of(model)
    for name, module in _around(model, ids, ""):
        if id(module) in ids:
            passed = True
            continue
        late_by_name = name.rpartition(".")[2] in late
        first = module is embedding or not (module is head or passed or late_by_name)
        (parts.before if first else parts.after).append((name, module))
    _check_owners(model, parts)
    return parts


def _around(module: nn.Module, blocks: set[int], prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The blocks, and the largest modules without one, in registration order."""
    for key, child in module.named_children():
        name = f"{prefix}.{key}" if prefix else key
        if id(child) in blocks or not {id(inner) for inner in child.modules()} & blocks:
            yield name, child
        else:
            yield from _around(child, blocks, name)


def _check_owners(model: nn.Module, parts: Parts) -> None:
    inside = {id(inner) for part in parts for _, module in part for inner in module.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and (own := next(iter(module._parameters), None)) is not None:
            raise _uncuttable(model, f"its parameter {name}.{own} lies around the blocks")


def _uncuttable(model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} cannot be cut into stages: {why}",
        where="pipeline.stages",
        fix="write a PipelineModule, whose layers you name yourself, or delete the section pipeline",
    )
