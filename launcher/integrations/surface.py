"""The package `deepspeed` that scripts see: names of DeepSpeed's, and where they are here (data), and their importer.

Its only file is `shim/deepspeed/__init__.py`. Modules below it are made on demand from `NAMES`, and a name is looked up
when somebody asks for it: importing it costs next to nothing. What is not here raises an error that says so.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from launcher.errors import LauncherError

PACKAGE = "deepspeed"
VERSION = "0.19.8"
"""Of the DeepSpeed whose names these are; scripts ask for 0.18.2 at least."""

DIRECTORY = Path(__file__).parent / "shim"
"""What goes on the path: the package and its metadata."""

_HERE, _BEFORE = "launcher.integrations.stand_ins", "launcher.integrations.processes"
_KINDS, _OPTIMIZERS = "launcher.integrations.optimizer_kinds", "launcher.integrations.optimizers"
_UTILITIES = "launcher.integrations.utilities"
_ADAM = {name: f"{_OPTIMIZERS}:{name}" for name in ("DeepSpeedCPUAdam", "FusedAdam")}
_ZERO = {
    "Init": f"{_HERE}:Init",
    "GatheredParameters": "launcher.zero:GatheredParameters",
    "ZeroParamStatus": f"{_HERE}:ZeroParamStatus",
    "register_external_parameter": f"{_HERE}:register_external_parameter",
    "unregister_external_parameter": f"{_HERE}:register_external_parameter",
}
_LEAVES = {
    name: f"launcher.zero:{name}"
    for name in (
        "set_z3_leaf_module",
        "set_z3_leaf_modules",
        "set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix",
        "get_z3_leaf_modules",
        "unset_z3_leaf_modules",
    )
}

_FRAGMENTS = {
    f"safe_{verb}_{extent}_{what}": f"launcher.engine.fragments:safe_{verb}_{extent}_{what}"
    for verb in ("get", "set")
    for extent in ("full", "local")
    for what in ("fp32_param", "optimizer_state", "grad")
}
_FRAGMENTS["safe_update_full_grad_vectorized"] = "launcher.engine.fragments:safe_update_full_grad_vectorized"

NAMES: Mapping[str, Mapping[str, str]] = {
    "": {
        "initialize": f"{_HERE}:initialize",
        "init_distributed": f"{_BEFORE}:init_distributed",
        "tp_model_init": f"{_HERE}:tp_model_init",
        "add_config_arguments": "launcher.arguments:add_config_arguments",
        "DeepSpeedEngine": "launcher.engine:Engine",
        "PipelineModule": "launcher.pipe:PipelineModule",
        "OnDevice": f"{_UTILITIES}:OnDevice",
        "log_dist": f"{_UTILITIES}:log_dist",
        "logger": f"{_BEFORE}:logger",
        "get_accelerator": f"{_BEFORE}:get_accelerator",
    },
    "accelerator": {
        "get_accelerator": f"{_BEFORE}:get_accelerator",
        "is_current_accelerator_supported": f"{_UTILITIES}:is_current_accelerator_supported",
    },
    "checkpoint": {},
    "checkpoint.utils": {"clone_tensors_for_torch_save": f"{_HERE}:clone_tensors_for_torch_save"},
    "checkpointing": {},
    "comm": {
        "init_distributed": f"{_BEFORE}:init_distributed",
        "is_initialized": f"{_BEFORE}:is_initialized",
        "log_summary": "launcher.comm:log_summary",
    },
    "git_version_info": {"torch_info": f"{_UTILITIES}:TORCH_INFO"},
    "launcher": {},
    "launcher.runner": {"DEEPSPEED_ENVIRONMENT_NAME": f"{_BEFORE}:DEEPSPEED_ENVIRONMENT_NAME"},
    "moe": {},
    "moe.layer": {"MoE": "launcher.integrations.experts:MoE"},
    "moe.utils": {
        name: f"launcher.integrations.experts:{name}"
        for name in ("is_moe_param", "split_params_into_different_moe_groups_for_optimizer")
    },
    "ops": {"__compatible_ops__": f"{_BEFORE}:COMPATIBLE_OPS"},
    "ops.adagrad": {"DeepSpeedCPUAdagrad": f"{_OPTIMIZERS}:DeepSpeedCPUAdagrad"},
    "ops.adam": _ADAM,
    "ops.aio": {"AsyncIOBuilder": f"{_BEFORE}:AsyncIOBuilder"},
    "ops.lamb": {"FusedLamb": f"{_OPTIMIZERS}:FusedLamb"},
    "ops.lion": {name: f"{_OPTIMIZERS}:{name}" for name in ("DeepSpeedCPULion", "FusedLion")},
    "ops.op_builder": {
        name: f"{_BEFORE}:{name}"
        for name in ("AsyncIOBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "FusedLambBuilder")
    },
    "pipe": {},
    "runtime": {},
    "runtime.engine": {"DeepSpeedEngine": "launcher.engine:Engine"},
    "runtime.dataloader": {"RepeatingLoader": f"{_UTILITIES}:RepeatingLoader"},
    "runtime.base_optimizer": {"ZeROOptimizer": f"{_KINDS}:ZeROOptimizer"},
    "runtime.bf16_optimizer": {"BF16_Optimizer": f"{_KINDS}:BF16_Optimizer"},
    "runtime.fp16": {},
    "runtime.fp16.fused_optimizer": {"FP16_Optimizer": f"{_KINDS}:FP16_Optimizer"},
    "runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": f"{_KINDS}:FP16_UnfusedOptimizer"},
    "runtime.lr_schedules": {"VALID_LR_SCHEDULES": f"{_BEFORE}:VALID_LR_SCHEDULES"},
    "runtime.pipe": {},
    "runtime.pipe.topology": {},
    "runtime.pipe.module": {},
    "runtime.utils": {"RepeatingLoader": f"{_UTILITIES}:RepeatingLoader"},
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": {
        **_ZERO,
        # transformers puts its own in place of the first one, for zero.Init to use: ours leaves dtypes alone
        "zero_wrapper_for_fp_tensor_constructor": f"{_HERE}:unchanged",
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": f"{_BEFORE}:get_accelerator",
    },
    "runtime.zero.stage3": {"DeepSpeedZeroOptimizer_Stage3": f"{_KINDS}:DeepSpeedZeroOptimizer_Stage3"},
    "runtime.zero.stage_1_and_2": {"DeepSpeedZeroOptimizer": f"{_KINDS}:DeepSpeedZeroOptimizer"},
    "utils": {
        **_LEAVES,
        **_FRAGMENTS,
        "logger": f"{_BEFORE}:logger",
        **{
            name: f"{_UTILITIES}:{name}"
            for name in ("log_dist", "log_dist_once", "RepeatingLoader", "instrument_w_nvtx", "OnDevice")
        },
    },
    "utils.groups": {},
    "utils.init_on_device": {"OnDevice": f"{_UTILITIES}:OnDevice"},
    "utils.logging": {},
    "utils.nvtx": {"instrument_w_nvtx": f"{_UTILITIES}:instrument_w_nvtx"},
    "utils.torch": {"required_torch_version": f"{_UTILITIES}:required_torch_version"},
    "utils.tensor_fragment": _FRAGMENTS,
    "utils.zero_to_fp32": {
        name: f"launcher.checkpoint.fp32:{name}"
        for name in (
            "get_fp32_state_dict_from_zero_checkpoint",
            "convert_zero_checkpoint_to_fp32_state_dict",
            "load_state_dict_from_zero_checkpoint",
        )
    },
    "zero": _ZERO,
}
"""Module below `deepspeed` -> its names -> `module:attribute` here."""

REST: Mapping[str, str] = {
    "checkpointing": "launcher.checkpointing",
    "comm": "torch.distributed",
    "pipe": "launcher.pipe",
    "runtime.lr_schedules": "launcher.integrations.lr_schedules",
    "runtime.pipe": "launcher.pipe",
    "runtime.pipe.module": "launcher.pipe",
    "runtime.pipe.topology": "launcher.pipe",
    "runtime.utils": "launcher.integrations.utilities",
    "utils.groups": "launcher.integrations.groups",
    "utils.logging": "launcher.integrations.utilities",
}
"""Modules that have all names of another one besides."""


class NotHere(LauncherError, AttributeError):
    """A name of DeepSpeed's that is not here."""


