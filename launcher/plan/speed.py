"""The predicted step time of a layout: computation, memory traffic, and communication over each link.

The predictions were compared with published runs of other programs (docs/plan.md), but with no run of this
launcher on GPUs.

    compute         products at a share of the device's peak; other operations at a share of memory bandwidth
    tp              4 all-reduces of tokens x hidden per block and microbatch; 2 more for recomputed blocks
    pipeline        the schedule's own actions, simulated with the costs of the stages as a run cuts them
    cp              all-to-alls around attention (heads for tokens): queries, keys, values and outputs
    experts         dispatch and combine of tokens x experts per token, times expert_load on the busiest rank
    data            volumes of ZeRO (arXiv 1910.02054, section 7), over the slowest link between the dp ranks

Collectives are rings. Ranks are ordered as in `comm/mesh.py`: tp is the innermost axis, then cp, dp and pp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from launcher.monitor.devices import Device
from launcher.pipeline.schedules import schedule as schedule_of
from launcher.pipeline.timeline.bubble import bubble_time
from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate
from launcher.plan.layout import Layout
from launcher.plan.microbatch import LATENCY, Microbatch, bandwidth, message, microbatch_time, ring
from launcher.plan.stages import StageLoad, StageLoads, stage_loads
from launcher.plan.work import ModelWork

STEP_BYTES = (
    34  # memory traffic per parameter: reads gradient and three states, writes states and parameter; the norm
)
ENOUGH = 4  # microbatches per stage; more of them do not add idle time


@dataclass(frozen=True)
class StepTime:
    """Breakdown of the seconds of a step; the total is their sum.

    Args:
        compute: products and other operations, without communication.
        recompute: recomputed forwards.
        tp: all-reduces of tensor parallelism.
        cp: all-to-alls of context parallelism.
        experts: dispatch and combine of expert parallelism.
        bubble: pipeline bubble, including transfers between stages.
        data: gathers and reductions of ZeRO that do not overlap with computation.
        optimizer: optimizer step, including transfers to and from the host with offload.
    """

    compute: float
    recompute: float
    tp: float
    cp: float
    experts: float
    bubble: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def step_time(
    work: ModelWork, layout: Layout, device: Device, per_node: int, *, exact: bool = False
) -> StepTime:
    """Return the predicted step time. If stages are uneven, all parts but the bubble are of the busiest rank.

    Args:
        per_node: ranks per node.
        exact: simulate the schedule's actions; else use a closed form or an approximation of the bubble.
    """
    loads = stage_loads(work, layout)
    micro = microbatch_time(work, layout, device, per_node, loads.busiest[1])
    number = layout.accumulation
    passes = 3 if layout.recompute else 2
    return StepTime(
        compute=number * (2 * micro.products + micro.weight + 3 * micro.traffic),
        recompute=number * micro.recomputed,
        tp=number * passes * micro.reduces,
        cp=number * passes * micro.exchanges,
        experts=number * passes * micro.sends,
        bubble=_bubble(work, layout, device, per_node, loads, exact=exact),
        data=_data(work, layout, device, per_node, micro),
        optimizer=_optimizer(work, layout, device),
    )


def flops_per_rank(work: ModelWork, layout: Layout, seconds: float, *, recomputed: bool = False) -> float:
    """Return the FLOP/s per rank of a step of `seconds`; `recomputed` includes recomputed forwards."""
    again = work.flops - work.end_flops if recomputed and layout.recompute else 0.0
    sequences = layout.micro * layout.accumulation * layout.dp
    return ((2 + work.weight_share) * work.flops + again) * sequences / seconds / layout.world


def _bubble(
    work: ModelWork, layout: Layout, device: Device, per_node: int, loads: StageLoads, *, exact: bool
) -> float:
    """Return the idle time of the busiest rank."""
    if layout.pp == 1:
        return 0.0
    if not exact:
        mean = StageLoad(
            work.flops / layout.pp, work.end_flops / layout.pp, work.layers / layout.pp
        )  # all ranks delay the first and the last microbatch
        micro = microbatch_time(work, layout, device, per_node, mean)
        transfers = 2 * (layout.pp * layout.chunks - 1) * _transfer(work, layout, device, per_node)
        return _closed(layout, micro) + transfers
    number = min(layout.accumulation, ENOUGH * layout.pp)
    given = layout.chunks if layout.schedule == "interleaved" else None
    costs = stage_costs(work, layout, device, per_node)
    timeline = simulate(schedule_of(layout.schedule, layout.pp, number, given), costs)
    return timeline.total - timeline.busy[loads.busiest[0]]


def stage_costs(work: ModelWork, layout: Layout, device: Device, per_node: int) -> MicrobatchCosts:
    """Return the seconds of a microbatch in each virtual stage, and of the transfer to the next stage."""
    loads = stage_loads(work, layout).virtual
    stages = [microbatch_time(work, layout, device, per_node, load) for load in loads]
    return MicrobatchCosts(
        tuple(stage.forward for stage in stages),
        tuple(stage.input for stage in stages),
        tuple(stage.weight for stage in stages),
        _transfer(work, layout, device, per_node),
    )


def _transfer(work: ModelWork, layout: Layout, device: Device, per_node: int) -> float:
    stride = layout.tp * layout.copies
    return message(work, layout) / bandwidth(device, 2, stride, per_node) + LATENCY


def _closed(layout: Layout, micro: Microbatch) -> float:
    """Return the idle time of even stages in closed form, or an approximation for schedules without one.

    zbv fills and drains from both ends, with half of a rank's layers.
    """
    known = bubble_time(
        layout.schedule,
        layout.pp,
        layout.accumulation,
        layout.chunks,
        forward=micro.forward,
        input=micro.input,
        weight=micro.weight,
    )
    if known is not None:
        return known
    filling = (layout.pp - 1) * max(micro.forward, micro.input, micro.forward + micro.input - micro.weight)
    return filling / 2 if layout.schedule == "zbv" else filling


def _data(work: ModelWork, layout: Layout, device: Device, per_node: int, micro: Microbatch) -> float:
    """Return the seconds of ZeRO's collectives that do not overlap with computation."""
    if layout.copies == 1:
        return 0.0
    gather = reduce = _collective(work, layout, device, per_node, work.parameters, work.expert_parameters)
    if work.adapters:
        reduce = _collective(work, layout, device, per_node, work.trained, work.trained_experts)
    backward = micro.input + micro.weight
    number, ends = layout.accumulation, _unhidden(work)
    if layout.pp == 1 and layout.stage == 3:  # two gathers and one reduction per microbatch
        exposed = max(0.0, gather - micro.forward) + max(0.0, gather + reduce - backward)
        return number * exposed + (gather + reduce) * ends
    if layout.pp == 1 and layout.stage == 2:  # a reduction per microbatch, one gather per step
        return number * max(0.0, reduce - backward) + reduce * (1 + ends)
    left = max(reduce * ends, reduce - backward)
    if layout.stage == 0:  # all-reduce: its second half also overlaps with backward
        return max(2 * reduce * ends, 2 * reduce - backward)
    if layout.stage == 3:  # a pipeline gathers once for all microbatches
        return left + max(gather * ends, gather - micro.forward)
    return left + reduce


