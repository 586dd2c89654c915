"""Names of the files of DeepSpeed's checkpoints, for programs that write beside them. Ours have other files."""

from __future__ import annotations

from pathlib import Path


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    return str(Path(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt"))


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    return str(Path(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"))


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    return str(Path(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt"))
