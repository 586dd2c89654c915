"""The choice of a recipe to write checkpoints in the background, overlapped with the following steps."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from launcher.engine.engine import Engine
from launcher.monitor.memory import free_host_memory
from launcher.sizes import in_words


def choose_background(engine: Engine) -> str | None:
    """Choose background saves if checkpoint.writer.decoupled is not set; return a line to print, or None.

    The copies need host memory, and may take half of the free memory of each node. State that is offloaded to
    NVMe is too large to copy to host memory. Call this once the optimizer state exists, from a caller that
    changes weights only in optimizer steps. Collective.
    """
    saver, writer = engine.saver, engine.resolved.checkpoint.writer
    saver.steps_alone_change = True
    if "decoupled" in writer.model_fields_set:
        return None
    offload = engine.resolved.zero_optimization
    sections = offload.offload_optimizer, offload.offload_param
    if any(section is not None and section.device == "nvme" for section in sections):
        return "checkpoints are written between steps: the state is offloaded to NVMe"
    held = engine.held_bytes()
    owned, written = (
        sum(piece.stop - piece.start for piece in pieces)
        for pieces in (engine.zero.slices(), engine.zero.written_slices())
    )
    # At stage 0 a rank owns everything, but writes only its share.
    mine = int((held["optimizer"] + (held["master"] or held["parameters"])) * written / max(owned, 1))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = free_host_memory()
    fits = torch.tensor(float(2 * mine * ranks_here <= free), device=engine.device)
    dist.all_reduce(fits, dist.ReduceOp.MIN)
    saver.in_background = bool(fits)
    copies = f"copies take {in_words(mine)} of host memory per rank"
    if saver.in_background:
        return f"checkpoints are written in the background: {copies}"
    return (
        f"checkpoints are written between steps: {copies}, but only {in_words(free)} is free for "
        f"{ranks_here} rank{'s' * (ranks_here != 1)}"
    )
