"""One training run on the ranks of a pool, by the engine, beside `tests.pool.reference.train_plain`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import launcher
from launcher.comm import CollectiveRecord, record_collectives
from launcher.zero.unit import Unit
from tests.pool import RankContext
from tests.pool.device import DEVICE
from tests.pool.logical import logical_parameters
from tests.pool.reference import batch, share, tiny_gpt2, tiny_llama

SEQUENCES, STEPS, LR = 12, 10, 1e-2
LAYERS = 2


@dataclass(frozen=True)
class Case:
    """What a run is made of. Everything is plain data: it travels to the ranks."""

    stage: int = 0
    accumulation: int = 1
    dtype: str = "fp32"
    tied: bool = False
    checkpointing: str = ""  # "", "json", "hf", "hf-reentrant"
    clip: float = 0.0
    steps: int = STEPS
    kind: str = "llama"
    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """What a run left on one rank."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]
    held: dict[str, int]
    records: list[CollectiveRecord]  # of the last step


def config_of(case: Case, world: int) -> dict[str, Any]:
    """The JSON of a case."""
    config: dict[str, Any] = {
        "train_batch_size": SEQUENCES,
        "gradient_accumulation_steps": case.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "gradient_clipping": case.clip,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0, **case.zero},
    }
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    if case.checkpointing == "json":
        config["activation_checkpointing"] = {}
    return {**config, **case.config}


def model_of(case: Case) -> Any:
    model = tiny_llama(case.tied, LAYERS) if case.kind == "llama" else tiny_gpt2(case.tied, LAYERS)
    if case.checkpointing.startswith("hf"):
        reentrant = case.checkpointing == "hf-reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def train(ctx: RankContext, case: Case) -> Trained:
    """Train the case's model on this rank's share; losses are means over the global batch."""
    engine, *_ = launcher.initialize(model=model_of(case), config=config_of(case, ctx.world), device=DEVICE)
    losses, norms = [], []
    last: list[CollectiveRecord]
    for step in range(case.steps):
        total = torch.zeros((), dtype=torch.float64)
        with record_collectives() as last:
            for ids in share(batch(step, SEQUENCES), ctx.rank, ctx.world, case.accumulation):
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                total += loss.detach().double().cpu() / case.accumulation
                engine.step()
        dist.all_reduce(total)
        losses.append(float(total) / ctx.world)
        norms.append(engine.get_global_grad_norm())
    weights = {piece.name: torch.empty(piece.shape) for piece in engine.zero.slices()}
    for name, value in logical_parameters(engine.zero):
        weights[name] = value.float().cpu().clone()
    return Trained(losses, norms, weights, engine.held_bytes(), last)


def watch_in_flight(engine: Any) -> list[int]:
    """From now on, gradient elements that are under way, each time a unit has been handed over."""
    seen: list[int] = []
    launch = engine.zero.reducer._launch

    def watched(unit: Unit) -> None:
        launch(unit)
        seen.append(sum(chunk.elements for chunk in engine.zero.reducer.in_flight))

    engine.zero.reducer._launch = watched
    return seen
