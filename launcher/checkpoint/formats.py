"""Reads each checkpoint in its format: launcher's own, DeepSpeed's (`deepspeed/`), or FSDP2's (`fsdp.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import Metadata, StorageReader

from launcher.checkpoint.checksums import check_blocks
from launcher.checkpoint.deepspeed.files import is_deepspeed
from launcher.checkpoint.meta_file import read_meta
from launcher.checkpoint.names import are_torchtitan, fsdp_directories
from launcher.checkpoint.reader import SafeReader
from launcher.errors import CheckpointError


def foreign_meta(where: Path) -> dict[str, Any] | None:
    """Return the meta of a checkpoint of another program; None if it is launcher's own."""
    if is_deepspeed(where):
        from launcher.checkpoint.deepspeed.content import open_content

        return open_content(where).meta
    if fsdp_directories(where):
        from launcher.checkpoint.fsdp import open_fsdp

        return open_fsdp(where).meta
    return None


def is_torchtitan(where: Path) -> bool:
    """Return whether a checkpoint has the parameter names of torchtitan's models."""
    if not fsdp_directories(where):
        return False
    from launcher.checkpoint.fsdp import open_fsdp

    return are_torchtitan(open_fsdp(where).metadata.state_dict_metadata)


def refuse_torchtitan(where: Path) -> None:
    """Raise an error with instructions if a checkpoint has torchtitan's parameter names.

    Raises:
        CheckpointError: it is torchtitan's.
    """
    if is_torchtitan(where):
        raise CheckpointError(
            f"{where} is a torchtitan checkpoint, whose parameters have other names; it cannot be loaded directly.",
            where=str(where),
            fix=f"convert it with `launch import {where} OUT --model M`, then load OUT",
        )


def check_bytes(where: Path, share: int, shares: int) -> None:
    """Verify the checksums of a checkpoint, or of share number `share` out of `shares`.

    Raises:
        CheckpointError: a checksum is wrong.
    """
    if is_deepspeed(where):
        from launcher.checkpoint.deepspeed import reader

        reader.check_bytes(where, share, shares)
    elif fsdp_directories(where):
        from launcher.checkpoint import fsdp

        fsdp.check_bytes(where, share, shares)
    else:
        check_blocks(where, read_meta(where).files, share, shares)


def reader_of(where: Path, metadata: Metadata) -> StorageReader:
    """Return the storage reader for a checkpoint."""
    if is_deepspeed(where):
        from launcher.checkpoint.deepspeed.reader import DeepSpeedReader

        return DeepSpeedReader(where)
    return SafeReader(where, metadata)


def close(where: Path) -> None:
    """Release the files of a checkpoint after loading."""
    if is_deepspeed(where):
        from launcher.checkpoint.deepspeed.content import close_content

        close_content()
