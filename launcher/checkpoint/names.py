"""The names of files and directories in a directory of checkpoints, for those that only look."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

LATEST_FILE = "latest"
UNIVERSAL_FILE = "latest_universal"
"""Written by DeepSpeed's `ds_to_universal`, which leaves `latest` as it is."""
META_FILE = "meta.json"
TMP, OLD = ".tmp-", ".old-"
"""Prefixes of the tag while a save is under way (or was killed), and of what the save replaces."""
METADATA_FILE = ".metadata"
"""torch.distributed.checkpoint's, of what lies in which of its files."""
COMMON_FILE, BACKEND_FILE = "common.pt", "metadata.json"
"""Megatron-Core's, beside `.metadata`."""
ITERATION_FILE = "latest_checkpointed_iteration.txt"
"""Megatron's `latest`."""
OF_ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
"""Directories of model and optimizer where accelerate wrote them with FSDP2."""


DCP, TORCHTITAN = "torch.distributed.checkpoint", "torchtitan"
"""Writers of checkpoints, as an engine's meta has them."""


def is_megatron(path: Path) -> bool:
    """Return whether a directory is one checkpoint in Megatron-Core's torch_dist format."""
    return all((path / name).is_file() for name in (METADATA_FILE, COMMON_FILE, BACKEND_FILE))


def are_torchtitan(names: Iterable[str]) -> bool:
    """Return whether a checkpoint has the names of torchtitan's models."""
    known = [name for name in names if name.startswith("model/")]
    return "model/tok_embeddings.weight" in known and any(".attention." in name for name in known)


def fsdp_directories(path: Path) -> list[Path]:
    """Return where torch.distributed.checkpoint's files are of a checkpoint that is not launcher's own; [] where it is
    none."""
    if (path / META_FILE).exists() or is_megatron(path):
        return []
    if (path / METADATA_FILE).is_file():
        return [path]
    model, optimizer = (path / name for name in OF_ACCELERATE)
    found = [place for place in (model, optimizer) if (place / METADATA_FILE).is_file()]
    return found if model in found else []
