"""The DeepSpeed JSON as typed, frozen models. Nothing here imports torch."""

from __future__ import annotations

from launcher.config.activation import ActivationCheckpointingConfig
from launcher.config.batch import BatchTriple
from launcher.config.data_types import DataTypesConfig
from launcher.config.load import load
from launcher.config.optimizer import OptimizerConfig, OptimizerParams
from launcher.config.precision import Bf16Config, Fp16Config
from launcher.config.problems import ConfigProblems, Problem
from launcher.config.profiling import CommsLoggerConfig, FlopsProfilerConfig
from launcher.config.resolve import ResolvedAuto, autos_of_hidden_size
from launcher.config.root import Config
from launcher.config.scheduler import (
    SchedulerConfig,
    SchedulerParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)
from launcher.config.section import Section, field_docs
from launcher.config.zero import ZeroConfig

__all__ = [
    "ActivationCheckpointingConfig",
    "BatchTriple",
    "Bf16Config",
    "CommsLoggerConfig",
    "Config",
    "ConfigProblems",
    "DataTypesConfig",
    "FlopsProfilerConfig",
    "Fp16Config",
    "OptimizerConfig",
    "OptimizerParams",
    "Problem",
    "ResolvedAuto",
    "SchedulerConfig",
    "SchedulerParams",
    "Section",
    "WarmupCosineLRParams",
    "WarmupDecayLRParams",
    "WarmupLRParams",
    "ZeroConfig",
    "autos_of_hidden_size",
    "field_docs",
    "load",
]