def _collective(
    work: ModelWork, layout: Layout, device: Device, per_node: int, parameters: int, experts: int
) -> float:
    """Return the seconds to gather a rank's part of `parameters` once, or to reduce as many gradients.

    Args:
        experts: the part of `parameters` in experts, which fewer ranks replicate with expert parallelism.
    """
    experts = experts if layout.ep > 1 else 0
    shard = work.itemsize * (parameters - experts) / (layout.tp * layout.pp)
    once = ring(shard, layout.copies, bandwidth(device, layout.copies, layout.tp, per_node))
    shard, alike = work.itemsize * experts / (layout.tp * layout.pp * layout.ep), layout.copies // layout.ep
    once += ring(shard, alike, bandwidth(device, alike, layout.tp * layout.ep, per_node))
    return once + work.layers / layout.pp * LATENCY * math.log2(layout.copies)


def _unhidden(work: ModelWork) -> float:
    """Return the share of a collective that cannot overlap, which is that of the first or the last unit."""
    return 1 / (work.layers + 1)


def _optimizer(work: ModelWork, layout: Layout, device: Device) -> float:
    over = layout.copies if layout.stage else 1
    experts = work.trained_experts
    mine = (work.trained - experts) / over + experts / (over if layout.stage else layout.ep)
    mine /= layout.tp * layout.pp
    if layout.offload == "none":
        return mine * STEP_BYTES / (device.traffic * device.traffic_share)
    there_and_back = 2 * work.itemsize * mine / device.host
    step = there_and_back + mine * STEP_BYTES / device.host_traffic
    if layout.offload == "all":  # parameters are loaded from the host for every forward and backward
        held = work.parameters / (over * layout.tp * layout.pp)
        step += 2 * layout.accumulation * work.itemsize * held / device.host
    return step
