"""DeepSpeed's classes for config sections: constructed from keywords, read by DeepSpeed's attribute names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from launcher.config import Config, load
from launcher.config.offload import OffloadOptimizerConfig, OffloadParamConfig, ZenFlowConfig
from launcher.config.problems import ConfigProblems, Problem
from launcher.config.section import Section
from launcher.config.zero import MOE_BLOCKS, STAGE3_PREFIX, LeafModuleConfig, ZeroConfig
from launcher.integrations.enumerations import ZeroStageEnum
from launcher.integrations.processes import logger
from launcher.integrations.refused import NotHere, missing

__all__ = [
    "DEFAULT_LEAF_MODULE_CLASSES",
    "DEFAULT_LEAF_MODULE_NAMES",
    "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    "DeepSpeedBF16Config",
    "DeepSpeedFP16Config",
    "DeepSpeedMonitorConfig",
    "DeepSpeedZenFlowConfig",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroLeafModuleConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "get_bfloat16_config",
    "get_float16_config",
]

ZERO = "zero_optimization"

DEFAULT_LEAF_MODULE_CLASSES = list(MOE_BLOCKS)
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class _Shown:
    """A config section under DeepSpeed's attribute names.

    Args:
        section: section of a loaded config; if None, the section is built from `keys`.

    Raises:
        ValidationError: a key is unknown, or its value is invalid. This is pydantic's error, as in DeepSpeed.
    """

    module: ClassVar[str]
    """Module of DeepSpeed's class."""
    path: ClassVar[tuple[str, ...]]
    """Path of the section in the JSON."""
    prefix: ClassVar[str] = ""
    """Optional prefix of the section's keys in the JSON."""

    def __init__(self, section: Section | None = None, **keys: Any) -> None:
        self._section: Any = self._read(keys) if section is None else section

    @classmethod
    def _read(cls, keys: Mapping[str, Any]) -> Any:
        section: Any = _checked(cls.__name__, _nested(cls.path, keys))
        for name in cls.path:
            section = getattr(section, name)
        return section

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for key in (name, f"{self.prefix}{name}"):
            if key in type(self._section).model_fields:
                return shown(getattr(self._section, key))
        kind = type(self).__name__
        what, how = missing(f"{self.module}.{kind}.{name}", f"{kind}.{name}")
        raise NotHere(what, **how)

    def model_dump(self, **others: Any) -> dict[str, Any]:
        """Return the section as a plain dict."""
        return dict(self._section.to_dict())


def _nested(path: tuple[str, ...], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config tree with the keys at the path of the section."""
    tree = dict(keys)
    for name in reversed(path):
        tree = {name: tree}
    # Without a given stage, use stage 3: every key is valid there.
    if path[0] == ZERO:
        tree[ZERO].setdefault("stage", 3)
    return tree


def _checked(name: str, tree: Mapping[str, Any]) -> Config:
    """Load a config tree; a warning is logged for each key without an effect."""
    try:
        config = load({"train_batch_size": 1, **tree}, where=name)
    except ConfigProblems as error:
        raise ValidationError.from_exception_data(
            name, [_as_pydantic(one) for one in error.problems]
        ) from None
    for note in config.notes:
        if note.kind == "no effect":
            logger.warning(str(note))
    return config


def _as_pydantic(problem: Problem) -> InitErrorDetails:
    words = f"{problem.what}; {problem.fix}" if problem.fix else problem.what
    return {
        "type": PydanticCustomError("config", "{words}", {"words": words}),
        "loc": problem.path,
        "input": None,
    }


class DeepSpeedZeroConfig(_Shown):
    """The section zero_optimization; keys of stage 3 are also available without the prefix `stage3_`."""

    module, path, prefix = "runtime.zero.config", (ZERO,), STAGE3_PREFIX

    @classmethod
    def _read(cls, keys: Mapping[str, Any]) -> Any:
        zero = super()._read(keys)
        return zero if "stage" in keys else zero.model_copy(update={"stage": 0})

    @property
    def stage(self) -> ZeroStageEnum:
        return ZeroStageEnum(int(self._section.stage))


class DeepSpeedZeroOffloadParamConfig(_Shown):
    """zero_optimization.offload_param."""

    module, path = "runtime.zero.offload_config", (ZERO, "offload_param")


class DeepSpeedZeroOffloadOptimizerConfig(_Shown):
    """zero_optimization.offload_optimizer."""

    module, path = "runtime.zero.offload_config", (ZERO, "offload_optimizer")

    @property
    def pipeline(self) -> bool:
        """Return whether reads or writes are configured to overlap with the step."""
        return bool(self._section.pipeline_read or self._section.pipeline_write)


class DeepSpeedZeroLeafModuleConfig(_Shown):
    """zero_optimization.leaf_module."""

    module, path = "runtime.zero.leaf_module_config", (ZERO, "leaf_module")


class DeepSpeedZenFlowConfig(_Shown):
    """zero_optimization.zenflow, which has no effect; DeepSpeed's name of the class is ZenFlowConfig."""

    module, path = "runtime.zenflow.zenflow_config", (ZERO, "zenflow")


class DeepSpeedFP16Config(_Shown):
    """The section fp16."""

    module, path = "runtime.precision_config", ("fp16",)


class DeepSpeedBF16Config(_Shown):
    """The section bf16."""

    module, path = "runtime.precision_config", ("bf16",)


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section fp16 of a full config."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section bf16 of a full config; its old name is bfloat16."""
    return DeepSpeedBF16Config(**param_dict.get("bf16", param_dict.get("bfloat16", {})))


MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


class DeepSpeedMonitorConfig:
    """The monitor sections.

    Args:
        sections: monitor sections by name.
    """

    def __init__(self, **sections: Mapping[str, Any]) -> None:
        config = _checked(type(self).__name__, sections)
        self.tensorboard, self.csv_monitor = config.tensorboard, config.csv_monitor
        self.wandb, self.comet = config.wandb, config.comet

    @property
    def enabled(self) -> bool:
        """Return whether any monitor is enabled."""
        return any(getattr(self, name).enabled for name in MONITORS)


_CLASSES: Mapping[type[Section], type[_Shown]] = {
    ZeroConfig: DeepSpeedZeroConfig,
    OffloadParamConfig: DeepSpeedZeroOffloadParamConfig,
    OffloadOptimizerConfig: DeepSpeedZeroOffloadOptimizerConfig,
    LeafModuleConfig: DeepSpeedZeroLeafModuleConfig,
    ZenFlowConfig: DeepSpeedZenFlowConfig,
}


def shown(value: Any) -> Any:
    """Convert a value to DeepSpeed's form: sections to its classes, tuples to lists."""
    if isinstance(value, tuple):
        return [shown(each) for each in value]
    found = _CLASSES.get(type(value))
    return value if found is None else found(value)
