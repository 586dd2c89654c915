"""Human-readable descriptions of an engine: ranks, batch, size, and the last step's pipeline timeline."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from launcher.comm import all_reduce
from launcher.monitor.log import say
from launcher.tensor.split import is_quantized, whole_numel

if TYPE_CHECKING:
    from launcher.engine.engine import Engine
    from launcher.pipeline.timeline.simulate import Timeline

logger = logging.getLogger("launcher")


def ranks(engine: Engine) -> str:
    """Return a description of the ranks, parallelism, ZeRO stage and precision."""
    device = engine.device.type
    backend = "nccl" if device == "cuda" else "gloo"
    through = str(engine.mesh.dp.transports or engine.mesh.axes["tp"].transports or "")
    stages, shared = engine.mesh.axes["pp"].degree, engine.mp_world_size
    autocast = engine.resolved.torch_autocast
    cp, shares = engine.sequence_parallel_size, engine.shared_sequences
    ep = engine.resolved.expert_parallel.degree
    how = "by the script" if shares is None else shares.layout.in_words()
    return (
        f"{engine.world_size} on {device} ({backend}{', ' + through if through else ''}), "
        + (f"{stages} pipeline stages, " if stages > 1 else "")
        + (f"tensor parallel {shared}, " if shared > 1 else "")
        + (f"context parallel {cp} ({how}), " if cp > 1 else "")
        + (f"expert parallel {ep}, " if ep > 1 else "")
        + f"ZeRO stage {engine.zero_optimization_stage()}, {engine.resolved.dtype}"
        + (f" under autocast to {autocast.dtype or 'bf16'}" if autocast.enabled else "")
        + (" with float8 products" if engine.resolved.fp8.enabled else "")
    )


def batch(engine: Engine) -> str:
    """Return how the global batch size is composed."""
    micro, ranks = engine.train_micro_batch_size_per_gpu(), engine.dp_world_size
    steps = engine.gradient_accumulation_steps()
    return (
        f"{engine.train_batch_size()} = {micro} per microbatch x {steps} accumulation step{'s' * (steps > 1)} x "
        f"{ranks} rank{'s' * (ranks > 1)}"
    )


def announce(engine: Engine) -> None:
    """Log ranks and batch of a script's engine on rank 0; recipes print them themselves."""
    if engine.mesh.rank == 0:
        logger.info("launcher engine: ranks %s; batch %s", ranks(engine), batch(engine))


def loaded(engine: Engine, path: Path, meta: Mapping[str, Any]) -> None:
    """Print on rank 0 which foreign checkpoint a script has loaded; recipes print it themselves."""
    if engine.mesh.rank == 0 and not engine.quiet and "writer" in meta:
        say(f"loaded {path}: step {meta['global_steps']}, written by {meta['writer']}")


def other_batch(engine: Engine, meta: Mapping[str, Any]) -> None:
    """Warn on rank 0 if a script resumes with another global batch size; recipes handle this themselves."""
    was, now = _batch_of(meta), engine.train_batch_size()
    if engine.mesh.rank == 0 and not engine.quiet and was not in (None, now):
        logger.warning(
            "the global batch is %d sequences, but was %d in the checkpoint: the learning rate and "
            "step count may need to be adjusted",
            now,
            was,
        )


def _batch_of(meta: Mapping[str, Any]) -> int | None:
    """Return the global batch size of the saved run, or None if it is unknown or changed during the run."""
    said = (meta["config"] or {}).get("train_batch_size")
    steps, samples = meta["global_steps"], meta["global_samples"]
    if isinstance(said, int):
        return said
    return samples // steps if steps and samples and samples % steps == 0 else None


def parameters(engine: Engine, *, trained: bool = False) -> int:
    """Return the number of parameters of the whole model, or of those that are trained. Every rank must call
    it."""
    mine = sum(
        whole_numel(slot.leaf) if is_quantized(slot.leaf) else slot.logical_numel
        for slot in engine.zero.slots.values()
        if slot.holders.rank == 0 and (slot.leaf.requires_grad or not trained)
    )
    return int(_over_stages(engine, mine))


def active_parameters(engine: Engine) -> float:
    """Return the number of active parameters per token: only selected experts. Every rank must call it."""
    from launcher.experts.modules import experts_in, number_of

    config: Any = engine.module.config
    text = config.get_text_config()
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "num_selected_experts", None) or 1
    part = {name: min(1.0, chosen / number_of(module)) for name, module in experts_in(engine.module)}
    mine = 0.0
    for name, slot in engine.zero.slots.items():
        if slot.holders.rank == 0:
            share = next((part[experts] for experts in part if name.startswith(f"{experts}.")), 1.0)
            mine += share * slot.logical_numel
    return _over_stages(engine, mine)


def _over_stages(engine: Engine, mine: float) -> float:
    count = torch.tensor(mine, dtype=torch.float64, device=engine.device)
    all_reduce(count, engine.mesh.axes["pp"], "root/parameters").wait()
    return float(count)


def write_timeline(engine: Engine, path: Path | None) -> Timeline | None:
    """Write and return the timeline of the last step on all stages; None without stages. Every rank must call
    it.

    Args:
        path: file for the record of the step (`pipeline/timeline/recording.py`); None writes no file.
    """
    from launcher.pipeline.timeline.recording import write

    runtime = engine.runtime
    if runtime.staged.is_whole or runtime.stopwatch.schedule is None:
        return None
    measured = runtime.stopwatch.timeline(runtime.axis)
    if path is not None:
        write(path, measured)
    return measured


def last_step(engine: Engine, path: Path | None) -> dict[str, Any] | None:
    """Return pipeline statistics of the last step; None without stages. Every rank must call it.

    Args:
        path: see `write_timeline`.
    """
    from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate

    measured, made = write_timeline(engine, path), engine.runtime.stopwatch.schedule
    if measured is None or made is None:
        return None
    return {
        "schedule": made.name,
        "stages": made.stages,
        "chunks": made.chunks,
        "microbatches": made.microbatches,
        "bubble": measured.bubble,
        "bubble_predicted": simulate(made, MicrobatchCosts.measured(measured)).bubble,
        "most_held": list(measured.peak_held),
    }
