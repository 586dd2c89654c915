"""Activation checkpointing of transformer blocks (the JSON's `activation_checkpointing`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from launcher.config import ActivationCheckpointingConfig


def checkpoint_blocks(
    blocks: list[tuple[str, nn.Module]], config: ActivationCheckpointingConfig | None
) -> list[str]:
    """Let blocks keep only their inputs and recompute the rest in backward.

    Args:
        blocks: (name, module) in the order of the forward.
        config: None: nothing is checkpointed; `number_checkpoints` blocks, spread evenly, else all.

    Returns:
        Names of the checkpointed blocks.
    """
    if config is None:
        return []
    count = min(config.number_checkpoints or len(blocks), len(blocks))
    chosen = [blocks[i * len(blocks) // count] for i in range(count)]
    for _, module in chosen:
        module.forward = _checkpointed(module.forward, on_cpu=config.cpu_checkpointing)  # type: ignore[method-assign]
    return [name for name, _ in chosen]


def _checkpointed(forward: Callable[..., Any], *, on_cpu: bool) -> Callable[..., Any]:
    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        if not on_cpu:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        with save_on_cpu():  # outside the checkpoint: it moves the inputs that the checkpoint keeps
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed_forward
