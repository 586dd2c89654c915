"""Names of the files and directories in a directory of checkpoints, without the code that reads them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

LATEST_FILE = "latest"
UNIVERSAL_FILE = "latest_universal"
"""Written by DeepSpeed's `ds_to_universal`, which leaves `latest` as it is."""
META_FILE = "meta.json"
TMP, OLD = ".tmp-", ".old-"
"""Prefixes of the tag during a save (or after a killed one), and of the checkpoint that the save replaces."""
METADATA_FILE = ".metadata"
"""torch.distributed.checkpoint's index of which file contains which tensors."""
COMMON_FILE, BACKEND_FILE = "common.pt", "metadata.json"
"""Megatron-Core's files next to `.metadata`."""
ITERATION_FILE = "latest_checkpointed_iteration.txt"
"""Megatron's counterpart of `latest`."""
OF_ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
"""Directories that accelerate writes the model and the optimizer to with FSDP2."""


DCP, TORCHTITAN = "torch.distributed.checkpoint", "torchtitan"
"""Names of the programs that wrote a checkpoint: values of `writer` in the meta."""


def is_megatron(path: Path) -> bool:
    """Return whether a directory is a single checkpoint in Megatron-Core's torch_dist format."""
    return all((path / name).is_file() for name in (METADATA_FILE, COMMON_FILE, BACKEND_FILE))


def are_torchtitan(names: Iterable[str]) -> bool:
    """Return whether tensor names are those of torchtitan's models."""
    known = [name for name in names if name.startswith("model/")]
    return "model/tok_embeddings.weight" in known and any(".attention." in name for name in known)


def fsdp_directories(path: Path) -> list[Path]:
    """Return the directories with torch.distributed.checkpoint's files of another program's checkpoint.

    [] if `path` is launcher's own checkpoint, Megatron-Core's, or none.
    """
    if (path / META_FILE).exists() or is_megatron(path):
        return []
    if (path / METADATA_FILE).is_file():
        return [path]
    model, optimizer = (path / name for name in OF_ACCELERATE)
    found = [place for place in (model, optimizer) if (place / METADATA_FILE).is_file()]
    return found if model in found else []
