"""Compares every schedule with one process: losses, gradient norms and weights over 10 steps.

    python -m tests.pipeline.parity_table [--write]

trains all cases (takes minutes), and fails if a run differs from one process. With --write it writes docs/stages.md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch

from tests.pipeline.running import CLIP, LR, advance, config_of, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import PlainRun, batch, tiny_llama, train_plain

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
DEPTHS = (2, 4)
MICROBATCHES = (1, 2, 4, 8)
ZERO = (0, 1, 2, 3)
STEPS = 10
TOLERANCE = 1e-5
PAGE = Path(__file__).resolve().parents[2] / "docs" / "stages.md"


@dataclass(frozen=True)
class Case:
    """The configuration of one run."""

    schedule: str
    microbatches: int
    zero: int
    tied: bool

    def __str__(self) -> str:
        return f"{self.schedule}-m{self.microbatches}-z{self.zero}{'-tied' * self.tied}"


@dataclass(frozen=True)
class Found:
    """The relative errors of a run, and how many activations a rank held.

    Args:
        held, deferred: (virtual stage, microbatch) at once.
    """

    losses: float
    norms: float
    weights: float
    held: int
    promised_held: int
    deferred: int
    promised_deferred: int

    @property
    def largest(self) -> float:
        return max(self.losses, self.norms, self.weights)


def layers_of(world: int) -> int:
    return 2 * world  # two chunks per rank


@cache
def truth(layers: int, tied: bool, steps: int, microbatches: int) -> PlainRun:
    """Train in one process with the same number of microbatches: rounding depends on it, up to 3e-5 in 10 steps."""
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    return train_plain(tiny_llama(tied, layers), batch, adamw, steps, microbatches, CLIP)


def differences(ctx: RankContext, cases: list[Case], steps: int = STEPS) -> list[Found]:
    """Train each case on all ranks, with one stage per rank."""
    return [compare(ctx, case, steps) for case in cases]


def compare(ctx: RankContext, case: Case, steps: int, first: int = 0) -> Found:
    """Train for `steps` steps from `first` on, and compare; the run in one process starts at step 0."""
    layers = layers_of(ctx.world)
    config = config_of(case.zero, case.microbatches, {"stages": ctx.world, "schedule": case.schedule})
    engine = engine_of(config, tiny_llama(case.tied, layers))
    losses, norms = advance(engine, range(first, first + steps))
    weights, runtime = whole_weights(engine), engine.runtime
    schedule, rank = runtime.schedule(case.microbatches), engine.mesh.axes["pp"].rank
    engine.destroy()
    want = truth(layers, case.tied, steps, case.microbatches)
    if weights.keys() != want.weights.keys():
        raise AssertionError(f"{case}: {sorted(weights.keys() ^ want.weights.keys())}")
    return Found(
        max(abs(a / b - 1) for a, b in zip(losses, want.losses, strict=True)),
        max(abs(a / b - 1) for a, b in zip(norms, want.grad_norms, strict=True)),
        max(float((weights[name] - weight).norm() / weight.norm()) for name, weight in want.weights.items()),
        runtime.most_held,
        schedule.held[rank],
        runtime.most_deferred,
        schedule.deferred[rank],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare every schedule with one process.")
    parser.add_argument("--write", action="store_true", help="write docs/stages.md")
    write: bool = parser.parse_args().write
    pool, rows, wrong = WorkerPool(), [], []
    for world, schedule, microbatches in product(DEPTHS, SCHEDULES, MICROBATCHES):
        cases = [Case(schedule, microbatches, zero, tied) for tied in (False, True) for zero in ZERO]
        ranks = pool.run(differences, world, cases, timeout=900)
        cells = []
        for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
            largest = max(f.largest for f in found)
            kept = all(f.held <= f.promised_held and f.deferred <= f.promised_deferred for f in found)
            cells.append(f"{largest:.1e}")
            if largest > TOLERANCE or not kept:
                wrong.append(f"{world} stages, {case}: {found}")
        held = " ".join(str(rank[0].held) for rank in ranks)
        rows.append(f"| {schedule} | {world} | {microbatches} | " + " | ".join(cells) + f" | {held} |")
        print(rows[-1], flush=True)
    pool.close()
    if write:
        PAGE.write_text(page_of(rows))
    print("\n".join(wrong))
    return 1 if wrong else 0


def page_of(rows: list[str]) -> str:
    stages = " | ".join(f"ZeRO {zero}{', tied' * tied}" for tied in (False, True) for zero in ZERO)
    lines = [
        "# Stages beside one process",
        "",
        "The largest relative difference from a run of plain PyTorch in one process, over the loss and gradient norm",
        f"of {STEPS} steps and the weights after them: a tiny Llama in fp32, AdamW with clipping, one rank per stage.",
        "Tied: embedding and head share their weight. Held: the maximum number of microbatches (counted per chunk)",
        "whose activations a rank stored at the same time, listed by rank.",
        "`make stages` measures the differences and fails above 1e-5; `make pages` generates this page.",
        "",
        f"| schedule | stages | microbatches | {stages} | held |",
        "|---|---:|---:|" + "---:|" * (2 * len(ZERO)) + "---|",
        *rows,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
