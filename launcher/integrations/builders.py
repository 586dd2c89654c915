"""`deepspeed.ops.op_builder`: the builder classes of DeepSpeed's native operators. Nothing is compiled.

If this engine has a counterpart of an operator, its builder is compatible and loading it costs nothing: torch
and launcher do the work. All other builders behave as on a machine that cannot compile them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from launcher.integrations.refused import NotHere, missing

COUNTERPARTS = ("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion")
"""Operators that this engine replaces with its own implementation."""

NAMES: Mapping[str, str] = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FlashAttentionBuilder": "flash_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}
"""Builder class -> operator."""

COMPATIBLE_OPS = {name: name in COUNTERPARTS for name in NAMES.values()}


class OpBuilder:
    """Builder of one operator.

    Args:
        name: operator name; default: `NAME` of the class.
    """

    NAME: ClassVar[str] = ""

    def __init__(self, name: str = "") -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether this engine has a counterpart of the operator."""
        return self.name in COUNTERPARTS

    def load(self, verbose: bool = True) -> Operators:
        """Return the operator, without compiling anything.

        Raises:
            NotHere: this engine has no counterpart of the operator.
        """
        if not self.is_compatible():
            raise _refusal(f"the operator {self.name}")
        return Operators(self.name)

    jit_load = load

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Return whether this torch is a ROCm build."""
        return torch.version.hip is not None

    @classmethod
    def installed_rocm_version(cls) -> tuple[int, int]:
        """Return (major, minor), or (0, 0) without ROCm."""
        if not cls.is_rocm_pytorch():
            return 0, 0
        major, minor = str(torch.version.hip).split(".")[:2]
        return int(major), int(minor)


class Operators:
    """The operators of a builder. The engine does not use DeepSpeed's functions: accessing one is an error.

    Args:
        name: operator name.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, function: str) -> Any:
        if function.startswith("__"):
            raise AttributeError(function)
        raise _refusal(f"the function {function} of the operator {self._name}")


def _refusal(shown: str) -> NotHere:
    what, how = missing("ops.op_builder", shown)
    return NotHere(what, **how)


BUILDERS: Mapping[str, type[OpBuilder]] = {
    kind: type(kind, (OpBuilder,), {"NAME": name, "__module__": __name__}) for kind, name in NAMES.items()
}


def __getattr__(name: str) -> type[OpBuilder]:
    if name not in BUILDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return BUILDERS[name]
