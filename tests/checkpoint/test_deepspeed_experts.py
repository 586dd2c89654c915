"""DeepSpeed checkpoints of models with its expert layers."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.checkpoint.deepspeed.content import open_content
from launcher.errors import CheckpointError
from launcher.models.stacked_names import stacked_name
from tests.checkpoint.deepspeed_files import STATES, STEPS, _ranges, theirs
from tests.checkpoint.test_deepspeed import assembled

LAYERS = {"first": 4, "second": 2}  # how many experts each has
SHAPES = {"fc.weight": (3, 5), "fc.bias": (3,)}
DENSE = {"head.weight": (5, 3), "first.deepspeed_moe.gate.wg.weight": (4, 5)}
WORLD = 4


def expert_name(layer: str, expert: int, name: str) -> str:
    return f"{layer}.deepspeed_moe.experts.deepspeed_experts.{expert}.{name}"


EXPERTS = {
    expert_name(layer, expert, name): shape
    for layer, count in LAYERS.items()
    for expert in range(count)
    for name, shape in SHAPES.items()
}


def values() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        f"{key}{name}": torch.randn(shape)
        for name, shape in (DENSE | EXPERTS).items()
        for key in ("", *(f"{state}/" for state in STATES))
    }


def of_rank(rank: int, degree: int, *, local: bool) -> dict[str, str]:
    """Return a rank's name of an expert tensor -> its name in the model."""
    return {
        expert_name(layer, number - local * rank * count // degree, name): expert_name(layer, number, name)
        for layer, count in LAYERS.items()
        for number in range(rank * count // degree, (rank + 1) * count // degree)
        for name in SHAPES
    }


def write(directory: Path, made: dict[str, Tensor], stage: int, degree: int) -> None:
    directory.mkdir()
    shapes = [
        OrderedDict((name, torch.Size(shape)) for name, shape in DENSE.items()),
        OrderedDict((name, torch.Size(EXPERTS[name])) for name in of_rank(0, degree, local=True)),
    ]
    model = {
        "module": {name: made[name] for name in DENSE}, "buffer_names": [], "optimizer": None,
        "param_shapes": shapes if stage else None, "global_steps": STEPS, "global_samples": 1, "dp_world_size": WORLD,
        "num_experts": list(LAYERS.values()), "ds_version": "0.19.8",
    }  # fmt: skip
    torch.save(model, directory / "mp_rank_00_model_states.pt")
    for number, (layer, count) in enumerate(LAYERS.items()):
        for expert in range(count):
            names = [expert_name(layer, expert, name) for name in SHAPES]
            path = directory / f"layer_{number}_expert_{expert}_mp_rank_00_model_states.pt"
            torch.save({name: made[name] for name in names}, path)
    if not stage:
        for rank in range(degree):
            names = [*DENSE, *of_rank(rank, degree, local=False).values()]
            path = directory / f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer": _whole(made, names)}, path)
        return
    with theirs():
        for rank in range(WORLD):
            torch.save(
                {"optimizer_state_dict": _part(made, rank, degree)},
                directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )


def _groups() -> list[dict[str, Any]]:
    return [{"lr": 0.1, "name": "dense-params"}, {"lr": 0.1, "name": "ep_size_2", "moe": True}]


def _whole(made: dict[str, Tensor], names: list[str]) -> dict[str, Any]:
    states = {
        number: {"step": torch.tensor(float(STEPS)), **{s: made[f"{s}/{name}"] for s in STATES}}
        for number, name in enumerate(names)
    }
    numbers = list(range(len(names)))
    parted = [numbers[: len(DENSE)], numbers[len(DENSE) :]]
    groups = [{**group, "params": params} for group, params in zip(_groups(), parted, strict=True)]
    return {"state": states, "param_groups": groups}


def _part(made: dict[str, Tensor], rank: int, degree: int) -> dict[str, Any]:
    """All ranks share the first group; ranks with the same experts share the second."""
    dense = _ranges(made, [list(DENSE)], rank, WORLD, False)
    names = list(of_rank(rank % degree, degree, local=False).values())
    own = _ranges(made, [names], rank // degree, WORLD // degree, False)
    states = [part["base_optimizer_state"]["state"][0] for part in (dense, own)]
    groups = [{**group, "params": [number]} for number, group in enumerate(_groups())]
    masters = [part["single_partition_of_fp32_groups"][0] for part in (dense, own)]
    return {
        "base_optimizer_state": {"state": dict(enumerate(states)), "param_groups": groups},
        "single_partition_of_fp32_groups": masters,
        "partition_count": [WORLD, WORLD // degree],
    }


@pytest.mark.parametrize(("stage", "degree"), [(0, 2), (1, 1), (1, 2)])
def test_experts_of_a_layer_are_one_tensor(tmp_path: Path, stage: int, degree: int) -> None:
    made = values()
    write(tmp_path / "tag", made, stage, degree)
    got = assembled(tmp_path / "tag")
    for key in ("", *(f"{state}/" for state in STATES)):
        for name in DENSE:
            assert torch.equal(got[f"{key}{name}"], made[f"{key}{name}"])
        for layer, count in LAYERS.items():
            for name in SHAPES:
                want = torch.stack([made[f"{key}{expert_name(layer, n, name)}"] for n in range(count)])
                assert torch.equal(got[f"{key}{stacked_name(expert_name(layer, 0, name))}"], want)
    assert stacked_name(expert_name("first", 2, "fc.weight")) == "first.deepspeed_moe.experts.fc__weight"
    names = open_content(tmp_path / "tag").meta["optimizer"]["names"]
    assert names == [list(DENSE), list(dict.fromkeys(map(stacked_name, EXPERTS)))]


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    for number, (stage, name, told) in enumerate(
        [
            (1, "layer_0_expert_2_mp_rank_00_model_states.pt", "layer_0_expert_2"),
            (1, "layer_1_expert_1_mp_rank_00_model_states.pt", "layer_1_expert_1"),
            (0, "layer_0_expert_1_mp_rank_00_model_states.pt", "layer_0_expert_1"),
            (0, "expp_rank_0_mp_rank_00_optim_states.pt", "expp_rank_0"),
            (0, "expp_rank_1_mp_rank_00_optim_states.pt", "expp_rank_1"),
            (1, "zero_pp_rank_2_mp_rank_00_optim_states.pt", "zero_pp_rank_2"),
        ]
    ):
        directory = tmp_path / str(number)
        write(directory, values(), stage, 2)
        (directory / name).unlink()
        with pytest.raises(CheckpointError, match=told):
            open_content(directory)
