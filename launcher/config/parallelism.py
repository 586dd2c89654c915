"""The sections that split a model: `tensor_parallel` splits layers over ranks, `pipeline` assigns blocks to stages.

Sources: Shoeybi et al. 2019 (arXiv:1909.08053), Huang et al. 2018 (arXiv:1811.06965).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from launcher.config.problems import show
from launcher.config.section import (
    AUTO,
    Count,
    Dtype,
    Names,
    Section,
    WholeNumber,
    complaint,
    lower,
    null_is_true,
    whole,
)

PartitionKind: TypeAlias = Literal["column", "row", "skip"]
SubParamShape: TypeAlias = tuple[int | tuple[int, ...], ...]


def _compiles(pattern: str, fix: str = r'write for example ".*\\.o_proj\\.weight$"') -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        at = f" at character {error.pos + 1}" if error.pos is not None else ""
        what = f"{show(pattern)} is not a regular expression: {error.msg}{at}"
        raise complaint(what, fix) from None
    return pattern


def _patterns(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not value:
        example = r'write for example [".*\\.o_proj\\.weight$"]'
        raise complaint(f"must be a list of regular expressions, not {show(value)}", example)
    return tuple(value)


def _shape(value: Any) -> Any:
    """Convert lists to tuples; every size is an integer of at least 1, or -1 outside of an inner list."""

    def size(item: Any, least: int) -> bool:
        return isinstance(item, int) and not isinstance(item, bool) and item >= least and item != 0

    items = value if isinstance(value, list | tuple) else ()
    found = [tuple(map(whole, item)) if isinstance(item, list | tuple) else whole(item) for item in items]
    right = (
        bool(item) and all(size(part, 1) for part in item) if isinstance(item, tuple) else size(item, -1)
        for item in found
    )
    if not found or not all(right):
        what = "must be a list of sizes (at least 1, or -1: inferred from the parameter) and at most one list of sizes"
        raise complaint(
            f"{what}, not {show(value)}", "write for example [3, -1], or [[4096, 1024, 1024], -1]"
        )
    return tuple(found)


class LayerPattern(Section):
    """A rule for splitting parameters. For each parameter, the first rule with a matching pattern applies."""

    differs: ClassVar[dict[str, str]] = {
        "patterns": "required; a rule that no parameter matches is an error, as is an invalid pattern",
    }

    patterns: Annotated[tuple[Annotated[str, AfterValidator(_compiles)], ...], BeforeValidator(_patterns)]
    """Regular expressions for parameter names, as in `named_parameters()`; matched from the name's start."""

    partition_type: Annotated[PartitionKind, BeforeValidator(lower)] = "column"
    """"column": the outputs of the layer are split. "row": its inputs are split, and the results are summed
    over the ranks. "skip": the parameter is replicated."""

    shape: Annotated[SubParamShape, BeforeValidator(_shape)] | None = None
    """Layout of a packed weight, each of whose matrices is split: [3, -1] is three equal matrices stacked
    vertically, [[4096, 1024, 1024], -1] three of these heights, [8, -1, 4096] eight. -1 is inferred from the
    parameter. Null: one matrix."""

    partition_dim: WholeNumber | None = None
    """The dim to split, of `shape` if that is set. Null: 0 for "column", 1 for "row"."""

    model_types: Names | None = None
    """Model types to which the rule applies (`model_type` in the model's config.json). Null: all."""

    gather_output: bool = False
    """For "column": gather the outputs, so that every rank has all of them."""

    grad_allreduce: bool = False
    """For "skip": sum the gradients over the ranks, if each rank sees only a part of the activations."""

    @property
    def dim(self) -> int:
        """Return the dim that is split."""
        return self.partition_dim if self.partition_dim is not None else int(self.partition_type == "row")


