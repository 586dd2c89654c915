"""States of stage 0, where DeepSpeed saves the optimizer as it is: by parameter in fp32, flat in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.deepspeed.layout import ranges, whole
from launcher.checkpoint.deepspeed.opened import OpenedFiles, States, step_of
from launcher.checkpoint.deepspeed.sharded import Place, is_flat, place
from launcher.errors import CheckpointError


def unsharded(opened: OpenedFiles) -> tuple[Place, States, list[dict[str, Any]]]:
    """Return (states and step counts, and master weights of 16 bits; the states as they are; options of the groups).

    The file does not say which parameters are in which group. With one group they are those of the model, in its order;
    anything else is refused.
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
        places = [number for group in groups for number in group["params"]]
        _check_one_group(opened, (len(groups) == 1 or bool(opened.groups)) and len(places) == len(names))
        numbers = dict(zip(names, places, strict=True))
        for name, number in numbers.items():
            for key, value in states.get(number, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    _check_one_group(opened, value.shape == opened.module[name].shape)
                    stored[f"optimizer/{key}/{name}"] = whole(value)
    step = step_of([*states.values(), *groups])
    for name, number in numbers.items():
        if step is not None and number in states:
            stored[f"scalar/step/{name}"] = whole(torch.tensor(float(step)))
    return stored, states, groups


def _check_one_group(opened: OpenedFiles, fits: bool) -> None:
    if not fits:
        raise CheckpointError(
            f"{opened.files.model[0]} was written at stage 0, and does not say which state belongs to which parameter: "
            "several param groups, or another order than the model's.",
            where=str(opened.directory),
            fix="save the run at stage 1 in DeepSpeed first, or start from its weights",
        )
