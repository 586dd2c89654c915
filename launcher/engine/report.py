"""The report of a run on its engine: how large the model is, and how the last step went through its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from launcher.comm import all_reduce
from launcher.engine.engine import Engine
from launcher.pipeline.timeline.recording import write
from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate


def parameters(engine: Engine) -> int:
    """Return the elements of the logical parameters of all stages. Every rank must call it."""
    mine = sum(slot.logical_numel for slot in engine.zero.slots.values() if slot.holders.rank == 0)
    count = torch.tensor(mine, dtype=torch.float64, device=engine.device)
    all_reduce(count, engine.mesh.axes["pp"], "root/parameters").wait()
    return int(count)


def last_step(engine: Engine, path: Path | None) -> dict[str, Any] | None:
    """Return the numbers of the last step through the stages; None without stages. Every rank must call it.

    Args:
        path: where the record of the step goes (`pipeline/timeline/recording.py`); None: nowhere.
    """
    runtime = engine.runtime
    if runtime.staged.is_whole or runtime.stopwatch.schedule is None:
        return None
    made, measured = runtime.stopwatch.schedule, runtime.stopwatch.timeline(runtime.axis)
    if path is not None:
        write(path, measured)
    return {
        "schedule": made.name,
        "stages": made.stages,
        "chunks": made.chunks,
        "microbatches": made.microbatches,
        "bubble": measured.bubble,
        "bubble_predicted": simulate(made, MicrobatchCosts.measured(measured)).bubble,
        "most_held": list(measured.peak_held),
    }
