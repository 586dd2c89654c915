"""Writes files as DeepSpeed lays them out, with values that are known: no DeepSpeed is needed for it.

`tests/parity_deepspeed/test_checkpoints.py` has those of the real one.
"""

from __future__ import annotations

import enum
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 7
STATES = ("exp_avg", "exp_avg_sq")


class ZeroStageEnum(enum.IntEnum):
    weights = 3
    gradients = 2


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale, self.dynamic = 1.0, False


@contextmanager
def theirs(**classes: type) -> Iterator[None]:
    """Inside, these classes are pickled as if they were of the modules of DeepSpeed's that have them."""
    homes = {ZeroStageEnum: "deepspeed.runtime.zero.config", LossScaler: "deepspeed.runtime.fp16.loss_scaler"}
    homes |= {kind: f"deepspeed.{home}" for home, kind in classes.items()}
    before = dict(sys.modules)
    kept = {kind: kind.__module__ for kind in homes}
    try:
        for kind, home in homes.items():
            sys.modules["deepspeed"] = ModuleType("deepspeed")
            module = sys.modules[home] = ModuleType(home)
            setattr(module, kind.__name__, kind)
            kind.__module__ = home
        yield
    finally:
        for kind, home in kept.items():
            kind.__module__ = home
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            if name in before:
                sys.modules[name] = before[name]
            else:
                del sys.modules[name]