class PartitionConfig(Section):
    """The user's own rules; they take precedence over the model's plan."""

    without_effect: ClassVar[dict[str, str]] = {
        "embedding_partition_dim": "DeepSpeed ignores it too; embeddings are split over the vocabulary",
        "lm_head_patterns": "the LM head is what the model's get_output_embeddings() returns, regardless of its name",
    }
    differs: ClassVar[dict[str, str]] = {
        "use_default_specs": "true: the model's own plan splits parameters that no rule matches; DeepSpeed "
        "replicates them if it has no preset",
        "strict_mode": "layers that the model's own plan splits need no rule, unless use_default_specs is false",
        "tp_size": "a value that differs from autotp_size is an error; DeepSpeed overwrites it",
    }

    use_default_specs: bool = True
    """Split a parameter that no rule matches according to the model's own plan. False: it is replicated."""

    strict_mode: bool = False
    """Raise an error for a linear layer that neither a rule nor the plan covers. False: it is replicated."""

    tp_size: Count = 1
    """1, or the same as `autotp_size`."""

    embedding_partition_dim: WholeNumber = 1
    """Ignored."""

    lm_head_patterns: Names = ("lm_head", "embed_out")
    """Names by which DeepSpeed recognizes output heads."""

    layer_specs: tuple[LayerPattern, ...] = Field(default=())
    """Rules, in order: the first match applies to a parameter."""


class TpConfig(Section):
    """A second place for the tensor-parallel degree, also written `tensor_parallel.tensor_parallel`.

    If the degree is set only here, DeepSpeed silently splits nothing; this launcher raises an error.
    """

    without_effect: ClassVar[dict[str, str]] = {
        "tp_grain_size": "shards are as even as the heads and the packed matrices of a layer allow",
    }

    tp_size: Count = 1
    """1, or the same as `autotp_size`."""

    tp_grain_size: Count = 1
    """DeepSpeed can make shard sizes multiples of this."""


def _is_here(backend: str) -> str:
    if backend == "liger":
        what = "is not implemented: the loss reads the split logits once and needs no Liger kernels"
        raise complaint(f'"liger" {what}', 'write "torch"')
    return backend


class TensorParallelConfig(Section):
    """Tensor parallelism: the layers of a Hugging Face causal LM are split over neighbouring ranks.

    It works at every ZeRO stage. The ranks of a group process the same sequences: the data-parallel degree is
    the number of ranks / `autotp_size`, and ZeRO shards over the data-parallel ranks.
    """

    aliases: ClassVar[dict[str, str]] = {
        "tensor_parallel": "tp",
        "kernel_inject": "replace_with_kernel_inject",
    }
    without_effect: ClassVar[dict[str, str]] = {
        "preset_model": "every model is split by its own plan; put custom rules in partition_config",
        "keep_module_on_host": "each rank reads only its own shard of the weights, directly to its final location",
        "replace_with_kernel_inject": "it is for inference and has no effect in DeepSpeed's training either",
    }
    differs: ClassVar[dict[str, str]] = {
        "dtype": "a dtype that contradicts fp16 or bf16 is an error; DeepSpeed ignores the key in training",
        "tp_overlap_comm": "true by default",
        "sequence_parallel": "a key of this launcher; DeepSpeed has no such key",
    }

    autotp_size: WholeNumber = 0
    """Tensor-parallel degree: the number of ranks that share each layer. 0 and 1: layers are not split. It
    must divide the number of ranks."""

    dtype: Dtype | None = None
    """Dtype of the split layers. It follows from `fp16` and `bf16`; any other value is refused. Null: the
    dtype of the model."""

    tp_overlap_comm: Annotated[bool, BeforeValidator(null_is_true)] = True
    """In the backward of a column-parallel layer, overlap the reduction of the input gradient with the
    computation of the weight gradient."""

    sequence_parallel: bool = False
    """Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198): between the split layers, each rank
    has a slice of the sequence, so that norms, dropout and residuals are neither computed nor stored
    redundantly. Reduce-scatter and all-gather replace all-reduce, with the same communication volume."""

    vocab_parallel_lm_head: bool | None = None
    """True: the LM head is split over the vocabulary, and no rank ever holds all logits in training; an error
    if the model does not support it. False: logits are gathered. Null: split if the model supports it."""

    vocab_parallel_ce_backend: Annotated[Literal["torch", "liger"], AfterValidator(_is_here)] = "torch"
    """Implementation of the loss on split logits. "liger" is refused."""

    tp: TpConfig = Field(default_factory=TpConfig.model_construct)
    """A second place for the tensor-parallel degree."""

    partition_config: PartitionConfig | None = None
    """The user's own rules. Null: only the model's plan."""

    preset_model: (
        Annotated[
            Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"],
            BeforeValidator(lower),
        ]
        | None
    ) = None
    """Models for which DeepSpeed has rules; here every model is split by its own plan."""

    keep_module_on_host: bool = False
    """DeepSpeed can keep loaded weights in host memory until they are split."""

    replace_with_kernel_inject: bool = False
    """DeepSpeed can inject inference kernels."""

    @property
    def degree(self) -> int:
        """Return the tensor-parallel degree, at least 1."""
        return 1 if self.autotp_size == AUTO else max(1, self.autotp_size)


