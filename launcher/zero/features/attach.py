"""Attaches features to the core; only enabled features are imported."""

from __future__ import annotations

from functools import partial

from launcher.tensor.split import is_quantized
from launcher.zero.features.edits import ParameterEdits
from launcher.zero.features.handle_gradients import follow_handles
from launcher.zero.features.outside import gather_for_one_call
from launcher.zero.features.user_gradients import ClaimedLeaves, LeafElsewhere, follow_torch
from launcher.zero.flat import FlatBuffer
from launcher.zero.gradients import FlatGradient
from launcher.zero.model import ZeroModel, live_models


def attach_to_buffer(flat: FlatBuffer) -> None:
    """Attach the gather features that the policy and the axes require to a sharded buffer."""
    if not flat.sharded:
        return
    if flat.axes.secondary is not None:
        from launcher.zero.features.second_shard import SecondShard

        flat.gather_features.append(SecondShard(flat, flat.axes.secondary))
    if not _may_round(flat):
        return
    if flat.policy.quantized_frozen and not flat.trainable:
        from launcher.zero.features.quantized import QuantizedShard

        packed = QuantizedShard(flat)
        flat.packed = packed
        flat.gather_features.append(packed)
    elif flat.float8 is not None:
        from launcher.zero.features.float8 import Float8Gather

        flat.gather_features.append(Float8Gather(flat, flat.float8))
    elif flat.policy.quantized_weights:
        from launcher.zero.features.quantized import QuantizedGather

        flat.gather_features.append(QuantizedGather(flat))


def _may_round(flat: FlatBuffer) -> bool:
    """Return whether all elements are numbers that need not be exact: no integers, no bytes of quantized weights."""
    return flat.dtype.is_floating_point and not any(is_quantized(slot.leaf) for slot in flat.slots)


def attach_to_gradient(gradient: FlatGradient) -> None:
    """Attach quantised reduction, or the sum over shard groups, as the policy and the axes require."""
    if gradient.policy.quantized_gradients:
        from launcher.comm.quantized import quantized_reduce_scatter

        gradient.scatter = quantized_reduce_scatter
    if gradient.flat.axes.replicate.degree > 1:
        from launcher.zero.features.mics import GroupSum

        gradient.second_hop = GroupSum(gradient)


def attach_features(zero: ZeroModel) -> None:
    """Attach the features that the policy, the mesh and torch's own interfaces require."""
    hidden = [slot.leaf for g in zero.gradients if not g.shows for slot in g.flat.slots]
    watched = [slot.leaf for flat in zero.flats if flat.own_master for slot in flat.slots]
    zero.hooks.add_removable(ClaimedLeaves(hidden, watched))
    zero.hooks.packing.plain_types.add(LeafElsewhere)
    follow_handles(zero.hooks)
    follow_torch(live_models)
    zero.hooks.gather_for_one_call = gather_for_one_call
    if zero.policy.float8:
        from launcher.zero.features.float8 import exchange_together

        exchange_together(zero.flats)
    edits = ParameterEdits(zero.flats)
    if edits.has_work:
        zero.callbacks.before_step.append(edits.take_over)
    _attach_to_norm(zero)
    if zero.policy.checks:
        from launcher.zero.features.checks import StepChecks

        zero.checks = zero.hooks.add_removable(StepChecks(zero))
        zero.callbacks.before_norm.append(zero.checks.compare)
    if zero.policy.apply_gathers and any(unit.sharded for unit in zero.units):
        from launcher.zero.features.module_apply import GatheringApply

        zero.hooks.add_removable(GatheringApply(zero))


def _attach_to_norm(zero: ZeroModel) -> None:
    """Register the processing of reduced gradients before their norm is computed, in execution order."""
    before, shown = zero.callbacks.before_norm, [g for g in zero.gradients if g.shows]
    if zero.tp.degree > 1:
        from launcher.zero.features.copies import CopyCheck

        before.append(CopyCheck(zero.gradients, zero.axis, zero.tp).once)
    before += [gradient.sync_with_leaves for gradient in shown]
    if zero.tp.degree > 1:
        from launcher.zero.features.holders import sum_partial

        before.append(partial(sum_partial, zero.gradients, zero.tp, zero.pool.device))
    if any(gradient.flat.slots[0].holders.degree > 1 for gradient in zero.gradients):
        from launcher.zero.features.holders import sum_over_stages, use_over_stages

        before.append(partial(sum_over_stages, zero.gradients))
        zero.callbacks.merge_use.append(use_over_stages)