def values_of(model: nn.Module, seed: int = 3) -> dict[str, Tensor]:
    """Return random master weights, moments and step counts of a model's trained parameters, as `whole_state` does."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            found[name] = parameter.detach().clone()
            continue
        found[name] = torch.randn(parameter.shape, generator=generator)
        for state in STATES:
            found[f"{state}/{name}"] = torch.rand(parameter.shape, generator=generator)
        found[f"step/{name}"] = torch.tensor(float(STEPS))
    return found


def write(
    root: Path,
    model: nn.Module,
    values: Mapping[str, Tensor],
    *,
    stage: int,
    ranks: int,
    groups: int = 1,
    sub_groups: int = 1,
    bits: torch.dtype = torch.float32,
    paddings: bool = False,
    tag: str = "global_step7",
) -> Path:
    """Write a checkpoint, and `latest`; return its directory.

    Args:
        groups: of parameters: 2 puts matrices and vectors apart.
        sub_groups: of stage 3: flat tensors of a rank.
        paddings: parameters begin at multiples of 8 elements.
    """
    directory = root / tag
    directory.mkdir(parents=True)
    (root / "latest").write_text(tag)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parted = [trained] if groups == 1 else [
        {name: p for name, p in trained.items() if (p.dim() > 1) == matrices} for matrices in (True, False)
    ]  # fmt: skip
    names = [list(group) for group in parted]
    written = _sub_groups(names, sub_groups)  # at stage 3 the model's file names them, not the param groups
    with theirs():
        for rank in range(ranks if stage == 3 else 1):
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            content = _model_state(model, values, written, stage, rank, ranks, bits)
            if not stage:
                content["optimizer"] = _whole(values, names, bits)
            torch.save(content, directory / f"{prefix}mp_rank_00_model_states.pt")
        for rank in range(ranks if stage else 0):
            made = _equal_parts if stage == 3 else _ranges
            state = made(values, names, rank, ranks, sub_groups if stage == 3 else paddings)
            state |= {"loss_scaler": LossScaler(), "dynamic_loss_scale": False, "overflow": False}
            state["zero_stage"] = ZeroStageEnum(max(2, stage))
            kind = "bf16_" if bits == torch.bfloat16 else ""
            torch.save(
                {"optimizer_state_dict": state, "ds_version": "0.19.8"},
                directory / f"{kind}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
    return directory


def _model_state(
    model: nn.Module,
    values: Mapping[str, Tensor],
    names: list[list[str]],
    stage: int,
    rank: int,
    ranks: int,
    bits: torch.dtype,
) -> dict[str, Any]:
    own = {name: values[name].to(bits) for name, _ in model.named_parameters()}
    by_tensor = {id(p): own[name] for name, p in model.named_parameters()}
    params = dict(model.named_parameters(remove_duplicate=False))
    module = OrderedDict(
        (name, by_tensor[id(params[name])] if name in params else value)
        for name, value in model.state_dict(keep_vars=True).items()
    )
    frozen = {name: own[name] for name, p in model.named_parameters() if not p.requires_grad}
    if stage == 3:
        module = OrderedDict(
            (name, torch.empty(0, dtype=bits) if name in params else v) for name, v in module.items()
        )
    aliases = {
        name: next(first for first, p in model.named_parameters() if p is params[name])
        for name in params
        if name not in dict(model.named_parameters())
    }
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    return {
        "module": module,
        "buffer_names": [name for name, _ in model.named_buffers() if name in module],
        "optimizer": None,
        "param_shapes": [OrderedDict((n, values[n].shape) for n in group) for group in names] if stage else None,
        "frozen_param_shapes": OrderedDict((n, v.shape) for n, v in frozen.items()) if stage else None,
        "frozen_param_fragments": OrderedDict(
            (n, _part(v, rank, ranks) if stage == 3 else v) for n, v in frozen.items()
        ) if stage else None,
        "shared_params": aliases if stage else None,
        "lr_scheduler": {"last_batch_iteration": STEPS - 1},
        "skipped_steps": 1, "global_steps": STEPS, "global_samples": 8 * STEPS,
        "dp_world_size": ranks, "mp_world_size": 1, "ds_version": "0.19.8",
        "ds_config": {"gradient_accumulation_steps": 2, "optimizer": optimizer},
        "epoch": 4, "best": {"loss": 1.5},
    }  # fmt: skip


def _part(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """Return one of as many equal parts as there are ranks; the last ones are filled up with zeros."""
    each = -(-tensor.numel() // ranks)
    padded = torch.zeros(each * ranks, dtype=tensor.dtype)
    padded[: tensor.numel()] = tensor.flatten()
    return padded[rank * each : (rank + 1) * each].clone()


def _group(numbers: list[int]) -> dict[str, Any]:
    """Return the options of DeepSpeed's FusedAdam."""
    options = {"lr": 0.005, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    return {**options, "step": 0, "params": numbers}


def _sub_groups(names: list[list[str]], count: int) -> list[list[str]]:
    """Return so many equal parts of the only group; or the groups."""
    if count == 1:
        return names
    (flat,) = names
    each = -(-len(flat) // count)
    return [flat[at : at + each] for at in range(0, len(flat), each)]


def _base(flats: Mapping[str, list[Tensor]], groups: int) -> dict[str, Any]:
    count = len(next(iter(flats.values())))
    states = {n: {"step": STEPS, **{state: flats[state][n] for state in STATES}} for n in range(count)}
    numbers = [[number] for number in range(groups)] if groups > 1 else [list(range(count))]
    return {"state": states, "param_groups": [_group(own) for own in numbers]}


def _equal_parts(
    values: Mapping[str, Tensor], names: list[list[str]], rank: int, ranks: int, sub_groups: int
) -> dict[str, Any]:
    subs = _sub_groups(names, sub_groups)

    def of(key: str) -> list[Tensor]:
        return [torch.cat([_part(values[f"{key}{name}"], rank, ranks) for name in sub]) for sub in subs]

    base = _base({state: of(f"{state}/") for state in STATES}, len(names))
    return {"partition_count": ranks, "fp32_flat_groups": of(""), "optimizer_state_dict": base}


def _ranges(
    values: Mapping[str, Tensor], names: list[list[str]], rank: int, ranks: int, paddings: bool
) -> dict[str, Any]:
    pads = [[-values[name].numel() % 8 if paddings else 0 for name in group] for group in names]

    def of(key: str) -> list[Tensor]:
        flats = []
        for group, after in zip(names, pads, strict=True):
            parts = [
                torch.cat([values[f"{key}{n}"].flatten(), torch.zeros(p)])
                for n, p in zip(group, after, strict=True)
            ]
            whole = torch.cat(parts)
            each = math.ceil(whole.numel() / (2 * ranks)) * 2  # the last one is written without its padding
            flats.append(whole[rank * each : (rank + 1) * each].clone())
        return flats

    return {
        "base_optimizer_state": _base({state: of(f"{state}/") for state in STATES}, len(names)),
        "single_partition_of_fp32_groups": of(""),
        "partition_count": [ranks] * len(names),
        "group_paddings": [0] * len(names),
        **({"param_alignment_paddings": pads} if paddings else {}),
    }


def _whole(values: Mapping[str, Tensor], names: list[list[str]], bits: torch.dtype) -> dict[str, Any]:
    """The optimizer of stage 0: by parameter in fp32, flat in 16 bits."""
    flat = [name for group in names for name in group]
    options = [_group(list(range(len(flat))))]
    if bits == torch.float32:
        states = {
            n: {
                "step": STEPS if n == len(flat) - 1 else 0,
                **{state: values[f"{state}/{name}"] for state in STATES},
            }
            for n, name in enumerate(flat)
        }
        return {"state": states, "param_groups": options}
    joined = {
        key: torch.cat([values[f"{key}{name}"].flatten() for name in flat])
        for key in ("", "exp_avg/", "exp_avg_sq/")
    }
    state = {"step": STEPS, "exp_avg": joined["exp_avg/"], "exp_avg_sq": joined["exp_avg_sq/"]}
    base = {"state": {0: state}, "param_groups": [_group([0])]}
    return {"optimizer_state_dict": base, "fp32_groups_flat": [joined[""]], "clip_grad": 1.0}
