"""Typed, frozen models of the DeepSpeed JSON. Nothing in this package imports torch."""

from __future__ import annotations

from launcher.config.fault_tolerance import CheckpointConfig
from launcher.config.monitor import FlopsProfilerConfig
from launcher.config.optimizer import OptimizerConfig
from launcher.config.parallelism import ContextParallelConfig, PartitionConfig, PipelineConfig
from launcher.config.precision import Fp16Config
from launcher.config.problems import ConfigProblems
from launcher.config.ranks import BatchTriple
from launcher.config.resolve import autos_of_hidden_size
from launcher.config.root import Config, load
from launcher.config.scheduler import (
    DeepSpeedParams,
    LRRangeTestParams,
    OneCycleParams,
    SchedulerConfig,
    TorchParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
)
from launcher.config.section import Section
from launcher.config.small_sections import (
    ActivationCheckpointingConfig,
    DataEfficiencyConfig,
    SeqlenConfig,
)
from launcher.config.zero import ZeroConfig

__all__ = [
    "ActivationCheckpointingConfig",
    "BatchTriple",
    "CheckpointConfig",
    "Config",
    "ConfigProblems",
    "ContextParallelConfig",
    "DataEfficiencyConfig",
    "DeepSpeedParams",
    "FlopsProfilerConfig",
    "Fp16Config",
    "LRRangeTestParams",
    "OneCycleParams",
    "OptimizerConfig",
    "PartitionConfig",
    "PipelineConfig",
    "SchedulerConfig",
    "Section",
    "SeqlenConfig",
    "TorchParams",
    "WarmupCosineLRParams",
    "WarmupDecayLRParams",
    "WarmupLRParams",
    "ZeroConfig",
    "autos_of_hidden_size",
    "load",
]
