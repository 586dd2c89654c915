"""`deepspeed.init_inference`: an inference-only model, on the device of this rank and in a given dtype.

No kernels are injected: the model runs with its own layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.comm import pick_device
from launcher.engine.engine_getters import ModuleHolder
from launcher.errors import ConfigError
from launcher.integrations.enumerations import DtypeEnum
from launcher.integrations.processes import logger

WHERE = "deepspeed.init_inference()"
DTYPE = "dtype"
_SPEED = """
replace_with_kernel_inject kernel_inject replace_method injection_policy injection_policy_tuple injection_dict
enable_cuda_graph use_triton triton_autotune max_out_tokens max_tokens min_out_tokens min_tokens transposed_mode
triangular_masking training_mp_size invert_mask set_empty_params
"""
SPEED = frozenset(_SPEED.split())
"""Keys for DeepSpeed's kernels. They only affect speed, and are ignored."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "base_dir": ("", None),
    "checkpoint": (None,),
    "checkpoint_config": (None, {}),
    "ep_size": (1,),
    "keep_module_on_host": (False,),
    "moe": (False, {}, {"enabled": False}),
    "mp_size": (1,),
    "quant": ({}, {"enabled": False}),
    "return_tuple": (True,),
    "save_mp_checkpoint_path": (None,),
    "tensor_parallel": ({}, {"tp_size": 1}, {"enabled": True, "tp_size": 1}, {"enabled": False}),
    "tp": ({}, {"tp_size": 1}, {"enabled": True, "tp_size": 1}, {"enabled": False}),
    "zero": ({}, {"stage": 0}),
}
"""Keys of unsupported features -> values that leave the feature disabled."""


class InferenceEngine(ModuleHolder):
    """A model for inference. Attributes that it does not have are looked up on the model.

    Args:
        model: moved and converted in place.
        dtype: dtype of its floating-point parameters and buffers.

    Attributes:
        module: the model.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = model.to(device=pick_device(), dtype=dtype)
        self.eval()

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.module(*inputs, **keywords)


def init_inference(
    model: nn.Module, config: str | Path | Mapping[str, Any] | None = None, **keywords: Any
) -> InferenceEngine:
    """Return the model in `dtype` (default: float16, as in DeepSpeed) on the device of this rank.

    Args:
        config: DeepSpeed's inference keys, or the path of a JSON file with them.
        keywords: the same keys as keyword arguments.

    Raises:
        ConfigError: a key is unknown, has two different values, or requests an unsupported feature.
    """
    read = json.loads(Path(config).read_text()) if isinstance(config, str | Path) else config
    given: dict[str, Any] = dict(read or {})
    for key, value in keywords.items():
        if given.setdefault(key, value) != value:
            raise ConfigError(
                f"{key} is given twice, with different values", where=WHERE, fix="keep one of them"
            )
    dtype = given.pop(DTYPE, torch.float16)
    for key, value in given.items():
        if key not in SPEED and (key not in NEUTRAL or value not in NEUTRAL[key]):
            what = (
                f"{key}={value!r} is not supported"
                if key in NEUTRAL
                else f"{key} is not a key of DeepSpeed's inference config"
            )
            raise ConfigError(
                what, where=WHERE, fix="delete it; each rank runs the whole model, in one dtype"
            )
    if fast := sorted(SPEED & given.keys()):
        logger.info("%s: %s: no effect, because the model runs with its own layers", WHERE, ", ".join(fast))
    return InferenceEngine(model, dtype if isinstance(dtype, torch.dtype) else DtypeEnum(dtype).value)
