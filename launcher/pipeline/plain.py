"""Serialises nests of plain data as JSON: unlike a pickle, data received from another stage cannot run code.

In addition to JSON's own types it supports tuples, dtypes, sizes, the dataclasses decorated with `travels`,
and the containers that models return: named tuples and Hugging Face's outputs, if the receiver has imported
their classes.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from launcher.comm import plain
from launcher.errors import LauncherError

_RECORDS: dict[str, type] = {}
_DICTS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda pairs: defaultdict(None, pairs),
}


def travels(kind: type) -> type:
    """Register a dataclass of plain data that stages send to each other."""
    _RECORDS[kind.__name__] = kind
    return kind


def packed(value: Any) -> Tensor:
    """Return the value as a [bytes] uint8 tensor on the CPU; `unpacked` reverses it.

    Raises:
        LauncherError: the value contains something that is not plain data.
    """
    return plain.packed(_encoded(value))


def unpacked(content: Tensor) -> Any:
    return _decoded(plain.unpacked(content))


def _encoded(value: Any) -> Any:
    kind = type(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if kind in (list, tuple, torch.Size):
        return [kind.__name__, *map(_encoded, value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if kind in _RECORDS.values():
        return ["record", kind.__name__, *(_encoded(getattr(value, each.name)) for each in fields(value))]
    if _is_named(kind):
        return ["named", kind.__module__, kind.__qualname__, *map(_encoded, value)]
    if kind.__name__ in _DICTS and isinstance(value, dict):
        return [kind.__name__, *_pairs(value)]
    if _is_output(kind):
        return ["output", kind.__module__, kind.__qualname__, *_pairs(value)]
    raise LauncherError(
        f"{kind.__module__}.{kind.__qualname__} cannot be sent between pipeline stages",
        fix="use only tensors, numbers and strings in lists, tuples, dicts or Hugging Face outputs, in "
        "batches and in the outputs of blocks",
    )


def _pairs(value: Mapping[Any, Any]) -> list[Any]:
    return [[_encoded(key), _encoded(inner)] for key, inner in value.items()]


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *inside = value
    if kind in ("list", "tuple", "Size"):
        return {"list": list, "tuple": tuple, "Size": torch.Size}[kind](map(_decoded, inside))
    if kind == "dtype" and isinstance(found := getattr(torch, inside[0], None), torch.dtype):
        return found
    if kind == "record":
        record = _RECORDS[inside[0]]
        names = [each.name for each in fields(record)]
        return record(**dict(zip(names, map(_decoded, inside[1:]), strict=True)))
    if kind in ("named", "output"):
        known, rest = _known(inside[0], inside[1], kind), inside[2:]
        return known(*map(_decoded, rest)) if kind == "named" else known(**_dict(rest))
    if kind in _DICTS:
        return _DICTS[kind](_dict(inside))
    raise ValueError(f"received {kind!r} from another stage, which is not a supported data type")


def _dict(pairs: list[Any]) -> dict[Any, Any]:
    return {_decoded(key): _decoded(inner) for key, inner in pairs}


def _known(module: str, name: str, kind: str) -> Any:
    """Return a container class that this process has already imported; never import a module."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and (_is_named(found) if kind == "named" else _is_output(found)):
        return found
    raise ValueError(
        f"received {module}.{name} from another stage, which is not a container type loaded on this rank"
    )


def _is_named(kind: type) -> bool:
    return issubclass(kind, tuple) and kind is not tuple and hasattr(kind, "_fields")


def _is_output(kind: type) -> bool:
    """Return whether a class is a Hugging Face output; False if transformers is not imported."""
    module = sys.modules.get("transformers.utils.generic")
    return module is not None and issubclass(kind, module.ModelOutput)
