"""Compiles the transformer blocks one by one with torch.compile (the JSON's `compile`, `Engine.compile`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from launcher.errors import ConfigError
from launcher.models.activation import CheckpointedForward
from launcher.models.units import unit_modules


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Compile the forward of each block, or of the whole model if it has no blocks.

    ZeRO's hooks run around a block's forward and stay outside of the graph. A checkpointed block is compiled
    inside its checkpoint, so that the recomputation runs the same code as the forward.

    Args:
        backend: "inductor", "aot_eager", ..., or a function, as for torch.compile.
        options: additional keyword arguments of torch.compile.

    Raises:
        ConfigError: torch.compile rejects the backend or the options.
    """
    for _, block in unit_modules(model) or [("", model)]:
        place: Any = block.forward if isinstance(block.forward, CheckpointedForward) else block
        try:
            place.forward = torch.compile(place.forward, backend=backend, **options)
        except Exception as error:
            known = ", ".join(torch.compiler.list_backends())
            raise ConfigError(
                f"torch.compile rejected backend {backend!r} with {dict(options)}: {error}".splitlines()[0],
                where="compile, or Engine.compile()",
                fix=f"use one of the backends {known}, and only arguments of torch.compile in kwargs",
            ) from error
