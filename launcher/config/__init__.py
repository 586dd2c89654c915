"""The DeepSpeed JSON as typed, frozen models. Nothing here imports torch."""

from __future__ import annotations

from launcher.config.activation import ActivationCheckpointingConfig
from launcher.config.batch import BatchTriple
from launcher.config.checkpoint import CheckpointConfig
from launcher.config.compile import CompileConfig
from launcher.config.data_efficiency import DataEfficiencyConfig, DataSamplingConfig, SeqlenConfig
from launcher.config.data_types import DataTypesConfig
from launcher.config.deepspeed_schedules import (
    DeepSpeedParams,
    LRRangeTestParams,
    OneCycleParams,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
    WarmupParams,
)
from launcher.config.load import load
from launcher.config.optimizer import OptimizerConfig, OptimizerParams
from launcher.config.partition import LayerPattern, PartitionConfig
from launcher.config.pipeline import PipelineConfig
from launcher.config.precision import Bf16Config, Fp16Config, TorchAutocastConfig
from launcher.config.problems import ConfigProblems, Problem
from launcher.config.profiling import CommsLoggerConfig, FlopsProfilerConfig
from launcher.config.resolve import ResolvedAuto, autos_of_hidden_size
from launcher.config.root import Config
from launcher.config.schedule_params import SchedulerParams
from launcher.config.scheduler import SchedulerConfig
from launcher.config.section import Section, field_docs
from launcher.config.tensor_parallel import TensorParallelConfig
from launcher.config.timers import ThroughputConfig, TimersConfig
from launcher.config.torch_schedules import TorchParams
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
    "field_docs",
    "load",
]
