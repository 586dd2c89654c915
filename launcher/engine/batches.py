"""Helpers of train_batch() and eval_batch(): endless epochs, device transfer, the loss of a model output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from launcher.errors import ConfigError


def forever(loader: Any, epochs: int | None = None) -> Iterator[Any]:
    """Yield the loader's batches, epoch after epoch, reshuffled for each epoch.

    Raises:
        ConfigError: the loader yields no batch, or `epochs` epochs have passed.
    """
    for epoch in count():
        if epoch == epochs:
            raise ConfigError(
                f"all {epochs} passes over training_data are complete",
                where="data_efficiency.data_sampling.num_epochs",
                fix="increase it, or end the loop earlier",
            )
        set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ConfigError("training_data has no full microbatch for this rank", fix="provide more rows")


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on `device`."""
    return _map(batch, lambda t: t.to(device, non_blocking=True))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the value with all its floating-point tensors cast to `dtype`."""
    return _map(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def call(module: Callable[..., Any], batch: Any) -> Any:
    """Return module(batch), passing a dict as keywords and a list or tuple as positional arguments."""
    if isinstance(batch, dict):
        return module(**batch)
    if isinstance(batch, list | tuple):
        return module(*batch)
    return module(batch)


def loss_in(output: Any) -> Tensor:
    """Return the loss of a model output: the output itself, its "loss", or its first element."""
    if isinstance(output, Tensor):
        return output
    loss: Tensor = output["loss"] if isinstance(output, dict) else output[0]
    return loss


def outputs_in(output: Any) -> Any:
    """Return the logits of a model output if it has any, else the output itself."""
    if isinstance(output, dict):
        return output.get("logits", output)
    return output


def without_labels(batch: Any) -> Any:
    """Return the batch without its labels."""
    if isinstance(batch, dict):
        return {key: value for key, value in batch.items() if key != "labels"}
    return batch[:1] if isinstance(batch, list | tuple) else batch


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, change, value)
