"""The predicted time of a layout's step: what is computed, what is read and written, what crosses which link.

It was compared with published runs of other programs (docs/plan.md), and with no run of this launcher on GPUs.

    computing       products at the device's share of its peak; all else at its share of the memory's
    tp              4 all-reduces of tokens x hidden a block and microbatch, and 2 more where blocks are recomputed
    pipeline        the schedule's own list of actions, simulated with these costs
    cp              heads for tokens around attention: queries, keys, values and outputs, there and back
    experts         tokens x experts of a token to other ranks and back; the busiest rank has expert_load times as many
    data            volumes of ZeRO (arXiv 1910.02054, section 7), over the slowest link that the ranks of dp cross

Collectives are rings. Ranks lie as in `comm/mesh.py`: tp ranks are neighbours, then those of cp, of dp and of pp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import lru_cache

from launcher.monitor.devices import Device
from launcher.pipeline.schedules import schedule as schedule_of
from launcher.pipeline.timeline.bubble import bubble_time
from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate
from launcher.plan.layout import Layout
from launcher.plan.work import ModelWork

STEP_BYTES = (
    34  # of memory a parameter: gradient and three states read, states and parameter written, the norm
)
LATENCY = 10e-6  # of a message, seconds
LAUNCHING = 1e-4  # seconds in which the kernels of a block's forward are started
ENOUGH = 4  # microbatches a stage: with more of them a rank is idle no longer
NOT_SHARED = (
    0.3  # of the traffic of a block, without sequence parallelism: norms, residuals (10 of 34, 2205.05198)
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are for; together they are the step.

    Args:
        compute: products and other operations, as if each rank had no neighbours.
        recompute: forwards that run again.
        tp: all-reduces of tensor parallelism.
        cp: what attention exchanges where ranks share sequences.
        experts: tokens on their way to experts and back, where ranks share these.
        bubble: idle time of the pipeline, its transfers in it.
        data: gathers and reductions of ZeRO that computing does not hide.
        optimizer: its step, and the way to host memory and back where it is offloaded.
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


@dataclass(frozen=True)
class Microbatch:
    """Seconds that a rank needs for one microbatch in all its blocks, without waiting.

    Args:
        products: of a forward; the gradients of inputs and of weights take as long each.
        traffic: all else in a forward; twice as much in a backward. With the products no less than it takes to start
            the kernels.
        reduces: the all-reduces of a forward, and as many of a backward.
        exchanges: what attention exchanges in a forward over cp, and in a backward.
        sends: tokens to experts and back in a forward, and their gradients in a backward.
    """

    products: float
    traffic: float
    reduces: float
    exchanges: float
    recompute: bool
    sends: float = 0.0

    @property
    def forward(self) -> float:
        return self.products + self.traffic + self.reduces + self.exchanges + self.sends

    @property
    def input(self) -> float:
        waits = self.reduces + self.exchanges + self.sends
        return self.products + 2 * self.traffic + waits + (self.forward if self.recompute else 0)

    @property
    def weight(self) -> float:
        return self.products

    @property
    def total(self) -> float:
        return self.forward + self.input + self.weight


def step_time(
    work: ModelWork, layout: Layout, device: Device, per_node: int, *, exact: bool = False
) -> StepTime:
    """Return the prediction.

    Args:
        per_node: ranks of a node.
        exact: the schedule's actions are simulated; else closed forms serve where there is one.
    """
    micro = microbatch_time(work, layout, device, per_node)
    number = layout.accumulation
    idle = _bubble(work, layout, device, per_node, micro, exact=exact)
    again = micro.products + micro.traffic if layout.recompute else 0.0
    passes = 3 if layout.recompute else 2
    return StepTime(
        compute=number * 3 * (micro.products + micro.traffic),
        recompute=number * again,
        tp=number * passes * micro.reduces,
        cp=number * passes * micro.exchanges,
        experts=number * passes * micro.sends,
        bubble=idle,
        data=_data(work, layout, device, per_node, micro),
        optimizer=_optimizer(work, layout, device),
    )


def flops_per_rank(work: ModelWork, layout: Layout, seconds: float, *, recomputed: bool = False) -> float:
    """Return FLOP/s of a rank in a step that takes `seconds`; those of recomputed forwards count only with
    `recomputed`."""
    passes = 4 if recomputed and layout.recompute else 3
    sequences = layout.micro * layout.accumulation * layout.dp
    return passes * work.flops * sequences / seconds / layout.world


def microbatch_time(work: ModelWork, layout: Layout, device: Device, per_node: int) -> Microbatch:
    """Return what one microbatch takes on a rank whose share of the model is as large as the others'."""
    share = layout.micro / layout.pp / layout.cp
    rate = device.flops * device.matmul_share * (device.fp32_share if work.itemsize == 4 else 1.0)
    waiting = (work.expert_load - 1) * work.expert_flops if layout.ep > 1 else 0.0
    products = share * (work.flops + waiting) / layout.tp / rate
    kept = 0.0 if layout.sequence_parallel or layout.tp == 1 else NOT_SHARED
    traffic = share * work.traffic * (kept + (1 - kept) / layout.tp) / (device.traffic * device.traffic_share)
    traffic = max(traffic, LAUNCHING * work.layers / layout.pp - products)
    layers = work.layers / layout.pp
    reduce = _ring(2 * _message(work, layout), layout.tp, bandwidth(device, layout.tp, 1, per_node))
    exchange = _exchange(work, layout, device, per_node)
    send = work.expert_layers / layout.pp * _send(work, layout, device, per_node)
    return Microbatch(products, traffic, 2 * layers * reduce, layers * exchange, layout.recompute, send)


