"""Extracts a checkpoint's weights in fp32, in one process: DeepSpeed's `zero_to_fp32`.

python zero_to_fp32.py CHECKPOINTS OUTPUT [--tag TAG]      (`SCRIPT`, stored next to the checkpoints)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launcher.checkpoint import store, tags
from launcher.checkpoint.durable import temporary_file
from launcher.checkpoint.export import write_safetensors
from launcher.checkpoint.reader import read_metadata
from launcher.checkpoint.source import SourceCheckpoint
from launcher.comm.plain import decode
from launcher.errors import LauncherError
from launcher.models.stacked_names import all_apart
from launcher.sizes import bytes_of

SCRIPT = """\
#!{python}
\"\"\"Export fp32 weights of the checkpoints in this directory: zero_to_fp32.py CHECKPOINTS OUTPUT [--tag TAG]\"\"\"

import sys

from launcher.checkpoint.fp32 import main

sys.exit(main())
"""
SCRIPT_NAME = "zero_to_fp32.py"
KINDS = ("model/", "buffer/")


def write_script(directory: Path) -> None:
    """Write the script next to the checkpoints in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)  # a background save may not have created it yet
    path = directory / SCRIPT_NAME
    path.write_text(SCRIPT.format(python=sys.executable))
    path.chmod(0o755)


def write_weights(stored: SourceCheckpoint, out: Path) -> None:
    """Write the parameters in fp32 as safetensors, holding one in memory at a time."""
    fetched = {name: partial(stored.tensor, f"model/{name}", torch.float32) for name in stored.shapes}
    write_safetensors(out, [(name, torch.float32, stored.shapes[name], get) for name, get in fetched.items()])


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, **others: Any
) -> dict[str, Tensor]:
    """Return a checkpoint's unsharded parameters (fp32) and persistent buffers.

    A tied parameter appears under each of its names, as one tensor. Not collective, like everything in this
    file: one rank may call it alone, or all of them.

    Args:
        checkpoint_dir, tag: the checkpoint; default tag: the latest.
        others: DeepSpeed's other arguments, ignored. Parameters excluded from the save are not returned.

    Raises:
        CheckpointError: the checkpoint does not exist or is corrupted.
    """
    state, tied = _stored(Path(checkpoint_dir), tag)
    return state | {other: state[name] for other, name in tied.items() if name in state}


def _stored(directory: Path, tag: str | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (the tensors, each tied one once; {other name of a tied tensor: its name in the checkpoint})."""
    tag, meta = store.load_meta(directory, tag)
    entries = read_metadata(tags.tag_path(directory, tag)).state_dict_metadata.items()
    found = {
        name: torch.empty(entry.size, dtype=_dtype(name, entry.properties.dtype))
        for name, entry in entries
        if isinstance(entry, TensorStorageMetadata) and name.startswith(KINDS)
    }
    store.load(directory, tag, found, strict=False, local=True)
    state = all_apart({name.partition("/")[2]: value for name, value in found.items()})
    return state, decode(meta.get("tied", {}))  # older checkpoints do not record ties


def _dtype(name: str, stored: torch.dtype) -> torch.dtype:
    return torch.float32 if name.startswith("model/") and stored.is_floating_point else stored


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | float = 5e9,
    safe_serialization: bool = False,
    tag: str | None = None,
    **others: Any,
) -> None:
    """Write the fp32 parameters and buffers to files that from_pretrained reads.

    Args:
        max_shard_size: maximum size of a safetensors file, in bytes or as "5GB".
        safe_serialization: write safetensors; False writes one pickle, pytorch_model.bin.
    """
    directory = Path(output_dir)
    if safe_serialization:
        state, _ = _stored(Path(checkpoint_dir), tag)  # from_pretrained ties them again
        entries = [(name, t.dtype, tuple(t.shape), partial(_same, t)) for name, t in state.items()]
        write_safetensors(directory, entries, bytes_of(max_shard_size))
        return
    directory.mkdir(parents=True, exist_ok=True)
    with temporary_file(directory / "pytorch_model.bin") as path:
        torch.save(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), path)


def _same(value: Tensor) -> Tensor:
    return value


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load a checkpoint's weights into a plain model, on the CPU; return the model."""
    model.to("cpu").load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False
    )
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line of `zero_to_fp32.py`, with DeepSpeed's arguments; return the exit code."""
    parser = argparse.ArgumentParser(description="Export the weights of a checkpoint in fp32.")
    parser.add_argument("checkpoint_dir", help="directory that contains `latest` and global_step*")
    parser.add_argument("output_dir", help="output directory")
    parser.add_argument("--max_shard_size", default="5GB", help="maximum size of a file (default: 5GB)")
    parser.add_argument(
        "--safe_serialization", action="store_true", help="write safetensors instead of a pickle"
    )
    parser.add_argument("-t", "--tag", help="tag of the checkpoint (default: the latest)")
    flags = parser.parse_args(argv)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            flags.checkpoint_dir,
            flags.output_dir,
            flags.max_shard_size,
            flags.safe_serialization,
            flags.tag,
        )
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":  # programs copy this file next to their checkpoints, as they do with DeepSpeed's
    sys.exit(main())
