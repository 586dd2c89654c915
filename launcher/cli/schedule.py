"""`launch schedule`: draws and simulates a pipeline schedule, without GPUs, a model or torch."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.flags import FlagParser, positive
from launcher.cli.output import write
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.pipeline.schedules.actions import PipelineSchedule
    from launcher.pipeline.timeline.simulate import MicrobatchCosts, Timeline

DESCRIPTION = """\
Shows what each rank of a pipeline does and when, what fraction of the time it is idle (the bubble), and how many
activations it holds. Needs no GPU and no model."""
EPILOG = """\
schedules: gpipe, 1f1b, interleaved, zb-h1, zbv
experimental: pipedream, 2bw (asynchronous: not equivalent to training on one process)

examples:
  launch schedule 1f1b --stages 4 --microbatches 8
  launch schedule interleaved --stages 4 --microbatches 8 --chunks 2 --out interleaved.svg
  launch schedule zbv --stages 4 --microbatches 8 --costs 1,1.2,0.8
  launch schedule 1f1b --stages 2 --microbatches 8 --costs 1,1,1/2,2,2    (the second stage takes twice as long)
  launch schedule --trace run.json --out run.svg           (a run, below the prediction from its mean costs)

docs/schedules.md describes the schedules.
"""


def schedule_parser() -> FlagParser:
    """Return the parser of `launch schedule`."""
    parser = FlagParser(
        prog="launch schedule",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name of the schedule; not needed with --trace"
    )
    parser.add_argument("--stages", type=positive, metavar="P", help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=positive, metavar="M", help="microbatches per step")
    parser.add_argument("--chunks", type=positive, metavar="V", help="model chunks per rank (interleaved)")
    parser.add_argument(
        "--costs",
        metavar="F,I,W",
        help="time of forward, input gradient and weight gradient of a microbatch, for a rank's whole "
        "share (default: 1,1,1) or for every virtual stage, separated by /",
    )
    parser.add_argument(
        "--transfer", type=_time, default=0.0, metavar="T", help="time of a transfer (default: 0)"
    )
    parser.add_argument(
        "--trace", metavar="RUN.json", help="trace of a measured step, drawn below the predicted one"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write a picture (.svg), or a trace for Perfetto (.json)"
    )
    return parser


def schedule(argv: Sequence[str]) -> int:
    """Run `launch schedule`; returns 0."""
    flags = schedule_parser().parse_args(argv)
    from launcher.pipeline.timeline.draw import grid
    from launcher.pipeline.timeline.recording import read
    from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate

    measured = None if flags.trace is None else read(flags.trace)
    made = _made(flags, measured)
    costs = _costs(flags, made)
    if measured is not None and flags.costs is None:
        costs = MicrobatchCosts.measured(measured)
    predicted = simulate(made, costs)
    if flags.out is not None:
        _write(Path(flags.out), made, predicted, measured)
    elif measured is None:
        print(grid(made))
    for line in _told(flags, made, predicted, measured):
        print(line)
    return 0


def _made(flags: argparse.Namespace, measured: Timeline | None) -> PipelineSchedule:
    """Return the requested schedule, or that of the trace; where both are given, they must agree."""
    from launcher.pipeline.schedules import schedule as make

    wanted = {"NAME": flags.name, "--stages": flags.stages, "--microbatches": flags.microbatches}
    chunks = flags.chunks
    if measured is not None:
        found = {"NAME": measured.name, "--stages": measured.stages, "--microbatches": measured.microbatches}
        for flag, value in (wanted | {"--chunks": chunks}).items():
            there = (found | {"--chunks": measured.chunks})[flag]
            if value not in (None, there):
                raise ConfigError(
                    f"{flag} is {value}, but the run had {there}", where=flags.trace, fix=f"leave {flag} out"
                )
        wanted, chunks = found, measured.chunks
    missing = [flag for flag, value in wanted.items() if value is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            fix="for example: launch schedule 1f1b --stages 4 --microbatches 8",
        )
    return make(wanted["NAME"], wanted["--stages"], wanted["--microbatches"], chunks)


def _costs(flags: argparse.Namespace, made: PipelineSchedule) -> MicrobatchCosts:
    from launcher.pipeline.timeline.simulate import MicrobatchCosts

    text = flags.costs or "1,1,1"
    try:
        rows = [[_time(number) for number in row.split(",")] for row in text.split("/")]
        if any(len(row) != 3 for row in rows):
            raise argparse.ArgumentTypeError("needs three numbers per row")
        if len(rows) not in (1, made.virtual_stages):
            raise argparse.ArgumentTypeError(f"{len(rows)} rows for {made.virtual_stages} virtual stages")
    except argparse.ArgumentTypeError as error:
        raise ConfigError(
            f"--costs {text}: {error}",
            fix="F,I,W, for example 1,1,1; or three numbers for each virtual stage, separated by /",
        ) from None
    if len(rows) == 1:
        shared = [number / made.chunks for number in rows[0]]
        rows = [shared] * made.virtual_stages
    forward, input, weight = (tuple(column) for column in zip(*rows, strict=True))
    return MicrobatchCosts(forward, input, weight, flags.transfer)


def _told(
    flags: argparse.Namespace, made: PipelineSchedule, predicted: Timeline, measured: Timeline | None
) -> list[str]:
    """Return the lines below the grid."""
    lines = []
    for called, shown in (("predicted" if measured else "simulated", predicted), ("measured", measured)):
        if shown is not None:
            lines.append(
                f"bubble, {called}: {shown.bubble:.1%} of the time, {shown.bubble_over_ideal:.1%} of the ideal time"
                f" (total {shown.total:.6g})"
            )
    if measured is None:
        lines.append(f"bubble, closed form: {_closed_form(flags, made)}")
    each = (
        "microbatches"
        if made.chunks == 1
        else f"microbatches x chunks (each 1/{made.chunks} of a rank's layers)"
    )
    lines.append(f"activations held, by rank: {' '.join(map(str, predicted.peak_held))} {each}")
    if any(made.deferred):
        lines.append(f"max deferred weight gradients, by rank: {' '.join(map(str, made.deferred))}")
    if not made.flushes:
        versions = " ".join(map(str, made.weight_versions))
        lines.append(
            f"asynchronous: NOT equivalent to training on one process; weight versions, by rank: {versions}; "
            "the bubble is that of a step that drains the pipeline, as here; a stream of steps would have it only once"
        )
    return lines


def _closed_form(flags: argparse.Namespace, made: PipelineSchedule) -> str:
    """Return the closed-form bubble, formatted like the simulated one."""
    from launcher.pipeline.timeline.bubble import bubble_time

    costs = _costs(flags, made)
    if "/" in (flags.costs or "") or flags.transfer:
        return "not available for uneven costs or transfers"
    forward, input, weight = (rows[0] * made.chunks for rows in (costs.forward, costs.input, costs.weight))
    idle = bubble_time(
        made.name, made.stages, made.microbatches, made.chunks, forward=forward, input=input, weight=weight
    )
    if idle is None:
        return "not available for these numbers"
    ideal = made.microbatches * (forward + input + weight)
    return f"{idle / (ideal + idle):.1%} of the time, {idle / ideal:.1%} of the ideal time"


def _write(out: Path, made: PipelineSchedule, predicted: Timeline, measured: Timeline | None) -> None:
    from launcher.pipeline.timeline.picture import svg
    from launcher.pipeline.timeline.recording import trace

    if out.suffix == ".svg":
        chunks = f", {made.chunks} chunks" if made.chunks > 1 else ""
        title = f"{made.name}: {made.stages} stages{chunks}, {made.microbatches} microbatches"
        text = svg(predicted, title, measured, unit="s" if measured else "")
    elif out.suffix == ".json":
        text = json.dumps(trace(predicted, *([measured] if measured else []))) + "\n"
    else:
        raise ConfigError(f"--out {out}: unknown file type", fix="FILE.svg or FILE.json")
    write(out, text, "--out", over=True)
    print(f"written: {out}")


def _time(text: str) -> float:
    """Parse a time: a finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"needs a number of at least 0, not {text!r}")
    return number
