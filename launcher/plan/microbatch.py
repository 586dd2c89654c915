"""The predicted time of one microbatch in a stage: what is computed, read and written, and sent inside the stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.monitor.devices import Device
from launcher.plan.layout import Layout
from launcher.plan.stages import StageLoad
from launcher.plan.work import ModelWork

LATENCY = 10e-6  # of a message, seconds
LAUNCHING = 1e-4  # seconds in which the kernels of a block's forward are started
NOT_SHARED = (
    0.3  # of the traffic of a block, without sequence parallelism: norms, residuals (10 of 34, 2205.05198)
)


@dataclass(frozen=True)
class Microbatch:
    """Seconds that a stage, or all stages of a rank, need for one microbatch, without waiting.

    Args:
        products: of a forward; the gradients of inputs take as long.
        weight: the gradients of weights, as long again unless some are frozen.
        traffic: all else in a forward; twice as much in a backward. With the products no less than it takes to start
            the kernels.
        reduces: the all-reduces of a forward, and as many of a backward.
        exchanges: what attention exchanges in a forward over cp, and in a backward.
        sends: tokens to experts and back in a forward, and their gradients in a backward.
        recomputed: products and all else of the blocks, where a backward repeats their forward; ends are not repeated.
    """

    products: float
    weight: float
    traffic: float
    reduces: float
    exchanges: float
    sends: float = 0.0
    recomputed: float = 0.0

    @property
    def forward(self) -> float:
        return self.products + self.traffic + self.waits

    @property
    def input(self) -> float:
        again = self.recomputed + self.waits if self.recomputed else 0.0
        return self.products + 2 * self.traffic + self.waits + again

    @property
    def waits(self) -> float:
        """Return the seconds of a forward in which it waits for other ranks."""
        return self.reduces + self.exchanges + self.sends


def microbatch_time(
    work: ModelWork, layout: Layout, device: Device, per_node: int, load: StageLoad
) -> Microbatch:
    """Return what one microbatch takes in a stage, or in all those of a rank."""
    share, part = layout.micro / layout.cp, load.blocks / work.layers
    rate = device.flops * device.matmul_share * (device.fp32_share if work.itemsize == 4 else 1.0)
    rate *= 1 / (1 + device.half_width * layout.tp / work.hidden)
    waiting = part * (work.expert_load - 1) * work.expert_flops if layout.ep > 1 else 0.0
    products = share * (load.flops + waiting) / layout.tp / rate
    of_ends = share * load.ends / layout.tp / rate
    kept = 0.0 if layout.sequence_parallel or layout.tp == 1 else NOT_SHARED
    traffic = share * part * work.traffic * (kept + (1 - kept) / layout.tp)
    traffic = max(traffic / (device.traffic * device.traffic_share), LAUNCHING * load.blocks - products)
    reduce = ring(2 * message(work, layout), layout.tp, bandwidth(device, layout.tp, 1, per_node))
    exchange = _exchange(work, layout, device, per_node)
    send = part * work.expert_layers * _send(work, layout, device, per_node)
    recomputed = products - of_ends + traffic if layout.recompute else 0.0
    reduces, exchanges = 2 * load.blocks * reduce, load.blocks * exchange
    return Microbatch(products, work.weight_share * products, traffic, reduces, exchanges, send, recomputed)


def message(work: ModelWork, layout: Layout) -> float:
    """Return the bytes of what goes from block to block, for the tokens of a rank."""
    return work.itemsize * layout.micro * work.sequence * work.hidden / layout.cp


def _exchange(work: ModelWork, layout: Layout, device: Device, per_node: int) -> float:
    """Return the seconds of what a block exchanges over cp in a forward: heads for tokens of queries, keys and values
    before attention, and of its output after it."""
    numbers = 2 * work.hidden + 2 * work.key_width
    nbytes = message(work, layout) / work.hidden * numbers / layout.tp
    return 2 * ring(nbytes / 2, layout.cp, bandwidth(device, layout.cp, layout.tp, per_node))


def _send(work: ModelWork, layout: Layout, device: Device, per_node: int) -> float:
    """Return the seconds of a layer's tokens on their way to their experts and back."""
    if layout.ep == 1:
        return 0.0
    nbytes = message(work, layout) * work.picked * work.expert_load
    return 2 * ring(nbytes, layout.ep, bandwidth(device, layout.ep, layout.tp, per_node))


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


def ring(nbytes: float, degree: int, rate: float) -> float:
    """Return the seconds of a ring in which `nbytes`, were there no ends, would go through each link."""
    if degree == 1:
        return 0.0
    return nbytes * (degree - 1) / degree / rate + LATENCY * math.log2(degree)
