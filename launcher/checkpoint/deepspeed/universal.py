"""DeepSpeed's universal layout, which `ds_to_universal` makes: each parameter has a directory of its whole states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.deepspeed.layout import Shapes, whole
from launcher.checkpoint.deepspeed.opened import States, step_of, wrong
from launcher.checkpoint.deepspeed.sharded import Place
from launcher.checkpoint.deepspeed.unpickle import load_any

REST = "optimizer_state.pt"
WEIGHTS, STEP = "fp32", "step"


def universal(directory: Path, shapes: Shapes) -> tuple[Place, dict[str, Any], States, list[dict[str, Any]]]:
    """Return (weights, states and step counts by launcher's names; the rest of the optimizer's state; the states of one
    parameter; options of the param groups).

    Args:
        directory: `zero` of the checkpoint.
        shapes: name -> shape of the parameters; what was converted from stage 3 is flat.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    rest = load_any(directory / REST)
    if not isinstance(rest, dict):
        raise wrong(directory / REST, "is not the state of an optimizer")
    stored: Place = {}
    states: States = {}
    count = _count_of_steps(rest)
    for of_parameter in sorted(path for path in directory.iterdir() if path.is_dir()):
        name = of_parameter.name
        found = {
            path.stem: _shaped(_tensor(path), shapes.get(name)) for path in sorted(of_parameter.glob("*.pt"))
        }
        if WEIGHTS not in found:
            raise wrong(of_parameter, f"has no {WEIGHTS}.pt: the weights of {name} are missing")
        for state, tensor in found.items():
            if state == STEP:
                stored[f"scalar/step/{name}"] = whole(tensor.float().reshape(()))
            else:
                stored[f"model/{name}" if state == WEIGHTS else f"optimizer/{state}/{name}"] = whole(tensor)
        if STEP not in found and len(found) > 1 and count is not None:
            stored[f"scalar/step/{name}"] = whole(torch.tensor(float(count)))
        if len(found) > len(states.get(0, {})) + 1:
            states = {0: {state: tensor for state, tensor in found.items() if state != WEIGHTS}}
    return stored, rest, states, list(rest.get("param_groups") or ())


def _count_of_steps(rest: dict[str, Any]) -> int | None:
    """Return the count of steps where the parameters have none: what is made of stage 3 has it here."""
    inner = rest.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    groups = [group for group in rest.get("param_groups") or () if isinstance(group, dict)]
    return step_of([*(states or {}).values(), *groups])


def _shaped(tensor: Tensor, shape: Sequence[int] | None) -> Tensor:
    return (
        tensor.view(shape)
        if shape is not None and tensor.dim() == 1 and tensor.numel() == math.prod(shape)
        else tensor
    )


def _tensor(path: Path) -> Tensor:
    content = load_any(path)
    value = content.get("param") if isinstance(content, dict) else content
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise wrong(path, "has no tensor")
    return value.detach()
