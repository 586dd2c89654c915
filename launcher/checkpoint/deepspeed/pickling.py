"""Writes files that contain DeepSpeed objects without importing DeepSpeed: a pickle only names the class."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from launcher.checkpoint.durable import DurableFile, temporary_file

_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


def _named(module: str, name: str, attributes: dict[str, Any]) -> Any:
    """Return an object of a class that cannot be imported.

    Args:
        module, name: module and name of the class.
        attributes: attributes of the object.
    """
    kind = type(name, (), {"__module__": module})
    made = kind()
    vars(made).update(attributes)
    return made


class _Pickler(pickle._Pickler):
    """Pickles DeepSpeed's classes by name; the C pickler does this only for classes that can be imported."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if getattr(obj, "__module__", "").partition(".")[0] != "deepspeed":
            super().save_global(obj, name)  # type: ignore[misc]
            return
        self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__name__}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


def save(content: Any, path: Path) -> None:
    """Write a file as torch.save does; it gets its final name when it is complete."""
    module = SimpleNamespace(Pickler=_Pickler, __name__="pickle")
    with temporary_file(path) as unfinished, DurableFile(unfinished) as file:
        torch.save(content, file, pickle_module=module)
        file.finish()


def fragment(start: int, count: int) -> Any:
    """Return DeepSpeed's object for the location of a parameter in a flat tensor, in elements."""
    return _named("deepspeed.utils.tensor_fragment", "fragment_address", {"start": start, "numel": count})


def loss_scaler(state: dict[str, Any], fp16: dict[str, Any]) -> Any:
    """Return DeepSpeed's loss scaler.

    Args:
        state: state of launcher's loss scaler.
        fp16: the `fp16` section of the JSON config.
    """
    if not state["dynamic"]:
        return _named(_SCALERS, "LossScaler", {"cur_scale": state["scale"], "dynamic": False})
    hysteresis = int(fp16.get("hysteresis", 2))
    return _named(
        _SCALERS,
        "DynamicLossScaler",
        {
            "cur_scale": state["scale"],
            "cur_iter": state["step"],
            "last_overflow_iter": state["last_overflow"],
            "cur_hysteresis": state["tolerance"],
            "delayed_shift": hysteresis,
            "scale_factor": 2.0,
            "scale_window": int(fp16.get("loss_scale_window", 1000)),
            "min_scale": float(fp16.get("min_loss_scale", 1)),
            "consecutive_hysteresis": bool(fp16.get("consecutive_hysteresis", False)),
            "raise_error_at_min_scale": True,
            "dynamic": True,
            "dtype": torch.float16,
        },
    )
