"""Settings of a model's config that affect its computation.

Two models with the same shapes may compute different things."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

# Keys that do not affect the computation: names, versions, caches, outputs, initialisation, generation.
_NO_MATTER = {
    "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "gradient_checkpointing", "id2label", "initializer_factor", "initializer_range", "label2id", "name_or_path",
    "output_attentions", "output_hidden_states", "pretraining_tp", "problem_type", "return_dict",
    "task_specific_params", "torch_dtype", "torchscript", "transformers_version", "use_cache",
}  # fmt: skip
_ABSENT = object()


def settings_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the settings of a Hugging Face model's config that affect its computation, as JSON values; None
    if the model has no config.

    Dropout is excluded: it is a training setting, and may change during training.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return _of_computation(plain)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe where two settings differ. A key that only one of them has comes from another version of
    transformers and is ignored at the top level."""
    return [f"{path} was {_said(a)} and is {_said(b)}" for path, a, b in _differing(was, now, "")]


def _of_computation(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _of_computation(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if not (key in _NO_MATTER or key.startswith("_") or "drop" in key)
    }


def _differing(
    was: Mapping[str, Any], now: Mapping[str, Any], path: str
) -> Iterator[tuple[str, object, object]]:
    for key in sorted({*was, *now}):
        a, b = was.get(key, _ABSENT), now.get(key, _ABSENT)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differing(a, b, f"{path}{key}.")
        elif a != b and (path or _ABSENT not in (a, b)):
            yield f"{path}{key}", a, b


def _said(value: object) -> str:
    return "not set" if value is _ABSENT else str(value)
