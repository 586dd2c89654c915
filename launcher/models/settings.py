"""Settings of a model's config that change how it computes: two models of the same shapes may compute different
things."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

# What changes no number of a trained model: names, versions, caches, outputs, first values, what generation reads.
_NO_MATTER = {
    "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "gradient_checkpointing", "id2label", "initializer_factor", "initializer_range", "label2id", "name_or_path",
    "output_attentions", "output_hidden_states", "pretraining_tp", "problem_type", "return_dict",
    "task_specific_params", "torch_dtype", "torchscript", "transformers_version", "use_cache",
}  # fmt: skip
_ABSENT = object()


def settings_of(model: nn.Module) -> dict[str, Any] | None:
    """Return what the config of a Hugging Face model says of its computation, in JSON; None where the model has none.

    Dropout is not compared: it is a setting of the training, and may change on the way.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return _of_computation(plain)


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return where two settings differ, for people. A key that only one has is of another version of transformers."""
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
    return "not there" if value is _ABSENT else str(value)
