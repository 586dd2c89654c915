"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on a meta model, to estimate runs that train only them."""

from __future__ import annotations

import warnings

from torch import nn
from transformers import PreTrainedModel

from launcher.errors import ConfigError

EVERY_LAYER = "all-linear"


def with_adapters(model: PreTrainedModel, rank: int, targets: str = EVERY_LAYER) -> nn.Module:
    """Return the model with PEFT's LoRA adapters as its only trainable parameters.

    Args:
        model: model on meta; modified in place.
        rank: rank of the adapters.
        targets: comma-separated names of the layers with an adapter, as in PEFT's `target_modules`.

    Raises:
        ConfigError: PEFT is not installed, or the model has no such layers.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError(
            "LoRA adapters require PEFT, which is not installed", where="--lora", fix="pip install peft"
        ) from None
    names = targets if targets == EVERY_LAYER else [name.strip() for name in targets.split(",")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # raised by transformers when PEFT uses it
            adapted: nn.Module = get_peft_model(
                model, LoraConfig(r=rank, target_modules=names, task_type="CAUSAL_LM")
            )
    except ValueError as error:
        raise ConfigError(
            str(error).splitlines()[0],
            where="--lora-targets",
            fix=f"name layers of the model, such as q_proj,v_proj; or {EVERY_LAYER}",
        ) from None
    return adapted.train()
