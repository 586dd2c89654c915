"""DeepSpeed's enumerations and exceptions, which scripts compare and catch; exceptions alias launcher's."""

from __future__ import annotations

import enum

import torch

from launcher.errors import ConfigError, LauncherError
from launcher.integrations.refused import NotHere

DeepSpeedConfigError = ConfigError
PipelineError = ConfigError
ElasticityError = ElasticityConfigError = ElasticityIncompatibleWorldSize = ConfigError
ZeRORuntimeException = LauncherError
DeprecatedException = NotHere


class OffloadDeviceEnum(enum.StrEnum):
    """Values of `offload_param.device` and `offload_optimizer.device`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """Names accepted by `engine.offload_states(include=...)`."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(int, enum.Enum):
    """Values of `zero_optimization.stage`."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class ZeroParamStatus(enum.Enum):
    """Whether a parameter is unsharded, and so ready for use."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """How a parameter is stored: unsharded, or sharded over all ranks. `REMOTE` is never used."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ValidationMode:
    """Values of `checkpoint.tag_validation`."""

    WARN = "WARN"
    IGNORE = "IGNORE"
    FAIL = "FAIL"


class DtypeEnum(enum.Enum):
    """Dtypes and the names they can be looked up by; `value` is the torch dtype."""

    fp16 = torch.float16, "torch.float16", "fp16", "float16", "half"
    fp32 = torch.float32, "torch.float32", "fp32", "float32", "float"
    int8 = torch.int8, "torch.int8", "int8"
    bf16 = torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16"

    def __new__(cls, *words: object) -> DtypeEnum:
        member = object.__new__(cls)
        member._value_ = words[0]
        for word in words[1:]:
            cls._value2member_map_[word] = member
        return member

    @classmethod
    def from_str(cls, value: str) -> DtypeEnum:
        return cls(value)
