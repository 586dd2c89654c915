"""The DeepSpeed JSON as typed, frozen models. Nothing here imports torch."""

from __future__ import annotations

from launcher.config.data_efficiency import DataEfficiencyConfig, DataSamplingConfig, SeqlenConfig
from launcher.config.load import load
from launcher.config.monitor import CommsLoggerConfig, FlopsProfilerConfig, ThroughputConfig, TimersConfig
from launcher.config.optimizer import OptimizerConfig, OptimizerParams
from launcher.config.pipeline import PipelineConfig
from launcher.config.precision import Bf16Config, DataTypesConfig, Fp16Config, TorchAutocastConfig
from launcher.config.problems import ConfigProblems, Problem
from launcher.config.ranks import BatchTriple
from launcher.config.resolve import ResolvedAuto, autos_of_hidden_size
from launcher.config.root import Config
from launcher.config.scheduler import (
    DeepSpeedParams,
    LRRangeTestParams,
    OneCycleParams,
    SchedulerConfig,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
    WarmupParams,
)
from launcher.config.section import Section
from launcher.config.sections import ActivationCheckpointingConfig, CheckpointConfig, CompileConfig
from launcher.config.tensor_parallel import LayerPattern, PartitionConfig, TensorParallelConfig
from launcher.config.torch_schedules import SchedulerParams, TorchParams
from launcher.config.zero import ZeroConfig

__all__ = [
    "ActivationCheckpointingConfig",
    "BatchTriple",
    "Bf16Config",
    "CheckpointConfig",
    "CommsLoggerConfig",
    "CompileConfig",
    "Config",
    "ConfigProblems",
    "DataEfficiencyConfig",
    "DataSamplingConfig",
    "DataTypesConfig",
    "DeepSpeedParams",
    "FlopsProfilerConfig",
    "Fp16Config",
    "LRRangeTestParams",
    "LayerPattern",
    "OneCycleParams",
    "OptimizerConfig",
    "OptimizerParams",
    "PartitionConfig",
    "PipelineConfig",
    "Problem",
    "ResolvedAuto",
    "SchedulerConfig",
    "SchedulerParams",
    "Section",
    "SeqlenConfig",
    "TensorParallelConfig",
    "ThroughputConfig",
    "TimersConfig",
    "TorchAutocastConfig",
    "TorchParams",
    "WarmupCosineLRParams",
    "WarmupDecayLRParams",
    "WarmupLRParams",
    "WarmupParams",
    "ZeroConfig",
    "autos_of_hidden_size",
    "load",
]
