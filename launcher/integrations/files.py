"""DeepSpeed's checkpoint file names and single-file writer, for programs that handle such files themselves.

The engine's own checkpoints consist of other files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from launcher.errors import CheckpointError
from launcher.integrations.refused import NotHere, missing

MODEL_FILES, OPTIMIZER_FILES = "*_model_states.pt", "*_optim_states.pt"
FIRST_MODEL_FILE = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""For stages 1 and 2, and for stage 3."""


class NoSuchFiles(CheckpointError, FileNotFoundError):
    """A directory contains no DeepSpeed checkpoint files."""


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    return str(Path(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"))


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    return str(Path(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt"))


def get_checkpoint_files(checkpoint_dir: str, glob_pattern: str) -> list[str]:
    """Return the paths of matching files, sorted with the numbers in their names compared as numbers.

    Raises:
        NoSuchFiles: no file matches.
    """
    found = [str(path) for path in Path(checkpoint_dir).glob(glob_pattern)]
    if not found:
        raise NoSuchFiles(
            f"no files match {glob_pattern}",
            where=str(checkpoint_dir),
            fix="pass the directory of a single checkpoint written by DeepSpeed; a checkpoint of this engine has "
            "different files: use engine.load_checkpoint() or get_fp32_state_dict_from_zero_checkpoint()",
        )
    return sorted(found, key=_by_number)


def _by_number(path: str) -> list[tuple[bool, int, str]]:
    return [
        (not part.isdigit(), int(part or 0) if part.isdigit() else 0, part)
        for part in re.split(r"(\d+)", path)
    ]


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """Return the files with the optimizer's state, in the order of the ranks that wrote them."""
    return get_checkpoint_files(checkpoint_dir, OPTIMIZER_FILES)


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """Return the files with the model's state."""
    return get_checkpoint_files(checkpoint_dir, MODEL_FILES)


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """Return the first file with the model's state."""
    return get_checkpoint_files(checkpoint_dir, FIRST_MODEL_FILE[zero_stage == 3])[0]


class TorchCheckpointEngine:
    """Writes and reads one file with torch. Only tensors and plain values are loaded, so no code is executed.

    Args:
        config_params: unused.
    """

    name = "TorchCheckpointEngine"

    def __init__(self, config_params: Any = None) -> None:
        pass

    def create(self, info: Any) -> None:
        """Do nothing: there is nothing to prepare."""

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info: Any) -> bool:
        """Return True: save() returns only after the file is written."""
        return True


class MegatronSDLoader:
    """DeepSpeed's loader of Megatron checkpoints for inference; instantiating it is an error.

    The class exists because scripts override its check.
    """

    def __init__(self, *unused: Any, **keywords: Any) -> None:
        what, how = missing("runtime.state_dict_factory.MegatronSDLoader")
        raise NotHere(what, **how)

    def sanity_check(self, ckpt_file_name: str) -> None:
        """Do nothing."""
