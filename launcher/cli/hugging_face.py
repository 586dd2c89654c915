"""Environment for scripts that use Hugging Face libraries: the `import deepspeed` shim and the JSON."""

from __future__ import annotations

import os

from launcher.cli import accelerate_flags
from launcher.cli.shim import with_shim
from launcher.config.source import in_base64, is_yaml, read
from launcher.errors import ConfigError
from launcher.integrations.surface import SWITCH, TOLD

_YES = {"1", "true", "yes", "on", "y", "t"}


def variables(config: str | None) -> dict[str, str]:
    """Return the variables for the ranks of a script.

    Args:
        config: `--config` of launch, if given; accelerate uses it for scripts that do not pass a JSON.

    Raises:
        ConfigError: ACCELERATE_USE_CPU is set, which makes accelerate silently train without any engine.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in _YES:
        raise ConfigError(
            "ACCELERATE_USE_CPU is set: it makes accelerate train without ZeRO, silently",
            where="environment",
            fix="unset it, and use launch --device cpu; or start the script with --no_deepspeed_shim",
        )
    found = {"PYTHONPATH": with_shim(os.environ)["PYTHONPATH"], SWITCH: "1", TOLD: "1"}
    if config is not None:
        found["ACCELERATE_USE_DEEPSPEED"] = "true"
        found["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = _plain(config)
        if is_yaml(config):
            found |= accelerate_flags.variables(config)
    return found


def _plain(config: str) -> str:
    """Return the JSON in base64, without comments because accelerate parses it with Python's `json`."""
    return in_base64({"zero_optimization": {"stage": 0}, **read(config).tree})
