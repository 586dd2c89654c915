"""`dump_state`: a human-readable description of an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.engine import report

if TYPE_CHECKING:
    from launcher.engine.engine import Engine


def state_lines(engine: Engine) -> Iterator[str]:
    """Yield lines about mesh, batch, model, flat buffers, optimizer, schedule and the resolved config."""
    slots = engine.zero.slots.values()
    yield f"engine of {type(engine.module).__name__} at ZeRO stage {engine.zero_optimization_stage()}"
    yield f"  mesh           {engine.mesh.degrees} on {engine.device}"
    yield f"  batch          {report.batch(engine)}"
    parameters = sum(slot.logical_numel for slot in slots)
    yield f"  parameters     {parameters:,} in {len(slots)} tensors, {engine.resolved.dtype}"
    for gradient in engine.zero.gradients:
        flat = gradient.flat
        yield f"  flat buffer    {flat.name}: {flat.numel:,} elements, {len(flat.slots)} tensors, {flat.dtype}"
    for name, size in engine.held_bytes().items():
        yield f"  bytes held     {name}: {size:,}"
    for kind, group in zip(
        engine.get_type(), engine.optimizer.param_groups if engine.optimizer else (), strict=True
    ):
        options = {key: value for key, value in group.items() if key not in ("params", "names")}
        yield f"  param group    {kind} {options}"
    yield f"  schedule       {type(engine.lr_scheduler).__name__ if engine.lr_scheduler else 'none'}"
    yield f"  loss scale     {engine.loss_scale():g}"
    steps = f"{engine.global_steps} steps, {engine.global_samples} samples, {engine.micro_steps} microbatches"
    yield f"  counters       {steps}, {engine.skipped_steps} skipped"
    yield f"  config         {json.dumps(engine.config)}"
