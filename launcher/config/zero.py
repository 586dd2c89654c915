"""`zero_optimization`: what is sharded over the ranks (Rajbhandari et al. 2020, arXiv:1910.02054)."""

from __future__ import annotations

import sys
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from launcher.config.offload import OffloadOptimizerConfig, OffloadParamConfig
from launcher.config.problems import show
from launcher.config.section import Count, Section, Whole, complaint, whole

STAGE3_PREFIX = "stage3_"


def _null_is_true(value: Any) -> Any:
    return True if value is None else value


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):  # true equals 1 in Python
        raise complaint(f"must be one of 0, 1, 2 or 3, not {show(value)}", "write the number of the stage")
    return whole(value)


class ZeroConfig(Section):
    """ZeRO. Sizes count elements, not bytes.

    Every `stage3_` key is also read without that prefix, as in DeepSpeed.
    """

    aliases: ClassVar[dict[str, str]] = {
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    }
    without_effect: ClassVar[dict[str, str]] = {
        "round_robin_gradients": "gradients are never copied per rank",
        "contiguous_gradients": "gradients always share a flat buffer",
        "load_from_fp32_weights": "checkpoints keep float32 weights",
    }
    differs: ClassVar[dict[str, str]] = {
        "stage3_gather_16bit_weights_on_model_save": "whole weights are always written, one unit in memory at a time",
    }
    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"stage"})

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_switch)] = 0
    """0: nothing is sharded; 1: optimizer state; 2: and gradients; 3: and parameters."""

    contiguous_gradients: bool = True
    """Gradients of a unit live in one flat buffer."""

    reduce_scatter: bool = True
    """Gradients that are sharded are reduce-scattered; false all-reduces them and keeps the shard."""

    reduce_bucket_size: Count = 500_000_000
    """Most gradient elements that are being reduced at a time, and in one collective."""

    allgather_partitions: bool = True
    """Updated parameters that are not sharded come back by all-gather; false: by a broadcast from each rank."""

    allgather_bucket_size: Count = 500_000_000
    """Most elements of one all-gather of updated parameters."""

    overlap_comm: Annotated[bool, BeforeValidator(_null_is_true)] = True
    """Communication runs while the backward still computes. Left out or null: true at every stage."""

    load_from_fp32_weights: bool = True
    """DeepSpeed can start master weights from 16-bit values; here a checkpoint's float32 values are always used."""

    offload_param: OffloadParamConfig | None = None
    """Parameters rest in host memory or on NVMe."""

    offload_optimizer: OffloadOptimizerConfig | None = None
    """Optimizer state rests in host memory or on NVMe."""

    sub_group_size: Whole = 1_000_000_000
    """Most elements that the optimizer updates at a time; 0: one parameter at a time."""

    stage3_prefetch_bucket_size: Whole = 50_000_000
    """Most elements gathered ahead of the module that runs; 0 gathers nothing ahead."""

    stage3_param_persistence_threshold: Whole = 100_000
    """Parameters with fewer elements stay gathered."""

    stage3_model_persistence_threshold: Whole = sys.maxsize
    """Most elements that may stay gathered because of `stage3_param_persistence_threshold`."""

    stage3_max_live_parameters: Whole = 1_000_000_000
    """Most elements that are gathered at a time."""

    stage3_max_reuse_distance: Whole = 1_000_000_000
    """A gathered parameter is kept when it is used again within so many elements."""

    stage3_gather_16bit_weights_on_model_save: bool = False
    """DeepSpeed needs it to write whole weights at stage 3; here they are always written, one unit in memory."""

    ignore_unused_parameters: bool = True
    """A parameter without a gradient is fine; false makes it an error."""

    round_robin_gradients: bool = False
    """DeepSpeed spreads the copies of gradients over ranks; here every rank reduces all units alike."""
