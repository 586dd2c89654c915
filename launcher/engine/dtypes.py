"""Parameters and buffers whose dtype differs from the model's, from `data_types` and `torch_autocast`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from launcher.config import Config
from launcher.errors import ArgumentsError, ConfigError
from launcher.models.units import class_before
from launcher.tensor.split import is_quantized

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
STATES = "fp32_optimizer_states"
SAFE_MODULES = "torch_autocast.lower_precision_safe_modules"


def autocast_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype of `torch_autocast`, or None if it is disabled."""
    section = config.torch_autocast
    return DTYPES[str(section.dtype or "bf16")] if section.enabled is True else None


def compute_dtype(config: Config) -> torch.dtype:
    """Return the dtype of the products of forward and backward."""
    return autocast_dtype(config) or DTYPES[str(config.dtype)]


def scales_loss(config: Config) -> bool:
    """Return whether gradients are float16, so that the loss is scaled."""
    return bool(config.fp16.enabled) or autocast_dtype(config) is torch.float16


def state_dtype(config: Config, client: Any = None) -> torch.dtype:
    """Return the lowest precision of optimizer states: bf16 if requested and master weights are bf16, else
    fp32.

    Args:
        client: the script's own optimizer, which replaces the configured one.

    Raises:
        ArgumentsError: the config requests bf16 states, but the script's optimizer was created with float32
            states.
    """
    asked = client if client is not None else config.optimizer and config.optimizer.params
    narrow = not getattr(asked, STATES, True)
    if client is not None and not narrow and config.bf16.bf16_optimizer_states and hasattr(asked, STATES):
        raise ArgumentsError(
            f"bf16.bf16_optimizer_states is true, but {type(client).__name__} was created with float32 "
            "states",
            where="initialize(optimizer=...)",
            fix=f"create it with {STATES}=False, or set bf16_optimizer_states to false",
        )
    if config.bf16.enabled and (
        config.bf16.bf16_optimizer_states or (narrow and config.bf16.bf16_master_weights_and_grads)
    ):
        return torch.bfloat16
    return torch.float32


def special_dtypes(config: Config, model: nn.Module) -> dict[str, torch.dtype]:
    """Return parameter name -> dtype, for parameters whose dtype differs from the model's.

    In a 16-bit model these are the parameters that match `data_types.keep_in_fp32_modules`. Under
    torch_autocast these are the floating-point parameters of the modules in `lower_precision_safe_modules`.
    Quantized weights always keep their dtype.

    Raises:
        ConfigError: a configured name matches nothing.
    """
    packed = {name: p.dtype for name, p in model.named_parameters() if is_quantized(p)}
    return _configured_dtypes(config, model) | packed


def _configured_dtypes(config: Config, model: nn.Module) -> dict[str, torch.dtype]:
    lower = autocast_dtype(config)
    if lower is not None:
        classes = tuple(
            _module_class(name) for name in _listed(config.torch_autocast.lower_precision_safe_modules)
        )
        chosen = {
            id(p)
            for module in model.modules()
            if class_before(module) in classes
            for p in module.parameters(recurse=False)
        }
        return {
            name: lower for name, p in model.named_parameters() if id(p) in chosen and p.is_floating_point()
        }
    kept = kept_in_fp32(config, model)
    if kept is None:
        return {}
    return {
        name: torch.float32
        for name, p in model.named_parameters()
        if p.is_floating_point() and kept.search(name)
    }


def kept_in_fp32(config: Config, model: nn.Module) -> re.Pattern[str] | None:
    """Return a pattern for the names of parameters and buffers that stay float32, or None if there are none.

    The pattern matches anywhere in a name, as in Hugging Face's from_pretrained.

    Raises:
        ConfigError: a configured pattern matches no parameter or buffer.
    """
    listed = config.data_types.keep_in_fp32_modules
    if config.dtype == "fp32":
        return None
    if listed is None:
        patterns = list(_own_lists(model, fp16=config.dtype == "fp16"))
    else:
        patterns = [re.escape(name).replace(r"\*", ".*") for name in _listed(listed)]
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        for name, pattern in zip(listed, patterns, strict=True):
            if not any(re.search(pattern, known) for known in names):
                raise ConfigError(
                    f"{name!r} matches no parameter or buffer of the model",
                    where="data_types.keep_in_fp32_modules",
                    fix=f"use part of a name such as {names[0]!r}, or remove the entry",
                )
    return re.compile("|".join(patterns)) if patterns else None


def cast_buffers(config: Config, model: nn.Module) -> None:
    """Cast floating-point buffers to `data_types.buffer_dtype`, or to float32 if they are kept in float32."""
    wanted = config.data_types.buffer_dtype
    kept = kept_in_fp32(config, model)
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point():
                continue
            if kept is not None and kept.search(f"{prefix}.{key}" if prefix else key):
                module._buffers[key] = buffer.float()
            elif wanted is not None:
                module._buffers[key] = buffer.to(DTYPES[str(wanted)])


def _own_lists(model: nn.Module, *, fp16: bool) -> Iterator[str]:
    attributes = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if fp16 else [])]
    for prefix, module in model.named_modules():
        for attribute in attributes:
            names = getattr(module, attribute, None)
            for name in sorted(names) if isinstance(names, list | tuple | set | frozenset) else []:
                part = re.escape(name).replace(r"\*", ".*")
                yield rf"^{re.escape(prefix)}\..*{part}" if prefix else part


def _listed(names: tuple[str, ...] | str | None) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else ()


def _module_class(name: str) -> type[nn.Module]:
    package, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(package), attribute)
    except (ImportError, AttributeError, ValueError):
        found = None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            f"{name!r} is not a module class that can be imported",
            where=SAFE_MODULES,
            fix='use the full name, such as "torch.nn.Linear"',
        )
    return found