class NoSuchModule(LauncherError, ModuleNotFoundError):
    """A module of DeepSpeed's that is not here."""


def getter(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module of the package.

    Args:
        module: its name below the package; "" for the package itself.
    """

    def find(name: str) -> Any:
        below = f"{module}.{name}" if module else name
        if name in NAMES[module]:
            home, _, attribute = NAMES[module][name].partition(":")
            value = getattr(importlib.import_module(home), attribute)
        elif below in NAMES:
            value = importlib.import_module(f"{PACKAGE}.{below}")
        elif module in REST and not name.startswith("__"):
            value = getattr(importlib.import_module(REST[module]), name)
        else:
            what, how = _missing(below)
            raise NotHere(what, **how)
        setattr(sys.modules[f"{PACKAGE}.{module}" if module else PACKAGE], name, value)
        return value

    return find


def _missing(name: str) -> tuple[str, dict[str, str]]:
    return (
        f"{PACKAGE}.{name} is not here: `import {PACKAGE}` gives launcher's engine, with the names that it has",
        {
            "fix": "see docs/transformers.md for these; for DeepSpeed itself write `launch --no-deepspeed-shim ...`"
        },
    )


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the modules below the package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, below = fullname.partition(".")
        if package != PACKAGE or not below:
            return None
        if below not in NAMES:
            what, how = _missing(below)
            raise NoSuchModule(what, **how)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        find = getter(module.__name__.partition(".")[2])
        setattr(module, "__getattr__", find)  # noqa: B010


def serve() -> Callable[[str], Any]:
    """Make the modules below the package importable; returns the package's own `__getattr__`."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    return getter("")
