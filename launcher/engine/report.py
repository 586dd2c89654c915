"""Describes an engine to people: its ranks, batch and size, and how the last step went through its stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from launcher.comm import all_reduce
from launcher.monitor.log import say

if TYPE_CHECKING:
    from launcher.engine.engine import Engine
    from launcher.pipeline.timeline.simulate import Timeline

logger = logging.getLogger("launcher")


def ranks(engine: Engine) -> str:
    """Say on what the engine runs, at which stage and in which precision."""
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
        + (f"{shared} share each layer, " if shared > 1 else "")
        + (f"{cp} share each sequence ({how}), " if cp > 1 else "")
        + (f"{ep} share the experts of each layer, " if ep > 1 else "")
        + f"ZeRO stage {engine.zero_optimization_stage()}, {engine.resolved.dtype}"
        + (f" under autocast to {autocast.dtype or 'bf16'}" if autocast.enabled else "")
    )


def batch(engine: Engine) -> str:
    """Say what the sequences of a step are made of."""
    micro, ranks = engine.train_micro_batch_size_per_gpu(), engine.dp_world_size
    steps = engine.gradient_accumulation_steps()
    return (
        f"{engine.train_batch_size()} = {micro} per microbatch x {steps} accumulation step{'s' * (steps > 1)} x "
        f"{ranks} rank{'s' * (ranks > 1)}"
    )


def announce(engine: Engine) -> None:
    """Log on rank 0 what a script's engine runs on; recipes print it themselves."""
    if engine.mesh.rank == 0:
        logger.info("launcher's engine: ranks %s; batch %s", ranks(engine), batch(engine))


def loaded(engine: Engine, path: Path, meta: Mapping[str, Any]) -> None:
    """Say on rank 0 what a script has loaded, where another program wrote it; recipes print it themselves."""
    if engine.mesh.rank == 0 and not engine.quiet and "writer" in meta:
        say(f"loaded {path}: step {meta['global_steps']}, written by {meta['writer']}")


def other_batch(engine: Engine, meta: Mapping[str, Any]) -> None:
    """Say on rank 0 that a script goes on with another global batch; recipes keep it, or say it themselves."""
    was, now = _batch_of(meta), engine.train_batch_size()
    if engine.mesh.rank == 0 and not engine.quiet and was not in (None, now):
        logger.warning(
            "a step has %d sequences, and had %d in the checkpoint: the learning rate and the number of steps mean "
            "something else now",
            now,
            was,
        )


def _batch_of(meta: Mapping[str, Any]) -> int | None:
    """Return the global batch of the run that saved a checkpoint; None: it does not say, or had several."""
    said = (meta["config"] or {}).get("train_batch_size")
    steps, samples = meta["global_steps"], meta["global_samples"]
    if isinstance(said, int):
        return said
    return samples // steps if steps and samples and samples % steps == 0 else None


def parameters(engine: Engine) -> int:
    """Return the elements of the logical parameters of all stages. Every rank must call it."""
    mine = sum(slot.logical_numel for slot in engine.zero.slots.values() if slot.holders.rank == 0)
    return int(_over_stages(engine, mine))


def active_parameters(engine: Engine) -> float:
    """Return the elements of the parameters that a token goes through: of experts those that are chosen. Every rank
    must call it."""
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
    """Write when the actions of the last step ran on all stages, and return it; None without stages. Every rank must
    call it.

    Args:
        path: where the record of the step goes (`pipeline/timeline/recording.py`); None: nowhere.
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
    """Return the numbers of the last step through the stages; None without stages. Every rank must call it.

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