class ContextParallelConfig(Section):
    """Context parallelism: neighbouring ranks share the tokens of each sequence.

    They process the same sequences: the data-parallel degree is the number of ranks / (`ulysses` x `ring`),
    and ZeRO shards over both axes. Without this section, `sequence_parallel_size` sets how many ranks share a
    sequence.
    """

    differs: ClassVar[dict[str, str]] = {
        key: "a key of this launcher; DeepSpeed has sequence_parallel_size"
        for key in ("ulysses", "ring", "layout")
    }

    ulysses: WholeNumber = 0
    """Number of ranks that exchange heads for tokens around attention (Jacobs et al. 2023, arXiv:2309.14509).
    It must divide the number of query heads. 0: as large as the heads allow, given `ring`."""

    ring: WholeNumber = 0
    """Number of ranks, or groups of `ulysses` ranks, that pass keys and values around a ring (Liu et al.
    2023, arXiv:2310.01889). 0: what `ulysses` leaves."""

    layout: Annotated[Literal["zigzag", "contiguous", "striped"], BeforeValidator(lower)] = "zigzag"
    """How tokens are assigned to the ranks of the ring. "zigzag": one chunk from the beginning and one from
    the end, so that the work of causal attention is balanced. "contiguous": one chunk. "striped": every
    `ring`-th token."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Return (ulysses, ring); 0 for a degree that is left open or "auto"."""
        ulysses, ring = (size if isinstance(size, int) else 0 for size in (self.ulysses, self.ring))
        return ulysses, ring


METHODS = ("best", "uniform", "parameters", "profile")
TYPE = "type:"
CHUNKS = {"interleaved": 2, "zbv": 2}
"""Schedule -> virtual stages per rank, unless `chunks` is set; one for other schedules."""
ASYNCHRONOUS = {
    "pipedream": "each stage updates its weights after every microbatch; on stage k of P a microbatch sees "
    "weights that are up to P - 1 - k updates old, in its forward and in its backward",
    "2bw": "all microbatches of a step see weights that are one update old; the first step sees the initial weights",
}
"""Schedules that compute gradients with stale weights -> which weights."""


def method_of(text: Any) -> str | None:
    """Return a partition method in lower case, but a regular expression unchanged; None if it is neither."""
    name = text.strip() if isinstance(text, str) else ""
    if name.lower() in METHODS:
        return name.lower()
    pattern = name[len(TYPE) :]
    return TYPE + pattern if name.lower().startswith(TYPE) and pattern else None


def _method(value: Any) -> Any:
    method = method_of(value)
    if method is None:
        known = ", ".join(map(show, METHODS))
        raise complaint(f'must be one of {known} or "type:REGEX", not {show(value)}', 'write "best"')
    _compiles(method.removeprefix(TYPE), 'write for example "type:decoderlayer"')
    return method


