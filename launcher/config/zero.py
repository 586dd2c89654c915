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
        raise complaint(
            f"must be -1 (off) or a number of ranks, not {show(value)}",
            "write a divisor of the data-parallel degree",
        )
    return value


def _texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    return tuple(dict.fromkeys(texts)) if isinstance(texts, list | tuple) else texts


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]
"""A string, or a list of strings."""

MOE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


class LeafModuleConfig(Section):
    """Modules that are gathered, freed and reduced as one unit, including their submodules.

    Transformer blocks are units by default. A leaf module inside a block changes nothing; one that contains
    several blocks merges them into one unit; one outside of the blocks is moved from the root unit to a separate
    unit. An explicit entry that matches no module is an error.
    """

    classes: Texts = MOE_BLOCKS
    """Class names, with or without their Python module. The default, three MoE blocks, may match nothing."""

    names: Texts = ()
    """Module names, as in `named_modules()`."""

    name_suffixes: Texts = ()
    """Suffixes of module names; every module with a matching name is included."""


class ZeroConfig(Section):
    """ZeRO. Sizes count elements, not bytes.

    Every `stage3_` key is also accepted without that prefix, as in DeepSpeed.
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
        "use_multi_rank_bucket_allreduce": "one reduce-scatter gives every rank its shard",
        "elastic_checkpoint": "elastic checkpointing is deprecated; every checkpoint loads on any number of ranks",
        "parameter_alignment": "parameters always start at multiples of 16 elements of their flat buffer",
        "stage3_use_all_reduce_for_fetch_params": "parameters are all-gathered, with half the bytes of an all-reduce",
        "stage3_allgather_sequential": "a unit is gathered directly into the buffer it is used from, without a copy",
        "memory_efficient_linear": "no layer retains a saved weight after its last use",
        "pipeline_loading_checkpoint": "each rank reads only its own slices of a checkpoint",
        "zenflow": "every step updates every weight exactly; offloaded state is updated on the CPU, during backward "
        "if the update does not need the whole gradient (for its norm, for example)",
        "save_muon_momentum_buffer_in_memory": "Muon's momentum is stored with the other optimizer state",
    }
    differs: ClassVar[dict[str, str]] = {
        "stage3_gather_16bit_weights_on_model_save": "save_16bit_model() always writes unsharded weights; the "
        "Trainer's own saves follow the key, but for tensor parallelism: they are then whole, too",
        "ignore_unused_parameters": "with false, they are an error at every stage; in DeepSpeed only at stage 2",
        "mics_shard_size": "works at stages 1 to 3; DeepSpeed before 0.19: only at stage 3; newer versions reject it",
        "mics_hierarchical_params_gather": "a node is LOCAL_WORLD_SIZE ranks; within one node, a gather is one hop",
        "zero_hpz_partition_size": "after its first gather in a step, a parameter is gathered within the group, also "
        "in the forward of later microbatches",
        "zero_quantized_weights": "blocks of 256 8-bit values with a float32 scale; gathers for checkpoints, exports "
        "and GatheredParameters are exact, as are those within an hpZ group; integers and already quantized weights "
        "(QLoRA) stay exact",
        "zero_quantized_gradients": "works at stages 1 to 3, in one hop of 4-bit blocks over all ranks of the shard "
        "axis; a rank's own contribution is exact",
        "zero_quantized_nontrainable_weights": "checkpoints contain the quantized values, unpacked; integers and "
        "already quantized weights (QLoRA) stay exact",
        "leaf_module": "only modules that contain blocks, or are outside of them, change the units",
        "stage3_module_granularity_threshold": "only modules that contain blocks, or are outside of them, "
        "change the units",
        "compute_grad_norm": "works at every stage; a flag per parameter (has it a gradient?) is still communicated",
        "enable_sanity_checks": "checks the order of collectives, equality of replicas and finiteness of gradients",
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
    """0: nothing is sharded. 1: optimizer state is sharded. 2: gradients too. 3: parameters too."""

    contiguous_gradients: bool = True
    """The gradients of a unit share one flat buffer."""

    reduce_scatter: bool = True
    """Reduce-scatter gradients at stages 1 to 3. False: all-reduce them, and each rank keeps its slice."""

    reduce_bucket_size: Count = 500_000_000
    """Maximum number of gradient elements in reductions in flight, and in a single collective."""

    allgather_partitions: bool = True
    """All-gather updated parameters that are not sharded. False: broadcast them from each rank."""

    allgather_bucket_size: Count = 500_000_000
    """Maximum number of elements in one all-gather of updated parameters."""

    overlap_comm: Annotated[bool, BeforeValidator(null_is_true)] = True
    """Overlap communication with forward and backward; false also disables prefetching. Not set or null: true at
    every stage."""

    load_from_fp32_weights: bool = True
    """DeepSpeed can start master weights from 16-bit values; here a checkpoint's float32 values are always used."""

    offload_param: OffloadParamConfig | None = None
    """Offload of parameters to host memory or NVMe."""

    offload_optimizer: OffloadOptimizerConfig | None = None
    """Offload of optimizer state to host memory or NVMe."""

    sub_group_size: WholeNumber = 1_000_000_000
    """Maximum number of elements that the optimizer updates at a time; 0: one parameter at a time."""

    stage3_prefetch_bucket_size: WholeNumber = 50_000_000
    """Number of elements to prefetch ahead of the running module, rounded up to whole units; 0 disables prefetching."""

    stage3_param_persistence_threshold: WholeNumber = 100_000
    """Parameters with fewer elements stay gathered."""

    stage3_model_persistence_threshold: WholeNumber = sys.maxsize
    """Maximum number of elements that may stay gathered because of `stage3_param_persistence_threshold`."""

    stage3_max_live_parameters: WholeNumber = 1_000_000_000
    """Maximum number of elements that are gathered at a time."""

    stage3_max_reuse_distance: WholeNumber = 1_000_000_000
    """A gathered parameter is kept if it is used again within this many elements."""

    stage3_gather_16bit_weights_on_model_save: bool = False
    """DeepSpeed needs it to save unsharded weights at stage 3; here they are always saved, unit by unit."""

    ignore_unused_parameters: bool = True
    """Allow parameters without a gradient. False: they are an error."""

    compute_grad_norm: bool = True
    """Compute the gradient norm at each step. False skips it, and requires `gradient_clipping` 0."""

    use_multi_rank_bucket_allreduce: bool = True
    """DeepSpeed merges reductions to several ranks; here one collective reduces to all ranks."""

    parameter_alignment: bool = False
    """DeepSpeed can pad parameters to 16 bytes; here they always start at multiples of 16 elements."""

    mics_shard_size: Annotated[int, BeforeValidator(_group_size)] = -1
    """MiCS (arXiv:2205.00119): shard only within groups of this many neighbouring ranks, and sum gradients
    over the groups once per step. It must divide the data-parallel degree. -1: one group of all ranks."""

    mics_hierarchical_params_gather: bool = False
    """If a MiCS group spans nodes, gather across nodes first and then within each node, so that fewer bytes
    leave a node."""

    zero_hpz_partition_size: Count = 1
    """hpZ of ZeRO++ (arXiv:2306.10209), stage 3: keep a secondary shard of gathered parameters within groups
    of this many neighbouring ranks (those of a node), from which the backward gathers. 1: off."""

    zero_quantized_weights: bool = False
    """qwZ of ZeRO++, stage 3: gather parameters as 8-bit integers, a quarter of the bytes of float32. The
    error of a gathered value is at most 1/254 of the largest magnitude in its block of 256 values."""

    zero_quantized_nontrainable_weights: bool = False
    """Stage 3: store and gather the shards of frozen parameters as 8-bit integers."""

    zero_quantized_gradients: bool = False
    """qgZ of ZeRO++: reduce-scatter gradients as 4-bit integers, an eighth of the bytes of float32. The error
    of each summand is at most 1/14 of the largest magnitude in its block of 256 values."""

    leaf_module: LeafModuleConfig = Field(default_factory=LeafModuleConfig.model_construct)
    """Stage 3: modules that are gathered as one unit."""

    stage3_module_granularity_threshold: WholeNumber = 0
    """A module is gathered as one unit if its number of parameters, divided by one plus the number of its
    submodules that have parameters, is at most this; 0: off."""

    stage3_use_all_reduce_for_fetch_params: bool = False
    """DeepSpeed can gather parameters by all-reduce; here they are always all-gathered."""

    stage3_allgather_sequential: bool = False
    """DeepSpeed can gather parameters one by one to save a copy; here there is no such copy."""

    memory_efficient_linear: bool = True
    """DeepSpeed replaces torch's linear function with one that releases its weight; no layer retains it
    here."""

    override_module_apply: bool = True
    """Stage 3: `Module.apply(fn)` calls fn with unsharded parameters, and keeps the changes of rank 0. False:
    fn gets sharded parameters."""

    log_trace_cache_warnings: bool = False
    """Stage 3: warn if modules run in a different order than before, which disables prefetching for an
    iteration."""

    enable_sanity_checks: bool = False
    """At every step, compare across ranks the collectives that were started and the replicated parameters,
    and with fp32 and bf16 check that all gradients are finite. The first difference raises an error that
    names it. Costs time."""

    pipeline_loading_checkpoint: bool = False
    """DeepSpeed can load a checkpoint one local rank at a time; here a rank reads only its own slices."""

    save_muon_momentum_buffer_in_memory: bool = False
    """DeepSpeed can keep Muon's momentum in memory while other state is on NVMe."""

    elastic_checkpoint: bool = False
    """DeepSpeed's old layout for other world sizes; here every checkpoint loads on any number of ranks."""

    round_robin_gradients: bool = False
    """DeepSpeed distributes the copying of gradients over ranks; here all ranks reduce every unit alike."""

    zenflow: ZenFlowConfig | None = None
    """DeepSpeed can update most weights less often while the CPU catches up (arXiv:2505.12242)."""

    @property
    def parameters_elsewhere(self) -> OffloadParamConfig | None:
        """Return `offload_param` if it offloads parameters (at stage 3), else None."""
        section = self.offload_param if self.stage == 3 else None
        return None if section is None or section.device == "none" else section
