"""Files that programs write beside a checkpoint: DeepSpeed's names for its own, and its writer of whole dicts. The
engine's checkpoints have other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    return str(Path(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"))


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    return str(Path(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt"))


class TorchCheckpointEngine:
    """Writes and reads one file with torch. Reading takes tensors and plain values only: no code runs.

    Args:
        config_params: not needed.
    """

    name = "TorchCheckpointEngine"

    def __init__(self, config_params: Any = None) -> None:
        pass

    def create(self, info: Any) -> None:
        """Nothing has to be prepared."""

    def save(self, state_dict: Any, path: str) -> None:
        torch.save(state_dict, path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=True)

    def commit(self, info: Any) -> bool:
        """True: what save() has returned from is written."""
        return True
