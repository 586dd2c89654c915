"""The predicted time of one microbatch in a stage: computation, memory traffic and communication."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.monitor.devices import Device
from launcher.plan.layout import Layout
from launcher.plan.stages import StageLoad
from launcher.plan.work import ModelWork

LATENCY = 10e-6  # seconds per message
NOT_SHARED = (
    0.3  # replicated share of traffic without sequence parallelism: norms, residuals (10 of 34, 2205.05198)
)


@dataclass(frozen=True)
class Microbatch:
    """Seconds that a stage, or all stages of a rank, take for one microbatch, without pipeline bubbles.

    Args:
        products: matrix products of a forward; input gradients take the same time.
        weight: weight gradients, which take the same time unless some weights are frozen.
        traffic: all other operations of a forward; twice as much in a backward. It includes the time to launch
            operations: on a CPU all of it, on a GPU what products and traffic do not overlap.
        reduces: tp all-reduces of a forward; the same in a backward.
        exchanges: all-to-alls of attention over cp in a forward; the same in a backward.
        sends: dispatch and combine of experts' tokens in a forward, and of their gradients in a backward.
        recomputed: products and traffic of blocks whose forward is recomputed; the ends are not recomputed.
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
        """Return the seconds of communication in a forward."""
        return self.reduces + self.exchanges + self.sends


def microbatch_time(
    work: ModelWork, layout: Layout, device: Device, per_node: int, load: StageLoad
) -> Microbatch:
    """Return the time of one microbatch in a stage, or in all stages of a rank."""
    share, part = layout.micro / layout.cp, load.blocks / work.layers
    rate = device.flops * device.matmul_share * (device.fp32_share if work.itemsize == 4 else 1.0)
    rate *= 1 / (1 + device.half_width * layout.tp / work.hidden)
    waiting = part * (work.expert_load - 1) * work.expert_flops if layout.ep > 1 else 0.0
    products = share * (load.flops + waiting) / layout.tp / rate
    of_ends = share * load.ends / layout.tp / rate
    kept = 0.0 if layout.sequence_parallel or layout.tp == 1 else NOT_SHARED
    traffic = share * part * work.traffic * (kept + (1 - kept) / layout.tp)
    traffic /= device.traffic * device.traffic_share
    launching = part * work.operations * device.launch
    traffic = traffic + launching if device.synchronous else max(traffic, launching - products)
    reduce = ring(2 * message(work, layout), layout.tp, bandwidth(device, layout.tp, 1, per_node))
    exchange = _exchange(work, layout, device, per_node)
    send = part * work.expert_layers * _send(work, layout, device, per_node)
    recomputed = products - of_ends + traffic if layout.recompute else 0.0
    reduces, exchanges = 2 * load.blocks * reduce, load.blocks * exchange
    return Microbatch(products, work.weight_share * products, traffic, reduces, exchanges, send, recomputed)


def message(work: ModelWork, layout: Layout) -> float:
    """Return the bytes of the hidden states of a rank's tokens."""
    return work.itemsize * layout.micro * work.sequence * work.hidden / layout.cp


def _exchange(work: ModelWork, layout: Layout, device: Device, per_node: int) -> float:
    """Return the seconds of a block's all-to-alls over cp in a forward.

    They exchange heads for tokens of queries, keys and values before attention, and of its output afterwards.
    """
    numbers = 2 * work.hidden + 2 * work.key_width
    nbytes = message(work, layout) / work.hidden * numbers / layout.tp
    return 2 * ring(nbytes / 2, layout.cp, bandwidth(device, layout.cp, layout.tp, per_node))


def _send(work: ModelWork, layout: Layout, device: Device, per_node: int) -> float:
    """Return the seconds to dispatch a layer's tokens to their experts and to combine the outputs."""
    if layout.ep == 1:
        return 0.0
    share = min(1.0, work.expert_load / layout.ep)  # of the pairs that are for the busiest rank
    rows = work.picked * share if layout.dispatch == "pairs" else 1 - (1 - share) ** work.picked
    nbytes = message(work, layout) * layout.ep * rows
    return 2 * ring(nbytes, layout.ep, bandwidth(device, layout.ep, layout.tp, per_node))


def bandwidth(device: Device, degree: int, stride: int, per_node: int) -> float:
    """Return the bytes/s of each rank of a group in a ring.

    Args:
        degree: size of the group.
        stride: distance between consecutive ranks of the group.
        per_node: ranks per node. The group's ranks on one node use all of their links to other nodes, with
            one ring over each link.
    """
    inside = device.inside * device.network_share
    if degree * stride <= per_node:
        return inside
    neighbours = max(1, per_node // stride)
    return min(inside, neighbours * device.across * device.network_share)


def ring(nbytes: float, degree: int, rate: float) -> float:
    """Return the seconds of a ring collective that sends `nbytes` * (degree - 1) / degree over each link."""
    if degree == 1:
        return 0.0
    return nbytes * (degree - 1) / degree / rate + LATENCY * math.log2(degree)
