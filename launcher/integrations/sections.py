"""Sections of the JSON as DeepSpeed's classes: to make from keywords, to read by its names of attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from launcher.config import load
from launcher.config.offload import OffloadOptimizerConfig, OffloadParamConfig
from launcher.config.section import Section
from launcher.config.zero import MOE_BLOCKS, STAGE3_PREFIX, LeafModuleConfig, ZeroConfig
from launcher.integrations.enumerations import ZeroStageEnum
from launcher.integrations.processes import logger
from launcher.integrations.refused import NotHere, missing

__all__ = [
    "DEFAULT_LEAF_MODULE_CLASSES",
    "DEFAULT_LEAF_MODULE_NAMES",
    "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    "DeepSpeedMonitorConfig",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroLeafModuleConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
]

DEFAULT_LEAF_MODULE_CLASSES = list(MOE_BLOCKS)
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []


class _Shown:
    """A section, by DeepSpeed's names.

    Args:
        section: of a JSON that was read; else its keys are given by name.

    Raises:
        ConfigError: a key is not known, or a value is none that it can have.
    """

    module: ClassVar[str]
    """Of DeepSpeed's class."""
    key: ClassVar[str] = ""
    """Inside of zero_optimization."""
    prefix: ClassVar[str] = ""
    """That the keys of the JSON may have."""

    def __init__(self, section: Section | None = None, **keys: Any) -> None:
        self._section: Any = self._read(keys) if section is None else section

    @classmethod
    def _read(cls, keys: Mapping[str, Any]) -> Any:
        """Without a stage beside it nothing contradicts it: at stage 3 every key has a meaning."""
        tree = {"stage": 3, **({cls.key: dict(keys)} if cls.key else keys)}
        config = load({"train_batch_size": 1, "zero_optimization": tree}, where=cls.__name__)
        for note in config.notes:
            if note.kind == "no effect":
                logger.warning(str(note))
        zero = config.zero_optimization
        if cls.key:
            return getattr(zero, cls.key)
        return zero if "stage" in keys else zero.model_copy(update={"stage": 0})

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
        """As a plain dict."""
        return dict(self._section.to_dict())


class DeepSpeedZeroConfig(_Shown):
    """The section zero_optimization; keys of stage 3 without `stage3_`, too."""

    module, prefix = "runtime.zero.config", STAGE3_PREFIX

    @property
    def stage(self) -> ZeroStageEnum:
        return ZeroStageEnum(int(self._section.stage))


class DeepSpeedZeroOffloadParamConfig(_Shown):
    """zero_optimization.offload_param."""

    module, key = "runtime.zero.offload_config", "offload_param"


class DeepSpeedZeroOffloadOptimizerConfig(_Shown):
    """zero_optimization.offload_optimizer."""

    module, key = "runtime.zero.offload_config", "offload_optimizer"

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap with the step, as it is written."""
        return bool(self._section.pipeline_read or self._section.pipeline_write)


class DeepSpeedZeroLeafModuleConfig(_Shown):
    """zero_optimization.leaf_module."""

    module, key = "runtime.zero.leaf_module_config", "leaf_module"


MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


class DeepSpeedMonitorConfig:
    """The sections of the monitors.

    Args:
        sections: by name.
    """

    def __init__(self, **sections: Mapping[str, Any]) -> None:
        config = load({"train_batch_size": 1, **sections}, where=type(self).__name__)
        self.tensorboard, self.csv_monitor = config.tensorboard, config.csv_monitor
        self.wandb, self.comet = config.wandb, config.comet

    @property
    def enabled(self) -> bool:
        """One of them is on."""
        return any(getattr(self, name).enabled for name in MONITORS)


_CLASSES: Mapping[type[Section], type[_Shown]] = {
    ZeroConfig: DeepSpeedZeroConfig,
    OffloadParamConfig: DeepSpeedZeroOffloadParamConfig,
    OffloadOptimizerConfig: DeepSpeedZeroOffloadOptimizerConfig,
    LeafModuleConfig: DeepSpeedZeroLeafModuleConfig,
}


def shown(value: Any) -> Any:
    """A value as DeepSpeed shows it: sections as its classes, tuples as lists."""
    if isinstance(value, tuple):
        return [shown(each) for each in value]
    found = _CLASSES.get(type(value))
    return value if found is None else found(value)
