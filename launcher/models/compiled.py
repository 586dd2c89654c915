"""torch.compile of the transformer blocks, one by one (the JSON's `compile`, `Engine.compile`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from launcher.errors import ConfigError
from launcher.models.activation import CheckpointedForward
from launcher.models.units import unit_modules


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Compile the forward of each block; of the whole model, where it has none.

    ZeRO's hooks run around a block's forward and stay outside of the graph. A checkpointed block is compiled inside
    of its checkpoint, so that the recomputation runs what the forward ran.

    Args:
        backend: "inductor", "aot_eager", ..., or a function, as torch.compile takes it.
        options: more keyword arguments of torch.compile.

    Raises:
        ConfigError: there is no such backend, or torch.compile does not take the options.
    """
    for _, block in unit_modules(model) or [("", model)]:
        place: Any = block.forward if isinstance(block.forward, CheckpointedForward) else block
        try:
            place.forward = torch.compile(place.forward, backend=backend, **options)
        except Exception as error:
            known = ", ".join(torch.compiler.list_backends())
            raise ConfigError(
                f"torch.compile refuses backend {backend!r} with {dict(options)}: {error}".splitlines()[0],
                where="compile, or Engine.compile()",
                fix=f"write one of the backends {known}, and in kwargs what torch.compile takes",
            ) from error
