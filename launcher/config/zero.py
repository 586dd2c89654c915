"""`zero_optimization`: what is sharded over the ranks (Rajbhandari et al. 2020, arXiv:1910.02054)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from launcher.config.offload import OffloadOptimizerConfig, OffloadParamConfig, ZenFlowConfig
from launcher.config.problems import show
from launcher.config.section import Count, Section, WholeNumber, complaint, null_is_true, stage_in, whole

STAGE3_PREFIX = "stage3_"


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):  # true equals 1 in Python
        raise complaint(f"must be one of 0, 1, 2 or 3, not {show(value)}", "write the number of the stage")
    return whole(value)


def _group_size(value: Any) -> Any:
    value = whole(value)
    if isinstance(value, int) and (value < -1 or value == 0):
        raise complaint(f"must be -1 (off) or a number of ranks, not {show(value)}", "write a divisor of dp")
    return value


def _texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    return tuple(dict.fromkeys(texts)) if isinstance(texts, list | tuple) else texts


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
"""A text, or a list of texts."""

MOE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModuleConfig(Section):
    """Modules that are gathered, freed and reduced as one unit with everything inside them.

    Units are transformer blocks already. A module inside a block changes nothing; one around several blocks makes them
    one unit; one beside the blocks leaves the root unit and becomes a unit of its own. An entry that you write and that
    no module matches is an error.
    """

    classes: Texts = MOE_BLOCKS
    """Class names, bare or with their Python module. The default, three MoE blocks, may match nothing."""

    names: Texts = ()
    """Names as `named_modules()` gives them."""

    name_suffixes: Texts = ()
    """Endings of such names; every module that has one is taken."""


class ZeroConfig(Section):
    """ZeRO. Sizes count elements, not bytes.

    Every `stage3_` key is also read without that prefix, as in DeepSpeed.
    """

    aliases: ClassVar[dict[str, str]] = {
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "module_granularity_threshold": "stage3_module_granularity_threshold",
        "use_all_reduce_for_fetch_params": "stage3_use_all_reduce_for_fetch_params",
        "allgather_sequential": "stage3_allgather_sequential",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    }
    without_effect: ClassVar[dict[str, str]] = {
        "round_robin_gradients": "gradients are never copied per rank",
        "contiguous_gradients": "gradients always share a flat buffer",
        "load_from_fp32_weights": "checkpoints keep float32 weights",
        "use_multi_rank_bucket_allreduce": "one reduce-scatter gives every rank its part",
        "elastic_checkpoint": "elastic checkpointing is deprecated; every checkpoint loads on any number of ranks",
        "parameter_alignment": "parameters always start at multiples of 16 elements of their flat buffer",
        "stage3_use_all_reduce_for_fetch_params": "parameters are all-gathered, with half the bytes of an all-reduce",
        "stage3_allgather_sequential": "a unit is gathered straight into the buffer it is used from, without a copy",
        "memory_efficient_linear": "no layer keeps a saved weight longer than it is used",
        "pipeline_loading_checkpoint": "a rank reads its own slices of a checkpoint, never the whole",
        "zenflow": "every step updates every weight, exactly; offloaded state is stepped on the CPU, "
        "during the backward if the step needs no value of the whole gradient",
        "save_muon_momentum_buffer_in_memory": "Muon's momentum is stored with the other optimizer state",
    }
    differs: ClassVar[dict[str, str]] = {
        "stage3_gather_16bit_weights_on_model_save": "save_16bit_model() always writes whole weights; the Trainer's "
        "own saves look at the key",
        "ignore_unused_parameters": "false is an error at every stage; DeepSpeed: at stage 2 only",
        "mics_shard_size": "works at stages 1 to 3; DeepSpeed before 0.19: only at stage 3; newer versions refuse it",
        "mics_hierarchical_params_gather": "nodes are LOCAL_WORLD_SIZE ranks; inside one node a gather is one hop",
        "zero_hpz_partition_size": "after its first gather in a step a parameter is gathered inside the "
        "group, in the forward of later microbatches too",
        "zero_quantized_weights": "blocks of 256 values, 8 bits and a float32 scale each; gathers for checkpoints, "
        "exports and GatheredParameters are exact, and so are those inside an hpZ group",
        "zero_quantized_gradients": "at stages 1 to 3, in one hop of 4-bit blocks over all ranks of the shard axis; "
        "a rank's own term is exact",
        "zero_quantized_nontrainable_weights": "checkpoints hold the quantised values, unpacked",
        "leaf_module": "only modules around or beside transformer blocks change the units",
        "stage3_module_granularity_threshold": "only modules around or beside transformer blocks change the units",
        "compute_grad_norm": "at every stage; a flag for each parameter, whether it got a gradient, is still sent",
        "enable_sanity_checks": "checks the order of collectives, equal copies and finite gradients",
    }
    differs_where: ClassVar[dict[str, Callable[[Any, Mapping[str, Any]], bool]]] = {
        "stage3_gather_16bit_weights_on_model_save": lambda value, tree: (
            value is False and stage_in(tree) == 3
        ),
        "ignore_unused_parameters": lambda value, tree: value is False,
        "compute_grad_norm": lambda value, tree: value is False,
        "enable_sanity_checks": lambda value, tree: value is not False,
        "zero_quantized_weights": lambda value, tree: value is not False,
        "zero_quantized_gradients": lambda value, tree: value is not False,
        "zero_quantized_nontrainable_weights": lambda value, tree: value is not False,
        "mics_shard_size": lambda value, tree: value != -1,
        "mics_hierarchical_params_gather": lambda value, tree: value is not False,
        "zero_hpz_partition_size": lambda value, tree: value != 1,
    }
    auto_needs_value: ClassVar[frozenset[str]] = frozenset({"stage"})

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_switch)] = 0
    """0: nothing is sharded; 1: optimizer state; 2: and gradients; 3: and parameters."""

    contiguous_gradients: bool = True
    """Gradients of a unit live in one flat buffer."""

    reduce_scatter: bool = True
    """Gradients are reduce-scattered at stages 1 to 3; false all-reduces them, and each rank keeps its slice."""

    reduce_bucket_size: Count = 500_000_000
    """Maximum number of gradient elements that are being reduced at a time, and in one collective."""

    allgather_partitions: bool = True
    """Updated parameters that are not sharded come back by all-gather; false: by a broadcast from each rank."""

    allgather_bucket_size: Count = 500_000_000
    """Maximum number of elements of one all-gather of updated parameters."""

    overlap_comm: Annotated[bool, BeforeValidator(null_is_true)] = True
    """Communication runs while the backward still computes. Left out or null: true at every stage."""

    load_from_fp32_weights: bool = True
    """DeepSpeed can start master weights from 16-bit values; here a checkpoint's float32 values are always used."""

    offload_param: OffloadParamConfig | None = None
    """Parameters rest in host memory or on NVMe."""

    offload_optimizer: OffloadOptimizerConfig | None = None
    """Optimizer state rests in host memory or on NVMe."""

    sub_group_size: WholeNumber = 1_000_000_000
    """Maximum number of elements that the optimizer updates at a time; 0: one parameter at a time."""

    stage3_prefetch_bucket_size: WholeNumber = 50_000_000
    """Maximum number of elements gathered ahead of the module that runs; 0 gathers nothing ahead."""

    stage3_param_persistence_threshold: WholeNumber = 100_000
    """Parameters with fewer elements stay gathered."""

    stage3_model_persistence_threshold: WholeNumber = sys.maxsize
    """Maximum number of elements that may stay gathered because of `stage3_param_persistence_threshold`."""

    stage3_max_live_parameters: WholeNumber = 1_000_000_000
    """Maximum number of elements that are gathered at a time."""

    stage3_max_reuse_distance: WholeNumber = 1_000_000_000
    """A gathered parameter is kept when it is used again within so many elements."""

    stage3_gather_16bit_weights_on_model_save: bool = False
    """DeepSpeed needs it to write whole weights at stage 3; here they are always written, one unit in memory."""

    ignore_unused_parameters: bool = True
    """A parameter without a gradient is fine; false makes it an error."""

    compute_grad_norm: bool = True
    """The norm of the gradient is computed at each step. False saves that, and needs `gradient_clipping` 0."""

    use_multi_rank_bucket_allreduce: bool = True
    """DeepSpeed merges reductions to several ranks; here one collective reduces to all ranks."""

    parameter_alignment: bool = False
    """DeepSpeed can pad parameters to 16 bytes; here they always start at multiples of 16 elements."""

    mics_shard_size: Annotated[int, BeforeValidator(_group_size)] = -1
    """MiCS (arXiv:2205.00119): what the stage shards is sharded inside groups of this many neighbouring ranks, and
    gradients are summed over the groups once a step. A divisor of the data-parallel ranks; -1: one group of all."""

    mics_hierarchical_params_gather: bool = False
    """Where a MiCS group spans nodes: gather across the nodes first, then inside each, so that fewer bytes leave a
    node."""

    zero_hpz_partition_size: Count = 1
    """hpZ of ZeRO++ (arXiv:2306.10209), stage 3: gathered parameters are kept in a second shard inside groups of this
    many neighbouring ranks (those of a node), and the backward gathers from there. 1: off."""

    zero_quantized_weights: bool = False
    """qwZ of ZeRO++, stage 3: parameters are gathered as 8-bit integers, a quarter of the bytes of float32. What a
    module computes with is off by at most 1/254 of the largest magnitude in a block of 256 values."""

    zero_quantized_nontrainable_weights: bool = False
    """Stage 3: shards of frozen parameters are stored as 8-bit integers, and gathered in that form."""

    zero_quantized_gradients: bool = False
    """qgZ of ZeRO++: gradients are reduce-scattered as 4-bit integers, an eighth of the bytes of float32. A term is off
    by at most 1/14 of the largest magnitude in a block of 256 values."""

    leaf_module: LeafModuleConfig = Field(default_factory=LeafModuleConfig.model_construct)
    """Stage 3: modules that are fetched as one."""

    stage3_module_granularity_threshold: WholeNumber = 0
    """A module is gathered as one unit if its parameters, divided by one more than the number of modules inside it
    that have any, are at most this; 0: none."""

    stage3_use_all_reduce_for_fetch_params: bool = False
    """DeepSpeed can fetch by all-reduce; here parameters always come by all-gather."""

    stage3_allgather_sequential: bool = False
    """DeepSpeed can gather parameters one by one to save a copy; here there is no such copy."""

    memory_efficient_linear: bool = True
    """DeepSpeed replaces torch's linear function so that it lets go of its weight; here none is kept."""

    override_module_apply: bool = True
    """Stage 3: `Module.apply(fn)` calls fn with whole parameters, and rank 0's changes are kept. False: fn gets
    sharded parameters."""

    log_trace_cache_warnings: bool = False
    """Stage 3: warn when modules are used in another order than before, which stops prefetching for an iteration."""

    enable_sanity_checks: bool = False
    """At every step the ranks compare the collectives they started and the parameters that they all hold, and in fp32
    and bf16 every gradient must be finite. The first difference is an error that names it. Costs time."""

    pipeline_loading_checkpoint: bool = False
    """DeepSpeed can load a checkpoint one local rank after the other; here a rank reads its own slices only."""

    save_muon_momentum_buffer_in_memory: bool = False
    """DeepSpeed can keep Muon's momentum in memory while other state is on NVMe."""

    elastic_checkpoint: bool = False
    """DeepSpeed's old layout for other numbers of ranks; here every checkpoint loads on any number."""

    round_robin_gradients: bool = False
    """DeepSpeed spreads the copies of gradients over ranks; here every rank reduces all units alike."""

    zenflow: ZenFlowConfig | None = None
    """DeepSpeed can update most weights now and then only, while the CPU catches up (arXiv:2505.12242)."""

    @property
    def parameters_elsewhere(self) -> OffloadParamConfig | None:
        """Return where parameters rest, when that is not the device: `offload_param` at stage 3."""
        section = self.offload_param if self.stage == 3 else None
        return None if section is None or section.device == "none" else section
