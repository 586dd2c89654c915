"""Engines on the ranks of the pool, watched as a JSON says, and what they then printed, wrote and sent."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from typing import Any

import torch

import launcher
from launcher.comm import CollectiveRecord, log_summary, record_collectives
from launcher.comm.log import read_log
from launcher.monitor.comms import CollectiveKey, CollectiveTotals
from tests.pool import RankContext
from tests.pool.reference import batch, share
from tests.zero.training import SEQUENCES, Case, config_of, model_of


@dataclass
class Watched:
    """What a run left on one rank."""

    losses: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    times: list[dict[str, float]] = field(default_factory=list)
    steps: list[list[CollectiveRecord]] = field(default_factory=list)  # of each step
    printed: str = ""
    rows: dict[CollectiveKey, CollectiveTotals] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    hooks: list[int] = field(default_factory=list)  # on the modules, after each step
    answers: dict[str, Any] = field(default_factory=dict)


def watch(ctx: RankContext, case: Case) -> Watched:
    """Train the case for its steps; the losses are this rank's, of each microbatch."""
    seen, out = Watched(), io.StringIO()
    with contextlib.redirect_stdout(out):
        engine, *_ = launcher.initialize(
            model=model_of(case), config=config_of(case, ctx.world), device=torch.device("cpu")
        )
        engine.telemetry.say = seen.said.append
        for step in range(case.steps):
            with record_collectives() as records:
                for ids in share(batch(step, SEQUENCES), ctx.rank, ctx.world, case.accumulation):
                    loss = engine(input_ids=ids, labels=ids).loss
                    seen.losses.append(float(engine.backward(loss)))
                    engine.step()
            seen.steps.append(records)
            seen.times.append(engine.get_wall_clock_timers())
            seen.hooks.append(sum(len(m._forward_pre_hooks) for m in engine.module.modules()))
        seen.held = engine.held_bytes()
        log_summary(show_straggler=True)
        log = read_log()
        seen.rows = {} if log is None else log.rows
        engine.monitor.write_events([("Eval/loss", 1.5, engine.global_samples)])
        seen.answers = {
            "monitor": engine.monitor.enabled,
            "wall_clock_breakdown": engine.wall_clock_breakdown(),
            "samples": engine.global_samples,
        }
        engine.destroy()
    seen.printed = out.getvalue()
    return seen
