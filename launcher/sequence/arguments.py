"""Checks the arguments of a forward over sharded sequences: rejects those that a slice alone cannot serve."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from launcher.errors import ConfigError
from launcher.sequence.inputs import MASK, POSITIONS, refused

CACHE = "past_key_values"
_OF_LAYERS = ("output_attentions", "output_router_logits")
"""Arguments that request an output of every layer."""
_MEDIA = ("pixel_values", "image_", "video_", "audio_", "input_features", "input_values")
"""Prefixes of arguments that do not have one value per token."""


def check_arguments(model: nn.Module, batch: Mapping[str, Any], *, pads_alone: bool) -> None:
    """Raise ConfigError for an argument that cannot be served from a rank's slice alone.

    Args:
        batch: arguments of the forward by name.
        pads_alone: for padded batches, the model computes positions other than 0, 1, 2, ...
    """
    if batch.get("logits_to_keep"):
        raise refused(model, "was called with logits_to_keep")
    for key in _OF_LAYERS:
        if batch.get(key):
            raise refused(model, f"was called with {key}, of which each rank computes only a part")
    for key, value in batch.items():
        if value is not None and key.startswith(_MEDIA):
            raise refused(model, f"was called with {key}, which correspond to positions in the full sequence")
    embeddings: Any = model
    if model.training and getattr(embeddings.get_input_embeddings(), "neftune_noise_alpha", None):
        raise refused(model, "adds noise that depends on the length of a rank's slice (neftune_noise_alpha)")
    kept = batch.get(MASK)
    if pads_alone and batch.get(POSITIONS) is None and kept is not None and not bool(kept.all()):
        raise ConfigError(
            f"{type(model).__name__} computes {POSITIONS} from the padding mask, which does not work on a slice of the "
            "sequence",
            where=f"forward: {POSITIONS}",
            fix=f"pass {POSITIONS}, or batches without padding",
        )


def check_length(model: nn.Module, length: int) -> None:
    """Raise ConfigError if a model scales queries by their index in the slice (Llama 4, beyond 8,191)."""
    given: Any = model.config
    config = given.get_text_config()
    if getattr(config, "attn_temperature_tuning", False) and length >= config.floor_scale:
        raise refused(
            model,
            f"scales queries from position {config.floor_scale:,} on (attn_temperature_tuning), counting "
            "positions within a rank's slice",
        )


class NoCacheError(ConfigError, AttributeError):
    """Raised when the cache of a forward without one is used."""

    def __init__(self) -> None:
        super().__init__(
            "no KV cache is kept for a sharded sequence unless the model is called with use_cache=True",
            where=f"outputs.{CACHE}",
            fix="pass use_cache=True from the first call on, or call generate()",
        )


class NoCache:
    """Placeholder for the cache that a forward over sharded sequences does not produce; hand-written
    generation loops pass it back to the model."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NoCacheError


def takes(module: nn.Module, name: str) -> bool:
    """Return whether a module's forward accepts an argument, by name or through `**kwargs`."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def names(module: nn.Module, name: str) -> bool:
    """Return whether a module's forward has a parameter of this name. For a wrapper (TRL), its own signature
    counts, not that of the wrapped function."""
    return name in inspect.signature(module.forward, follow_wrapped=False).parameters
