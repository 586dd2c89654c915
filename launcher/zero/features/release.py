"""Releases a model from its engine, so that another engine can take it."""

from __future__ import annotations

from torch import nn

from launcher.errors import LauncherError
from launcher.zero.features.partitioned import Partitioner, is_partitioned
from launcher.zero.flat import EXACT
from launcher.zero.model import live_models
from launcher.zero.sharded_parameter import ShardedParameter
from launcher.zero.slot import ParamSlot


def release(model: nn.Module) -> None:
    """Detach a model from its engine, if it has one: remove the hooks, restore layers that were converted to
    float8, and keep sharded parameters partitioned. A collective.

    Raises:
        LauncherError: the model is split over tp or pipeline stages, so its original form cannot be restored.
    """
    earlier = [zero for zero in live_models() if any(zero.slot_of(p) is not None for p in model.parameters())]
    handles = [p for p in model.parameters() if isinstance(p, ShardedParameter) and not is_partitioned(p)]
    slots = [handle.zero_holder for handle in handles if isinstance(handle.zero_holder, ParamSlot)]
    if any(zero.pp.degree > 1 for zero in earlier) or not all(slot.split.is_whole for slot in slots):
        raise LauncherError(
            "the model was already sharded by an earlier initialize()",
            where="initialize(model=...)",
            fix="build the model again, or use the first engine",
        )
    for zero in earlier:
        zero.retire()
    for module in model.modules():
        if (restore := getattr(module, "restore_linear", None)) is not None:
            restore()
    partitioner = Partitioner()
    for flat in dict.fromkeys(slot.flat for slot in slots):
        flat.unshard(EXACT)
        flat.wait_for_unshard()
        partitioned = [(slot, partitioner.handle(slot.leaf, slot.name)) for slot in flat.slots]
        flat.reshard()
        for slot, handle in partitioned:
            slot.show(handle)
    for zero in earlier:
        zero.placements.close()