def _message(work: ModelWork, layout: Layout) -> float:
    """Return the bytes of what goes from block to block, for the tokens of a rank."""
    return work.itemsize * layout.micro * work.sequence * work.hidden / layout.cp


def _exchange(work: ModelWork, layout: Layout, device: Device, per_node: int) -> float:
    """Return the seconds of what a block exchanges over cp in a forward: heads for tokens of queries, keys and values
    before attention, and of its output after it."""
    numbers = 2 * work.hidden + 2 * work.key_width
    nbytes = _message(work, layout) / work.hidden * numbers / layout.tp
    return 2 * _ring(nbytes / 2, layout.cp, bandwidth(device, layout.cp, layout.tp, per_node))


def _send(work: ModelWork, layout: Layout, device: Device, per_node: int) -> float:
    """Return the seconds of a layer's tokens on their way to their experts and back."""
    if layout.ep == 1:
        return 0.0
    nbytes = _message(work, layout) * work.picked * work.expert_load
    return 2 * _ring(nbytes, layout.ep, bandwidth(device, layout.ep, layout.tp, per_node))


def bandwidth(device: Device, degree: int, stride: int, per_node: int) -> float:
    """Return the bytes/s that each rank of a group gets in a ring.

    Args:
        degree: ranks of the group.
        stride: from one of them to the next.
        per_node: ranks of a node. Those of the group that share a node share its ways out, too, and so one ring crosses
            on each of them.
    """
    inside = device.inside * device.network_share
    if degree * stride <= per_node:
        return inside
    neighbours = max(1, per_node // stride)
    return min(inside, neighbours * device.across * device.network_share)


def _ring(nbytes: float, degree: int, rate: float) -> float:
    """Return the seconds of a ring in which `nbytes`, were there no ends, would go through each link."""
    if degree == 1:
        return 0.0
    return nbytes * (degree - 1) / degree / rate + LATENCY * math.log2(degree)


def _bubble(
    work: ModelWork, layout: Layout, device: Device, per_node: int, micro: Microbatch, *, exact: bool
) -> float:
    """Return how long a rank stands still."""
    if layout.pp == 1:
        return 0.0
    stride = layout.tp * layout.copies
    transfer = _message(work, layout) / bandwidth(device, 2, stride, per_node) + LATENCY
    costs = (micro.forward, micro.input, micro.weight)
    closed = bubble_time(
        layout.schedule,
        layout.pp,
        layout.accumulation,
        layout.chunks,
        forward=costs[0],
        input=costs[1],
        weight=costs[2],
    )
    if exact or closed is None:
        scale = micro.total  # what is simulated depends on proportions, and many layouts share them
        parts = tuple(round(cost / scale, 3) for cost in costs)
        number = min(layout.accumulation, ENOUGH * layout.pp)
        return scale * _simulated(
            layout.schedule, layout.pp, number, layout.chunks, parts, round(transfer / scale, 4)
        )
    return closed + 2 * (layout.pp * layout.chunks - 1) * transfer


@lru_cache(maxsize=4096)
def _simulated(
    name: str, stages: int, microbatches: int, chunks: int, costs: tuple[float, ...], transfer: float
) -> float:
    """Return the idle time of a rank, where a whole microbatch takes 1."""
    made = schedule_of(name, stages, microbatches, None if name != "interleaved" else chunks)
    forward, back, weight = (cost / chunks for cost in costs)
    even = MicrobatchCosts.even(made.virtual_stages, forward, back, weight, transfer)
    timeline = simulate(made, even)
    return timeline.total - sum(timeline.busy) / stages


def _data(work: ModelWork, layout: Layout, device: Device, per_node: int, micro: Microbatch) -> float:
    """Return the seconds of ZeRO's collectives that computing does not hide."""
    if layout.copies == 1:
        return 0.0
    experts = work.expert_parameters if layout.ep > 1 else 0  # what fewer ranks hold alike
    shard = work.itemsize * (work.parameters - experts) / (layout.tp * layout.pp)
    once = _ring(shard, layout.copies, bandwidth(device, layout.copies, layout.tp, per_node))
    shard, alike = work.itemsize * experts / (layout.tp * layout.pp * layout.ep), layout.copies // layout.ep
    once += _ring(shard, alike, bandwidth(device, alike, layout.tp * layout.ep, per_node))
    once += work.layers / layout.pp * LATENCY * math.log2(layout.copies)
    backward = micro.input + micro.weight
    number = layout.accumulation
    if layout.pp == 1 and layout.stage == 3:  # every microbatch gathers twice and reduces
        forward = max(0.0, once - micro.forward)
        return number * (forward + max(0.0, 2 * once - backward)) + 2 * once * _unhidden(work)
    if layout.pp == 1 and layout.stage == 2:  # every microbatch reduces; parameters come back once
        return number * max(0.0, once - backward) + once * (1 + _unhidden(work))
    reduce = max(once * _unhidden(work), once - backward)
    if layout.stage == 0:  # all-reduce: the second half is a gather that backward hides as well
        return max(2 * once * _unhidden(work), 2 * once - backward)
    if layout.stage == 3:  # a pipeline gathers once for all microbatches
        return reduce + max(once * _unhidden(work), once - micro.forward)
    return reduce + once


def _unhidden(work: ModelWork) -> float:
    """Return the first unit, or the last, has nothing to hide behind."""
    return 1 / (work.layers + 1)


def _optimizer(work: ModelWork, layout: Layout, device: Device) -> float:
    over = layout.copies if layout.stage else 1
    experts = work.expert_parameters
    mine = (work.parameters - experts) / over + experts / (over if layout.stage else layout.ep)
    mine /= layout.tp * layout.pp
    if layout.offload == "none":
        return mine * STEP_BYTES / (device.traffic * device.traffic_share)
    there_and_back = 2 * work.itemsize * mine / device.host
    step = there_and_back + mine * STEP_BYTES / device.host_traffic
    if layout.offload == "all":  # parameters come from the host for every forward and backward
        step += 2 * layout.accumulation * work.itemsize * mine / device.host
    return step
