"""`launcher.pipe`: pipeline models given as a sequence of layers, with the names of `deepspeed.pipe`.

from launcher.pipe import LayerSpec, PipelineModule, TiedLayerSpec
"""

from __future__ import annotations

from launcher.pipeline.sequential.layers import PipelineModule
from launcher.pipeline.sequential.specs import LayerSpec, TiedLayerSpec
from launcher.pipeline.sequential.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
]
