"""ZeRO stages 0-3 on flat buffers, with one code path for all stages."""

from __future__ import annotations

from typing import Any

from launcher.zero.apply import apply
from launcher.zero.axes import ShardAxes
from launcher.zero.features.leaf import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
)
from launcher.zero.features.partitioned import PartitionedInit, PartitionedValues, is_partitioned
from launcher.zero.features.release import release
from launcher.zero.layout import LocalModel, ShardLayout
from launcher.zero.model import ZeroModel
from launcher.zero.policy import ZeroPolicy
from launcher.zero.sharded_parameter import ShardedParameter
from launcher.zero.slot import ParamSlice
from launcher.zero.source import MadeOnMeta, ModelValues, ParamSource, StoredValues

__all__ = [
    "GatheredParameters",
    "Init",
    "LocalModel",
    "MadeOnMeta",
    "ModelValues",
    "ParamSlice",
    "ParamSource",
    "PartitionedInit",
    "PartitionedValues",
    "ShardAxes",
    "ShardLayout",
    "ShardedParameter",
    "StoredValues",
    "ZeroModel",
    "ZeroPolicy",
    "apply",
    "get_z3_leaf_modules",
    "is_partitioned",
    "release",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
]


def __getattr__(name: str) -> Any:
    if name not in ("GatheredParameters", "Init"):
        raise AttributeError(f"module 'launcher.zero' has no attribute {name!r}")
    from launcher.zero.features import context

    return getattr(context, name)
