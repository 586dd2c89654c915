"""Export of LoRA adapters in PEFT's format: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from launcher.checkpoint.durable import temporary_file
from launcher.engine.whole import failing_together, whole_state_dict
from launcher.models.adapters import FACTORS
from launcher.tensor.adapters import peft_configs

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

WEIGHTS = "adapter_model.safetensors"
_ADAPTER = ".default"  # PEFT's name for the only adapter, which its files omit


def export_adapters(engine: Engine, directory: Path, base: str) -> None:
    """Write the adapters, which rank 0 gathers in host memory. Collective.

    Args:
        base: the model that they adapt, for `base_model_name_or_path`.

    Raises:
        CheckpointError: on every rank: the files could not be written.
    """
    state = whole_state_dict(engine, exclude_frozen=True)
    with failing_together(directory):
        if state is not None:
            directory.mkdir(parents=True, exist_ok=True)
            adapters = {
                name.replace(_ADAPTER, ""): value.contiguous()
                for name, value in state.items()
                if not {*FACTORS}.isdisjoint(name.split("."))
            }
            with temporary_file(directory / WEIGHTS) as temporary:
                save_file(adapters, temporary, metadata={"format": "pt"})
            config = copy.copy(next(peft_configs(engine.module)))
            config.base_model_name_or_path, config.inference_mode = base, True
            config.save_pretrained(directory)
