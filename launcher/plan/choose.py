"""Search for the fastest layouts that fit, one per mesh, and explanations of the choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace

from launcher.monitor.device_budget import DeviceBudget
from launcher.monitor.devices import Device
from launcher.plan.layout import CHUNKS, MICROBATCHES, OFFLOADS, TENSOR, Layout
from launcher.plan.speed import StepTime, flops_per_rank, step_time
from launcher.plan.work import ModelWork
from launcher.sizes import in_words

PlanMemory = Callable[[Layout, float], int | None]
"""(layout, limit) -> peak bytes of the most loaded rank, or of one above the limit; None if it cannot run."""
BackwardBytes = Callable[[Layout], float]
"""Layout -> bytes that blocks save for backward, a lower bound of the peak that is fast to compute."""

SPARE = 2
CLEAR = 0.02  # smaller relative differences are below the precision of predictions


@dataclass(frozen=True)
class Choice:
    """A layout and its predictions.

    Args:
        time: predicted step time.
        peak: peak bytes on the device of the most loaded rank.
        flops: FLOP/s per rank, without recomputation.
    """

    layout: Layout
    time: StepTime
    peak: int
    flops: float


@dataclass(frozen=True)
class PlanSearch:
    """The inputs of a search: the hardware of the run.

    Args:
        per_node: ranks per node.
        budget: memory budget of a device.
    """

    device: Device
    per_node: int
    budget: DeviceBudget

    def usable(self, layout: Layout) -> int:
        """Return the bytes of a device that are available to the tensors of a layout."""
        return self.budget.usable(layout.degrees)


def choose(
    work: ModelWork,
    place: PlanSearch,
    ways: Iterable[Layout],
    needs: PlanMemory,
    kept: BackwardBytes,
    *,
    top: int = 10,
    tell: Callable[[int, Choice], None] = lambda tried, choice: None,
) -> list[Choice]:
    """Return the fastest layout that fits for each mesh, fastest first.

    Args:
        ways: candidate layouts.
        needs: peak memory of a layout; called in the order of speed, and only where necessary.
        kept: the part of the peak that blocks save for backward.
        tell: called with the number of layouts evaluated so far and each new choice.
    """
    timed = [
        (step_time(work, way, place.device, place.per_node).total, at, way) for at, way in enumerate(ways)
    ]
    found: dict[tuple[int, int, int, int, int], Choice] = {}
    hopeless = _Hopeless(work, kept, place)
    for judged_so_far, (_, _, way) in enumerate(sorted(timed, key=lambda each: each[:2]), 1):
        if way.mesh in found or hopeless(way):
            continue
        usable = place.usable(way)
        peak = needs(way, usable)
        if peak is None or peak > usable:
            hopeless.learn(way, too_large=peak is not None)
            continue
        found[way.mesh] = judged(work, place, way, peak)
        tell(judged_so_far, found[way.mesh])
        if len(found) == top + SPARE:  # the order by closed forms is close enough to stop here
            break
    return sorted(found.values(), key=lambda choice: choice.time.total)[:top]


def judged(work: ModelWork, place: PlanSearch, layout: Layout, peak: int) -> Choice:
    """Return the prediction with a simulated pipeline schedule."""
    time = step_time(work, layout, place.device, place.per_node, exact=True)
    return Choice(layout, time, peak, flops_per_rank(work, layout, time.total))


class _Hopeless:
    """Detects layouts that cannot fit or run, without estimating their memory.

    These are layouts whose lower bound exceeds the device, that need at least as much as one that was too
    large, or that were refused with the same or a smaller microbatch.
    """

    def __init__(self, work: ModelWork, kept: BackwardBytes, place: PlanSearch) -> None:
        self._work, self._kept, self._place = work, kept, place
        self._too_large: dict[object, list[tuple[int, ...]]] = {}
        self._refused: dict[Layout, int] = {}  # layout with microbatch 1 -> smallest refused microbatch

    def __call__(self, way: Layout) -> bool:
        if way.micro >= self._refused.get(_one(way), way.micro + 1):
            return True
        if states(self._work, way) + self._kept(way) > self._place.usable(way):
            return True
        known = self._too_large.get(_kind(way), ())
        return any(all(a >= b for a, b in zip(_appetite(way), less, strict=True)) for less in known)

    def learn(self, way: Layout, *, too_large: bool) -> None:
        if too_large:
            self._too_large.setdefault(_kind(way), []).append(_appetite(way))
        else:
            self._refused[_one(way)] = way.micro


def _one(way: Layout) -> Layout:
    return replace(way, micro=1, accumulation=1)


def _kind(way: Layout) -> object:
    return way.mesh, way.schedule, way.chunks


def _appetite(way: Layout) -> tuple[int, ...]:
    """Return a tuple; a layout whose elements are all at least as large needs at least as much memory."""
    return way.micro, -way.stage, -int(way.recompute), -OFFLOADS.index(way.offload)


def states(work: ModelWork, layout: Layout) -> float:
    """Return the bytes of weights, gradients and AdamW states on the device, without buffers and padding.

    Pipeline stages hold unsharded weights and gradients from the first microbatch to the last.
    """
    of_all = work.parameters, work.expert_parameters
    of_trained = work.trained, work.trained_experts
    weights, gradients, moments = (
        parameters / layout.copies
        if layout.stage >= stage and (layout.pp == 1 or stage == 1)
        else parameters - experts + experts / layout.ep
        for stage, (parameters, experts) in ((3, of_all), (2, of_trained), (1, of_trained))
    )
    weights, gradients, moments = (part / (layout.tp * layout.pp) for part in (weights, gradients, moments))
    held = work.itemsize * (weights * (layout.offload != "all") + gradients)
    return held + 12 * moments * (layout.offload == "none")


def reasons(
    work: ModelWork, place: PlanSearch, choice: Choice, needs: PlanMemory, batch: int
) -> Iterator[str]:
    """Yield the effect of each single change to the choice, in words; omit changes without an effect."""
    for name, other in _neighbours(work, choice.layout, batch):
        peak = needs(other, math.inf)
        if peak is None:
            continue
        if peak > place.usable(other):
            yield f"{name}: does not fit, needs {in_words(peak)} of {in_words(place.usable(other))}"
            continue
        time = step_time(work, other, place.device, place.per_node, exact=True)
        slower = time.total / choice.time.total - 1
        if slower > CLEAR:
            yield f"{name}: {slower:.0%} slower, {_most_grown(choice.time, time)}"
        elif slower < -CLEAR:
            yield f"{name}: {-slower:.0%} faster (predicted)"


def _neighbours(work: ModelWork, layout: Layout, batch: int) -> Iterator[tuple[str, Layout]]:
    """Yield (name of the change, layout) for each single change to the layout."""
    world = layout.world
    for tp in (layout.tp // 2, layout.tp * 2):
        if tp in TENSOR and not work.packed and world % (tp * layout.pp * layout.cp) == 0:
            yield from _with_mesh(f"tp {tp}", layout, tp, layout.pp, layout.cp, batch)
    for pp in (layout.pp // 2, layout.pp * 2):
        if pp and world % (pp * layout.tp * layout.cp) == 0 and not work.in_one_piece:
            yield from _with_mesh(f"pp {pp}", layout, layout.tp, pp, layout.cp, batch)
    for cp in (layout.cp // 2, layout.cp * 2):
        if layout.cp > 1 and world % (cp * layout.tp * layout.pp) == 0:
            yield from _with_mesh(f"cp {cp}", layout, layout.tp, layout.pp, cp, batch)
    for ep in (layout.ep // 2, layout.ep * 2):
        if ep and layout.tp == 1 and layout.copies % ep == 0 and ep <= work.experts:
            yield f"ep {ep}", replace(layout, ep=ep)
    for stage in (layout.stage - 1, layout.stage + 1):
        if 0 <= stage <= 3 and layout.copies > 1 and layout.offload == "none":
            yield f"ZeRO {stage}", replace(layout, stage=stage)
    for micro in (layout.micro // 2, layout.micro * 2):
        sequences = layout.micro * layout.accumulation
        if micro in MICROBATCHES and sequences % micro == 0:
            yield f"microbatch {micro}", replace(layout, micro=micro, accumulation=sequences // micro)
    without = "no recomputation" if layout.recompute else "recomputation"
    yield without, replace(layout, recompute=not layout.recompute)
    if layout.pp > 1:
        for schedule, chunks in (("1f1b", 1), *(("interleaved", chunks) for chunks in CHUNKS), ("zbv", 2)):
            if (schedule, chunks) != (layout.schedule, layout.chunks):
                called = schedule + (f" x {chunks}" if schedule == "interleaved" else "")
                yield called, replace(layout, schedule=schedule, chunks=chunks)
    at = OFFLOADS.index(layout.offload)
    if at:
        yield f"offload {OFFLOADS[at - 1]}", replace(layout, offload=OFFLOADS[at - 1])


def _with_mesh(
    name: str, layout: Layout, tp: int, pp: int, cp: int, batch: int
) -> Iterator[tuple[str, Layout]]:
    dp = layout.world // (tp * pp * cp)
    if batch % (dp * layout.micro) == 0:
        changed = replace(
            layout,
            tp=tp,
            pp=pp,
            dp=dp,
            cp=cp,
            accumulation=batch // (dp * layout.micro),
            sequence_parallel=tp > 1,
            ep=layout.ep if tp == 1 and dp * cp % layout.ep == 0 else 1,
        )
        yield f"{name} (dp {dp})", changed


def _most_grown(before: StepTime, after: StepTime) -> str:
    grown = {field.name: getattr(after, field.name) - getattr(before, field.name) for field in fields(before)}
    return f"mostly due to {WORDS[max(grown, key=lambda name: grown[name])]}"


WORDS = {
    "compute": "compute",
    "recompute": "recomputation",
    "tp": "tensor-parallel all-reduces",
    "cp": "context-parallel all-to-alls",
    "experts": "expert dispatch and combine",
    "bubble": "the pipeline bubble",
    "data": "ZeRO all-gathers and reductions",
    "optimizer": "the optimizer step",
}
