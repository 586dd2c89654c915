"""Runs that launcher began and exported, and that DeepSpeed resumes."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.parity_deepspeed.saves import AFTER, BEFORE, arguments_of, config_of, model_of, steps

CASES: list[dict[str, Any]] = [
    {"kind": "tied", "stage": 2, "format": "deepspeed", "theirs": 0},
    {"kind": "groups", "stage": 3, "format": "deepspeed", "theirs": 0},
    {"kind": "groups", "stage": 3, "format": "deepspeed", "theirs": 1},
    {"kind": "frozen", "stage": 1, "format": "deepspeed", "theirs": 2},
    {"kind": "tied", "stage": 0, "format": "deepspeed", "theirs": 2, "dtype": "bf16"},
    {"kind": "groups", "stage": 2, "format": "deepspeed", "theirs": 3},
    {"kind": "frozen", "stage": 3, "format": "deepspeed", "theirs": 3, "dtype": "bf16"},
    {"kind": "groups", "stage": 0, "format": "universal", "theirs": 1},
    {"kind": "plain", "stage": 3, "format": "universal", "theirs": 2, "dtype": "bf16"},
    {"kind": "tied", "stage": 1, "format": "universal", "theirs": 3},
]
CONVERTED = (2, 5)  # their numbers


def go_on(deepspeed: Any, root: Path) -> list[dict[str, Any]]:
    """Load and resume every case."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    told = []
    for number, case in enumerate(CASES):
        where = str(root / f"{number}-out")
        model = model_of(case, seed=7)  # its initial values do not matter
        config = {
            **config_of(case, dist.get_world_size(), case["theirs"]),
            "zero_force_ds_cpu_optimizer": False,
        }
        if case["format"] == "universal":
            config["checkpoint"] = {"load_universal": True}
        engine = deepspeed.initialize(model=model, config=config, **arguments_of(case, model))[0]
        _, client = engine.load_checkpoint(where)
        told.append(
            {"client": client["case"], "steps": engine.global_steps, "losses": steps(engine, BEFORE, AFTER)}
        )
        if case["format"] == "deepspeed" and case["theirs"] and dist.get_rank() == 0:
            found = get_fp32_state_dict_from_zero_checkpoint(where)
            torch.save({name: value.clone() for name, value in found.items()}, root / f"{number}-fp32.pt")
        engine.destroy()
    return told


def convert(root: Path) -> None:
    """Convert some of the exported files with DeepSpeed's own program."""
    from deepspeed.checkpoint.ds_to_universal import main

    for number in CONVERTED:
        out = root / f"{number}-theirs"
        out.mkdir()
        tag = (root / f"{number}-out" / "latest").read_text()
        paths = {"input_folder": str(root / f"{number}-out" / tag), "output_folder": str(out / tag)}
        more = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        main(Namespace(**paths, **more, inject_missing_state=True))
