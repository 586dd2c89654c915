"""Reads the optimizer state of stage 0, which is not sharded: per parameter in fp32, flat in 16 bits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.deepspeed.files import missing
from launcher.checkpoint.deepspeed.layout import Place, ranges, whole
from launcher.checkpoint.deepspeed.opened import OpenedFiles, States, step_of, wrong
from launcher.checkpoint.deepspeed.sharded import is_flat, place
from launcher.checkpoint.deepspeed.unpickle import load
from launcher.errors import CheckpointError


def unsharded(opened: OpenedFiles) -> tuple[Place, States, list[dict[str, Any]]]:
    """Return (states, step counts and 16-bit models' master weights; states as stored; param group options).

    The file does not record which parameters are in which group. A single group contains the model's
    parameters in their order; anything else is refused.
    """
    state = opened.model.get("optimizer")
    if not isinstance(state, dict):
        return {}, {}, []
    base = state.get("optimizer_state_dict", state)
    states, groups = dict(base["state"]), list(base["param_groups"])
    masters = state.get("fp32_groups_flat")
    stored: Place = {}
    if masters:
        _check_one_group(opened, len(masters) == 1)
        shapes = {name: tuple(opened.module[name].shape) for name in opened.parameters}
        found = list(ranges([shapes], [[masters[0].numel()]], None))
        (number,) = states or (0,)

        def put(kind: str, flat: Tensor) -> None:
            place(stored, opened.files.model, kind, found, shapes, lambda _: flat)

        put("model", masters[0])
        for key, value in states.get(number, {}).items():
            if is_flat(value):
                put(f"optimizer/{key}", value)
        numbers = dict.fromkeys(opened.parameters, number)
    else:
        # DeepSpeed writes no names here; launcher's export does.
        names = [name for group in opened.groups for name in group] or opened.parameters
        _check_one_group(opened, len(groups) == 1 or bool(opened.groups))
        numbers = _by_parameter(opened, stored, base, names)
        groups = _named(groups, numbers)
    _count(stored, base, numbers)
    return stored, states, groups


def of_experts(opened: OpenedFiles) -> tuple[Place, States, list[dict[str, Any]]]:
    """Return the same as `unsharded` for a model with expert layers.

    Each expert-parallel rank wrote a file: the states of the parameters that all ranks have, followed by
    those of its own experts.
    """
    stored: Place = {}
    states, groups = {}, []
    files = opened.files.whole_optimizer
    shared = [name for name in opened.parameters if name not in opened.experts.named]
    for rank, path in sorted(files.items(), reverse=True):  # rank 0 last: its shared states are used
        base = load(path).get("optimizer")
        if not isinstance(base, dict) or "state" not in base:
            raise wrong(path, "has no optimizer state that launcher supports")
        states, groups = dict(base["state"]), list(base["param_groups"])
        kinds = [str(group.get("name")) if group.get("moe") else "" for group in groups]
        _check_one_group(opened, kinds[0] == "" and "" not in kinds[1:] and len(set(kinds)) <= 2)
        if (degree := re.fullmatch(r"ep_size_(\d+)", kinds[-1])) and len(files) < int(degree[1]):
            raise missing(path.with_name(path.name.replace(f"_{rank}_", f"_{int(degree[1]) - 1}_", 1)), path)
        numbers = _by_parameter(opened, stored, base, shared + opened.experts.share(rank, len(files)))
        groups = _named(groups, numbers)
        _count(stored, base, numbers)
    return stored, states, groups


def _by_parameter(
    opened: OpenedFiles, stored: Place, base: Mapping[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Add the states of a per-parameter optimizer to `stored`; return {name: index in the optimizer}."""
    places = [number for group in base["param_groups"] for number in group["params"]]
    _check_one_group(opened, len(places) == len(names))
    numbers = dict(zip(names, places, strict=True))
    for name, number in numbers.items():
        for key, value in base["state"].get(number, {}).items():
            if isinstance(value, Tensor) and key != "step":
                _check_one_group(opened, value.shape == opened.module[name].shape)
                stored[f"optimizer/{key}/{name}"] = whole(value)
    return numbers


def _named(groups: list[dict[str, Any]], numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the param groups with the names of their parameters."""
    return [
        {**g, "names": [name for name, number in numbers.items() if number in g["params"]]} for g in groups
    ]


def _count(stored: Place, base: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
    """Add the step count of every parameter with states to `stored`."""
    step = step_of([*base["state"].values(), *base["param_groups"]])
    for name, number in numbers.items():
        if step is not None and number in base["state"]:
            stored[f"scalar/step/{name}"] = whole(torch.tensor(float(step)))


def _check_one_group(opened: OpenedFiles, fits: bool) -> None:
    if not fits:
        raise CheckpointError(
            f"{opened.files.model[0]} was saved at ZeRO stage 0 and does not record which state belongs to which "
            "parameter: it has several param groups, or another parameter order than the model.",
            where=str(opened.directory),
            fix="save the run at stage 1 in DeepSpeed first, or start from its weights",
        )
