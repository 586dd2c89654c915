"""Reads DeepSpeed's universal layout (`ds_to_universal`): a directory of unsharded states per parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.deepspeed.layout import Place, Shapes, whole
from launcher.checkpoint.deepspeed.opened import States, step_of, wrong
from launcher.checkpoint.deepspeed.unpickle import load_any
from launcher.errors import CheckpointError

REST = "optimizer_state.pt"
WEIGHTS, STEP = "fp32", "step"


def universal(directory: Path, shapes: Shapes) -> tuple[Place, dict[str, Any], States, list[dict[str, Any]]]:
    """Return (weights, states and step counts by launcher's names; the rest of the optimizer's state; the states of one
    parameter; options of the param groups).

    Args:
        directory: the checkpoint's `zero` directory.
        shapes: name -> shape of the parameters, as tensors that were converted from stage 3 are flat.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    rest = load_any(directory / REST)
    if not isinstance(rest, dict):
        raise wrong(directory / REST, "is not an optimizer state")
    stored: Place = {}
    states: States = {}
    count = _count_of_steps(rest)
    folders = {path.name: path for path in sorted(directory.iterdir()) if path.is_dir()}
    files = {name: {path.stem: path for path in sorted(path.glob("*.pt"))} for name, path in folders.items()}
    known = set().union(*files.values())
    for name in [*folders, *(name for name in shapes if name not in folders)]:
        _check_files(directory / name, files.get(name, {}), known)
        found = {state: _tensor(path) for state, path in files[name].items()}
        for state, tensor in found.items():
            if state == STEP:
                stored[f"scalar/step/{name}"] = whole(tensor.float().reshape(()))
                continue
            shape = shapes.get(name, found[WEIGHTS].shape)
            shaped = _shaped(tensor, shape, files[name][state])
            stored[f"model/{name}" if state == WEIGHTS else f"optimizer/{state}/{name}"] = whole(shaped)
        if STEP not in found and len(found) > 1 and count is not None:
            stored[f"scalar/step/{name}"] = whole(torch.tensor(float(count)))
        if len(found) > len(states.get(0, {})) + 1:
            states = {0: {state: tensor for state, tensor in found.items() if state != WEIGHTS}}
    return stored, rest, states, list(rest.get("param_groups") or ())


def _count_of_steps(rest: dict[str, Any]) -> int | None:
    """Return the step count in `rest`, where checkpoints converted from stage 3 store it; None if absent."""
    inner = rest.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    groups = [group for group in rest.get("param_groups") or () if isinstance(group, dict)]
    return step_of([*(states or {}).values(), *groups])


def _check_files(folder: Path, found: Mapping[str, Path], known: set[str]) -> None:
    """Check that a parameter has weights, and all states that others have or, without a gradient, none."""
    lacking = {WEIGHTS} - {*found} or (known - {*found} if len(found) > 1 else set())
    if lacking:
        names = ", ".join(f"{state}.pt" for state in sorted(lacking))
        raise CheckpointError(
            f"{folder} has no {names}.",
            where=str(folder),
            fix="convert the checkpoint again, or copy all of its files",
        )


def _shaped(tensor: Tensor, shape: Sequence[int], path: Path) -> Tensor:
    """Return a tensor in the parameter's shape; a tensor that was converted from stage 3 is flat."""
    if tuple(tensor.shape) != tuple(shape) and not (tensor.dim() == 1 and tensor.numel() == math.prod(shape)):
        raise wrong(path, f"has shape {list(tensor.shape)}, but the parameter has shape {list(shape)}")
    return tensor.view(tuple(shape))


def _tensor(path: Path) -> Tensor:
    content = load_any(path)
    value = content.get("param") if isinstance(content, dict) else content
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise wrong(path, "contains no tensor")
    return value.detach()
