"""`Engine.eval_batch`: microbatches without gradients, and what becomes of their losses and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.engine import pipelined
from launcher.engine.batches import call, loss_in, outputs_in, to_device, without_labels
from launcher.errors import ConfigError
from launcher.tensor.head import loss_only

if TYPE_CHECKING:
    from launcher.engine.engine import Engine


def losses_and_outputs(
    engine: Engine, batches: Sequence[Any], *, with_loss: bool, with_outputs: bool
) -> tuple[list[Tensor], list[Any]]:
    """Of each microbatch; the losses on all ranks, outputs on those of the last stage.

    Args:
        batches: on the ranks of the first stage.
        with_loss: false: labels are not looked at.
        with_outputs: of Hugging Face models the logits.
    """
    outputs: list[Any] | None = [] if with_outputs else None
    if not with_loss:
        batches = [without_labels(batch) for batch in batches]
    if engine.runtime is not None:
        found, _ = pipelined.evaluate(engine, batches, outputs=outputs, with_loss=with_loss)
        return [torch.tensor(loss, device=engine.device) for loss in found], outputs or []
    losses = []
    for batch in batches:
        if outputs is None:
            with loss_only():
                output = call(engine, to_device(batch, engine.device))
        else:
            output = call(engine, to_device(batch, engine.device))
            outputs.append(outputs_in(output))
        if with_loss:
            losses.append(loss_in(output).detach().float())
    return losses, outputs or []


def reduced(engine: Engine, values: Sequence[Any], how: str | None) -> Any:
    """Of what the microbatches gave: their mean, over dp as well; or themselves.

    Raises:
        ConfigError: `how` is neither "avg" nor None.
    """
    if how is None:
        return list(values)
    if how != "avg":
        raise ConfigError(
            f"reduce_output is {how!r}", where="engine.eval_batch()", fix='give "avg", or None for a list'
        )
    return engine._mean(torch.stack(list(values)).float().mean(0)) if values else None
