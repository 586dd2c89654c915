"""The text report of `flops_profiler`: the step, the module classes at each depth, and every module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from launcher.monitor.comms import columns
from launcher.monitor.flops import Counts


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The facts about the profiled step of one rank.

    Attributes:
        step: optimizer steps done before the timed step.
        counted_in: the same for the step in which operations were counted.
        ranks, dp_ranks, microbatch, accumulation: sizes of the run; dp_ranks have their own sequences.
        phases_ms: milliseconds of forward, backward, reduce and step, summed over the microbatches.
        device: name of the device.
        peak: peak FLOP/s of the device; None if unknown.
    """

    step: int
    counted_in: int
    ranks: int
    dp_ranks: int
    microbatch: int
    accumulation: int
    phases_ms: Mapping[str, float]
    device: str
    peak: float | None


def report(
    counts: Counts,
    parameters: Mapping[str, int],
    classes: Mapping[str, str],
    facts: StepFacts,
    *,
    module_depth: int,
    top_modules: int,
    detailed: bool,
) -> str:
    """Return the whole report.

    Args:
        counts: FLOPs and seconds by module name.
        parameters: full parameter name -> number of elements over all ranks.
        classes: module name -> class, in the order of the model; "" is the model.
        facts: facts about the step.
        module_depth: 0 for the model, 1 for its children, ...; -1 for all.
        top_modules: number of classes listed at each depth.
        detailed: whether to add a table of all modules.
    """
    rows = _rows(counts, parameters, classes, facts.accumulation, module_depth)
    parts = [_step_part(counts, rows[0], facts), _top_part(rows, top_modules)]
    if detailed:
        parts.append(_module_part(rows))
    return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class _ModuleRow:
    name: str
    kind: str
    parameters: int
    flops: float
    seconds: float

    @property
    def depth(self) -> int:
        return self.name.count(".") + 1 if self.name else 0


def _rows(
    counts: Counts, parameters: Mapping[str, int], classes: Mapping[str, str], microbatches: int, depth: int
) -> list[_ModuleRow]:
    """Return one row per module, with values averaged over microbatches."""
    held = dict.fromkeys(classes, 0)
    for name, numel in parameters.items():
        path = name.split(".")[:-1]
        for end in range(len(path) + 1):
            held[".".join(path[:end])] += numel
    flops, seconds = _with_containers(counts.flops, classes), _with_containers(counts.seconds, classes)
    rows = [
        _ModuleRow(name, kind, held[name], flops[name] / microbatches, seconds[name] / microbatches)
        for name, kind in classes.items()
    ]
    return [row for row in rows if depth < 0 or row.depth <= depth]


def _with_containers(values: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """Return the values; modules that are never called (`ModuleList`) get the sum of their children."""
    inside = dict.fromkeys(names, 0.0)
    found = {}
    for name in reversed(inside):  # children come after their parents
        found[name] = values.get(name, inside[name])
        if name:
            inside[name.rpartition(".")[0]] += found[name]
    return found


def _step_part(counts: Counts, model: _ModuleRow, facts: StepFacts) -> str:
    phases = {name: ms / 1000 for name, ms in facts.phases_ms.items()}
    forward, backward = phases.get("forward", 0.0), phases.get("backward", 0.0)
    whole = forward + backward + phases.get("step", 0.0)
    forward_flops = counts.flops.get("", 0)
    flops = forward_flops + counts.backward
    useful = flops - counts.recomputed
    batch = facts.microbatch * facts.accumulation * facts.dp_ranks
    lines = [
        ("ranks", str(facts.ranks)),
        ("sequences per microbatch", f"{facts.microbatch}, {facts.accumulation} microbatches per step"),
        ("parameters", f"{model.parameters:,}"),
        ("forward of a microbatch", f"{_number(model.flops / 2)}MACs, {_number(model.flops)}FLOPs"),
        ("forward", _rate(forward_flops, forward)),
        ("backward", _rate(counts.backward, backward)),
        ("  of which recomputation", f"{_number(counts.recomputed)}FLOPs"),
        ("  of which waiting for reductions", f"{1000 * phases.get('reduce', 0.0):.2f} ms"),
        ("optimizer step", f"{1000 * phases.get('step', 0.0):.2f} ms"),
        ("step of a rank, in total", _rate(flops, whole)),
        ("samples over all ranks", f"{batch / whole:.2f} /s" if whole else "not timed"),
        ("device", facts.device),
    ]
    if facts.peak is None:
        lines.append(("model FLOPs utilisation (MFU)", "peak unknown"))
    else:
        share = f"{useful / whole / facts.peak:.1%}" if whole else "not timed"
        lines.append(
            (
                "model FLOPs utilisation (MFU)",
                f"{share} of {_number(facts.peak)}FLOP/s, excluding recomputation",
            )
        )
    how = f"counted in the step after {facts.counted_in}, timed in this one"
    if facts.counted_in == facts.step:
        how = "counted and timed in the same step: counting slowed it"
    title = f"FLOPs profile of rank 0, in the step after {facts.step} optimizer steps ({how})"
    note = "Matrix products, convolutions and attention are counted: 2 FLOPs are one MAC."
    return "\n".join([title, note, *(f"{name + ':':<34}{value}" for name, value in lines)])


def _top_part(rows: list[_ModuleRow], top: int) -> str:
    """Return the classes with the most parameters, MACs and time at each depth."""
    lines = []
    for depth in range(max(row.depth for row in rows) + 1):
        here = [row for row in rows if row.depth == depth]
        lines.append(f"depth {depth}:")
        lines.append(f"  parameters: {_top(here, top, lambda row: row.parameters, _number)}")
        lines.append(f"  MACs:       {_top(here, top, lambda row: row.flops / 2, _number)}")
        lines.append(
            f"  forward:    {_top(here, top, lambda row: 1000 * row.seconds, lambda ms: f'{ms:.2f} ms')}"
        )
    return "\n".join(["Top module classes", *lines])


def _top(
    rows: list[_ModuleRow], top: int, value: Callable[[_ModuleRow], float], show: Callable[[float], str]
) -> str:
    sums: dict[str, float] = {}
    for row in rows:
        sums[row.kind] = sums.get(row.kind, 0.0) + value(row)
    best = sorted(sums.items(), key=lambda item: -item[1])[:top]
    return ", ".join(f"{kind} {show(total).strip()}" for kind, total in best)


def _module_part(rows: list[_ModuleRow]) -> str:
    model = rows[0]
    table = [["module", "class", "parameters", "", "MACs", "", "forward ms", "", "FLOP/s"]]
    for row in rows:
        name = "  " * row.depth + (row.name.rpartition(".")[2] or "(model)")
        table.append(
            [
                name,
                row.kind,
                f"{row.parameters:,}",
                _share(row.parameters, model.parameters),
                _number(row.flops / 2).strip(),
                _share(row.flops, model.flops),
                f"{1000 * row.seconds:.3f}",
                _share(row.seconds, model.seconds),
                _number(row.flops / row.seconds).strip() if row.seconds else "",
            ]
        )
    return "Forward of a microbatch, module by module\n" + columns(table, left=2)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _rate(flops: float, seconds: float) -> str:
    rate = f", {_number(flops / seconds)}FLOP/s" if seconds else ""
    return f"{_number(flops)}FLOPs, {1000 * seconds:.2f} ms{rate}"


def _number(value: float) -> str:
    """Return a number to be followed by a unit: `1.23 G`, `950 `."""
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.2f} {prefix}"
    return f"{value:.0f} "
