"""The choice of a recipe to write checkpoints in the background, overlapped with the following steps."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from launcher.engine.engine import Engine
from launcher.monitor.memory import free_host_memory
from launcher.sizes import in_words
from launcher.zero.slot import ParamSlice


def choose_background(engine: Engine, *, frozen: bool = True) -> str | None:
    """Choose background saves if checkpoint.writer.decoupled is not set; return a line to print, or None.

    The copies need host memory, and may take half of the free memory of each node. State that is offloaded to
    NVMe is too large to copy to host memory. Call this once the optimizer state exists, from a caller that
    changes weights only in optimizer steps. Collective.

    Args:
        frozen: checkpoints contain the frozen parameters, too.
    """
    saver, writer = engine.saver, engine.resolved.checkpoint.writer
    saver.steps_alone_change = True
    if "decoupled" in writer.model_fields_set:
        return None
    offload = engine.resolved.zero_optimization
    sections = offload.offload_optimizer, offload.offload_param
    if any(section is not None and section.device == "nvme" for section in sections):
        return "checkpoints are written between steps: the state is offloaded to NVMe"
    mine = written_bytes(engine, frozen=frozen)
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


def written_bytes(engine: Engine, *, frozen: bool) -> int:
    """Return the bytes that this rank writes: weights, and the optimizer state of trained ones. At stage 0 a rank
    owns everything, but writes only its share."""
    flats = {slot.name: flat for flat in engine.zero.flats for slot in flat.slots}

    def trained(pieces: list[ParamSlice]) -> int:
        return sum(piece.stop - piece.start for piece in pieces if flats[piece.name].trainable)

    written = engine.zero.written_slices()
    weights = sum(
        (piece.stop - piece.start) * flats[piece.name].master_dtype.itemsize
        for piece in written
        if frozen or flats[piece.name].trainable
    )
    states = engine.held_bytes()["optimizer"] / max(trained(engine.zero.slices()), 1)
    return weights + int(states * trained(written))
