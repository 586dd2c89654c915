"""Reads DeepSpeed's files without running code from them, and without DeepSpeed.

The files are pickles of torch.save. Tensors and plain values are read; DeepSpeed's objects become inert
stand-ins that hold their pickled arguments and attributes. Any other class is refused, with its name.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, is_zipfile

import torch

from launcher.errors import CheckpointError

_UNKNOWN = re.compile(
    r"GLOBAL (\S+) was not an allowed global|Unsupported (?:class|global|operand)[: ]+(?!GLOBAL)(\S+)"
)


class StandIn:
    """Stand-in for a DeepSpeed object: holds its constructor arguments and attributes."""

    def __init__(self, *args: Any) -> None:
        self.args = args


_CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.zero.stage_1_and_2.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)


def load(path: Path) -> dict[str, Any]:
    """Return the content of a file that holds a dict; see `load_any`."""
    content = load_any(path)
    if not isinstance(content, dict):
        raise _damaged(path, TypeError(f"it contains a {type(content).__name__}, not a dict"))
    return content


def load_any(path: Path, inert: str = "(?!)") -> Any:
    """Return the content of a file; its tensors stay on disk until they are read.

    Args:
        inert: pattern of the names of classes whose objects become stand-ins, in addition to DeepSpeed's.

    Raises:
        CheckpointError: the file is damaged, or contains an object of an unexpected class.
    """
    names = list(_CLASSES)
    while True:
        kinds: list[Any] = [(type("StandIn", (StandIn,), {}), name) for name in names]
        try:
            with torch.serialization.safe_globals(kinds):
                return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        except pickle.UnpicklingError as error:
            name = _unknown(error)
            if name is None or name in names or not re.match(inert, name):
                raise _refused(path, name, error) from error
            names.append(name)
        except (
            OSError,
            RuntimeError,
            ValueError,
            EOFError,
            BadZipFile,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise _damaged(path, error) from error


def _unknown(error: Exception) -> str | None:
    """Return the name of the class that the unpickler refused."""
    found = _UNKNOWN.search(str(error))
    return next(filter(None, found.groups())).rstrip(".,") if found else None


def _refused(path: Path, name: str | None, error: Exception) -> CheckpointError:
    if name is not None:
        return CheckpointError(
            f"{path} contains an object of class {name}, which is not loaded: unpickling objects can run code.",
            where=str(path),
            fix="if you trust the file, load it where that class is available, remove the object, and save it again",
        )
    what = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
    return CheckpointError(
        f"{path} does not consist of tensors and plain values only, so it is not loaded: {what}",
        where=str(path),
        fix="it is damaged, or contains objects, which can run code; copy it again from a trusted source",
    )


def plain(value: Any) -> bool:
    """Return whether a value consists of numbers, strings and containers, which a meta can hold."""
    if isinstance(value, dict):
        return all(plain(key) and plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return CheckpointError(
        f"{path} cannot be read: {reason}",
        where=str(path),
        fix="the file is incomplete or damaged; copy it again, or load another checkpoint (tag)",
    )
