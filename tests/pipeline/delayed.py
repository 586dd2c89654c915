"""Training with weights that are some updates old, in one process and without any of the launcher's code but the lists:
what asynchronous schedules are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from launcher.pipeline.schedules import schedule
from launcher.pipeline.schedules.actions import PipelineSchedule
from launcher.pipeline.schedules.asynchronous import weights_used
from tests.pool.reference import batch

Weights = dict[str, Tensor]


def of_language_model(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def simulated(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stage_of: Mapping[str, int],
    seen: Callable[[int, int, int], int],
    *,
    steps: int,
    microbatches: int,
    every: int,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = of_language_model,
) -> list[float]:
    """Train on `batch(step)`; the loss of each step.

    Args:
        model: plain, in fp32; has the newest weights afterwards.
        stage_of: the stage of each parameter.
        seen: (stage, step, microbatch) -> number of updates that the weights have behind them which it sees there.
        every: microbatches whose gradients make an update.
        loss_of: of a model on a microbatch.
    """
    newest = {name: p.detach().clone() for name, p in model.named_parameters()}
    history: list[Weights] = [newest]
    losses = []
    for step in range(steps):
        total = 0.0
        for microbatch, ids in enumerate(batch(step).chunk(microbatches)):
            _take(
                model,
                {name: history[seen(stage, step, microbatch)][name] for name, stage in stage_of.items()},
            )
            loss = loss_of(model, ids)
            (loss / every).backward()
            total += loss.item() / microbatches
            if (microbatch + 1) % every == 0:
                _take(model, history[-1])
                optimizer.step()
                optimizer.zero_grad()
                history.append({name: p.detach().clone() for name, p in model.named_parameters()})
        losses.append(total)
    return losses


@torch.no_grad()
def _take(model: nn.Module, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def stream(one_step: PipelineSchedule, steps: int) -> PipelineSchedule:
    """Several steps of an asynchronous schedule with no draining between them: microbatch j is of step j // m."""
    joined = schedule(one_step.name, one_step.stages, one_step.microbatches * steps)
    return replace(joined, update_every=one_step.update_every)


def seen_by(name: str, stages: int, microbatches: int, steps: int) -> Callable[[int, int, int], int]:
    """Of a schedule: (stage, step, microbatch) -> updates behind the weights that it sees. "pipedream" begins every
    step with an empty pipeline, so with the newest weights on all stages."""
    one = schedule(name, stages, microbatches)
    if name == "pipedream":
        inside: Sequence[Sequence[int]] = weights_used(one)
        return lambda stage, step, microbatch: step * microbatches + inside[stage][microbatch]
    through = weights_used(stream(one, steps))
    return lambda stage, step, microbatch: through[stage][step * microbatches + microbatch]
