"""Hugging Face's Trainer on this engine, in programs that are not started by `launch`: torchrun, notebooks.

from launcher.integrations.transformers import Trainer     # or: enable(), and import as usual
trainer = Trainer(model=model, args=TrainingArguments(deepspeed="ds_config.json", ...), ...)
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from launcher.errors import LauncherError
from launcher.integrations.surface import DIRECTORY, PACKAGE

_HOMES = {
    "Trainer": "transformers",
    "TrainingArguments": "transformers",
    "SFTTrainer": "trl",
    "SFTConfig": "trl",
}


def enable() -> None:
    """Make `import deepspeed` resolve to this engine in this process from now on. Safe to call again.

    Raises:
        LauncherError: DeepSpeed, or a library that checked for it and did not find it, has already been
            imported.
    """
    if str(DIRECTORY) in sys.path[:1]:
        return
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None and not getattr(loaded, "__launcher__", False):
        raise LauncherError("DeepSpeed is already imported", fix="call enable() before anything imports it")
    if "accelerate" in sys.modules and importlib.util.find_spec(PACKAGE) is None:
        raise LauncherError(
            "accelerate is already imported, and found no deepspeed",
            fix="call enable() before you import transformers, trl or accelerate",
        )
    sys.path.insert(0, str(DIRECTORY))
    importlib.invalidate_caches()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; it provides enable, {', '.join(_HOMES)}"
        )
    enable()
    return getattr(importlib.import_module(_HOMES[name]), name)
