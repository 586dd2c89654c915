"""How long ranks are idle under each schedule: by the closed form, simulated, and measured.

    python -m benchmarks.bubble --out docs/bubble.md

Two ranks with one thread each; a machine with two idle cores says the most."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.pipeline import WORK
from benchmarks.suite import LIMIT_S
from benchmarks.sweep import Row, describe_session, run, wait_until_idle
from launcher.pipeline.schedules import schedule as schedule_of
from launcher.pipeline.timeline.bubble import bubble_time
from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate

STAGES = 2
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zbv": 2}
HEAD = """# Idle time of a pipeline

The part of a step in which ranks are idle, in percent, averaged over {stages} ranks, for a Llama of 25.6 M parameters
whose blocks they hold half each. Closed form and simulation: F, I and W take equally long and transfers nothing.
Simulated, measured costs: the same list with what F, B, I, W and the transfers took on each stage of that run.
Measured: from the start of the first action to the end of the last, medians of steps, then of {turns} runs.

Written by `python -m benchmarks.bubble`. {session}

| schedule | microbatches | closed form | simulated | simulated, measured costs | measured | measured / simulated |
|---|---:|---:|---:|---:|---:|---:|
"""


def predicted(name: str, microbatches: int) -> tuple[float | None, float]:
    """(closed form, simulated): idle part of a step where all costs are equal."""
    chunks = CHUNKS[name]
    time = bubble_time(name, STAGES, microbatches, chunks)
    made = schedule_of(name, STAGES, microbatches, chunks)
    even = MicrobatchCosts.even(made.virtual_stages, 1 / chunks, 1 / chunks, 1 / chunks)
    closed = None if time is None else time / (time + 3 * microbatches)
    return closed, simulate(made, even).bubble


def measured(name: str, microbatches: int, turns: int, model: str) -> tuple[float, float]:
    """(simulated with the costs that were measured, measured)."""
    work = replace(WORK[model], global_batch=2 * microbatches)
    row = Row(name, (), "ours", world=STAGES, flags={"pp": STAGES, "schedule": name, "watch": True})
    found = []
    for _ in range(turns):
        wait_until_idle()
        record = run(row, work, LIMIT_S[model])
        if "failed" in record:
            raise SystemExit(f"{name}: {record['failed']}")
        found.append(record["extra"])
    return tuple(median(float(extra[key]) for extra in found) for key in ("bubble_predicted", "bubble"))  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=WORK, default="small")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each")
    parser.add_argument("--schedule", action="append", choices=CHUNKS)
    parser.add_argument("--out", type=Path, help="the page")
    args = parser.parse_args()
    rows = []
    for name, microbatches in product(args.schedule or CHUNKS, (4, 8)):
        closed, simulated = predicted(name, microbatches)
        costed, real = measured(name, microbatches, args.repeat, args.model)
        cells = ["-" if closed is None else f"{closed:.1%}", *(f"{x:.1%}" for x in (simulated, costed, real))]
        rows.append(f"| {name} | {microbatches} | {' | '.join(cells)} | {real / costed:.2f} |\n")
        print(rows[-1], end="", flush=True)
    session = describe_session()
    where = f"{session['cpu']}, {session['cores']} cores, torch {session['versions']['torch']}."
    if args.out:
        args.out.write_text(HEAD.format(stages=STAGES, turns=args.repeat, session=where) + "".join(rows))


if __name__ == "__main__":
    main()