class PipelineConfig(Section):
    """Pipeline parallelism for the blocks of a Hugging Face causal LM or the layers of a `PipelineModule`.

    Each microbatch passes through the stages one after the other; a step has `gradient_accumulation_steps`
    microbatches. The number of ranks is stages x data-parallel degree x `tensor_parallel.autotp_size`, and
    ZeRO shards the state of a stage over its data-parallel ranks. A key that is not set has the value of the
    PipelineModule's argument.
    """

    without_effect: ClassVar[dict[str, str]] = {
        "use_reentrant": "there is only one implementation of checkpointing; gradients are the same",
        "pipe_partitioned": "each tensor-parallel rank sends unsharded activations to its peer in the next stage",
        "grad_partitioned": "each tensor-parallel rank sends unsharded gradients to its peer in the previous stage",
    }
    differs: ClassVar[dict[str, str]] = {
        "stages": "sets the degree, also for a Hugging Face model; DeepSpeed ignores it",
        "partition": "assigns layers to stages; DeepSpeed ignores it",
        "seed_layers": "applies to a PipelineModule; DeepSpeed ignores it",
        "schedule": "a key of this launcher; DeepSpeed has only 1f1b",
        "chunks": "a key of this launcher",
        "reduce_per_microbatch": "a key of this launcher; DeepSpeed rejects ZeRO stage 2 in a pipeline",
        "gather_per_microbatch": "a key of this launcher; DeepSpeed rejects ZeRO stage 3 in a pipeline",
    }

    stages: Count | None = None
    """Number of stages. Each stage is a group of ranks that holds a part of the layers. Null: 1, or the
    number of stages of a PipelineModule."""

    partition: Annotated[str, BeforeValidator(_method)] = "best"
    """The quantity that is balanced over the stages: "best" the estimated operations of a forward, "uniform"
    the number of layers, "parameters" the number of parameters, "type:REGEX" the number of layers whose class
    name matches, "profile" the layer times that rank 0 measures before partitioning (for a PipelineModule, on
    the first rows of initialize(training_data=...))."""

    seed_layers: bool = False
    """Initialize layer i of a PipelineModule with the seed `base_seed` + i. False: with another seed derived
    from `base_seed` and i. In both cases, initial values do not depend on the partition."""

    activation_checkpoint_interval: WholeNumber = 0
    """Number of consecutive layers of a stage that are recomputed together in backward. 0: as set by
    `activation_checkpointing` or the PipelineModule."""

    pipe_partitioned: bool = True
    """In DeepSpeed, each tensor-parallel rank sends its share of the activations to the next stage, where
    they are gathered."""

    grad_partitioned: bool = True
    """The same for the gradients sent to the previous stage."""

    use_reentrant: bool = True
    """Selects one of DeepSpeed's two implementations of checkpointing."""

    schedule: Annotated[
        Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "pipedream", "2bw"], BeforeValidator(lower)
    ] = "1f1b"
    """The pipeline schedule. "gpipe": all forwards first (arXiv:1811.06965). "1f1b": forwards and backwards
    alternate, with at most as many microbatches in flight as stages (arXiv:2006.09503). "interleaved":
    several chunks per rank (arXiv:2104.04473). "zb-h1" and "zbv": weight gradients are postponed to fill the
    bubble (arXiv:2401.10241).
    Two schedules are experimental: asynchronous, and NOT equal to training in one process, because gradients
    are computed with stale weights. "pipedream" (SOSP 2019) updates after every microbatch, which counts as a
    separate batch; its backward uses the weights of its forward, which are kept: up to P - k versions on
    stage k of P. "2bw" (arXiv:2006.09503) updates once per step with the gradient at the weights before the
    last update: w(t+1) = w(t) - lr * gradient at w(t-1); 2 versions."""

    chunks: Count | None = None
    """Non-adjacent model chunks (virtual stages) per rank. Null: 2 for "interleaved" and "zbv", else 1."""

    reduce_per_microbatch: bool = False
    """At ZeRO stages 2 and 3, reduce gradients after every microbatch and hold only a shard of them. False:
    reduce once per step, and hold the unsharded gradients of the rank's layers until then."""

    gather_per_microbatch: bool = False
    """At ZeRO stage 3, gather parameters for every forward and backward of a microbatch. False: once per
    step; they stay gathered until the last backward."""

    @property
    def degree(self) -> int:
        """Return the number of stages, at least 1."""
        return 1 if self.stages in (None, AUTO) else int(self.stages or 1)

    @property
    def chunks_of_rank(self) -> int:
        """Return the number of virtual stages per rank, at least 1."""
        return CHUNKS.get(self.schedule, 1) if self.chunks in (None, AUTO) else int(self.chunks or 1)

    @property
    def asynchronous(self) -> bool:
        """Return whether gradients are computed with stale weights."""
        return self.schedule in ASYNCHRONOUS

    @property
    def updates_inside(self) -> bool:
        """Return whether each stage updates its weights after each microbatch, within a step."""
        return self.schedule == "pipedream"
