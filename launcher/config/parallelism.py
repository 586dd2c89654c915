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
    """Return lists as tuples; every size is a whole number from 1, or -1 outside of an inner list."""

    def size(item: Any, least: int) -> bool:
        return isinstance(item, int) and not isinstance(item, bool) and item >= least and item != 0

    items = value if isinstance(value, list | tuple) else ()
    found = [tuple(map(whole, item)) if isinstance(item, list | tuple) else whole(item) for item in items]
    right = (
        bool(item) and all(size(part, 1) for part in item) if isinstance(item, tuple) else size(item, -1)
        for item in found
    )
    if not found or not all(right):
        what = "must be a list of sizes from 1, of -1 (found from the parameter), and of one list of sizes"
        raise complaint(
            f"{what}, not {show(value)}", "write for example [3, -1], or [[4096, 1024, 1024], -1]"
        )
    return tuple(found)


class LayerPattern(Section):
    """One rule. The first one with a pattern that matches a parameter's name says how that parameter is split."""

    differs: ClassVar[dict[str, str]] = {
        "patterns": "required; a rule that no parameter matches is an error, as is an invalid pattern",
    }

    patterns: Annotated[tuple[Annotated[str, AfterValidator(_compiles)], ...], BeforeValidator(_patterns)]
    """Regular expressions for names of parameters, as `named_parameters()` gives them; matched from the start."""

    partition_type: Annotated[PartitionKind, BeforeValidator(lower)] = "column"
    """"column": the outputs of the layer are split. "row": its inputs are, and the results are summed over the ranks.
    "skip": every rank has the whole parameter."""

    shape: Annotated[SubParamShape, BeforeValidator(_shape)] | None = None
    """How a packed weight is read before it is split: [3, -1] is three equal matrices one above the other,
    [[4096, 1024, 1024], -1] three of those heights, [8, -1, 4096] eight; each of them is split. -1 is found from the
    parameter. Null: one matrix."""

    partition_dim: WholeNumber | None = None
    """The dim that is split, of `shape` where that is written. Null: 0 for "column", 1 for "row"."""

    model_types: Names | None = None
    """The rule is for these model types only (`model_type` in the model's config.json); null: for all."""

    gather_output: bool = False
    """"column": the outputs are gathered, so that every rank has all of them."""

    grad_allreduce: bool = False
    """"skip": the gradients of the ranks are summed, where each sees a part of the activations only."""

    @property
    def dim(self) -> int:
        """Return the dim that is split."""
        return self.partition_dim if self.partition_dim is not None else int(self.partition_type == "row")


class PartitionConfig(Section):
    """Your own rules; they come before the plan of the model."""

    without_effect: ClassVar[dict[str, str]] = {
        "embedding_partition_dim": "DeepSpeed does not read it, either; embeddings are split over the vocabulary",
        "lm_head_patterns": "the head is what the model's get_output_embeddings() returns, whatever its name",
    }
    differs: ClassVar[dict[str, str]] = {
        "use_default_specs": "true: the model's own plan splits what no rule matches; DeepSpeed leaves that whole "
        "where there is no preset",
        "strict_mode": "what the model's own plan splits needs no rule, unless use_default_specs is false",
        "tp_size": "another number than autotp_size is an error; DeepSpeed overwrites it",
    }

    use_default_specs: bool = True
    """A parameter that no rule matches is split as the model's own plan says; false: it stays whole."""

    strict_mode: bool = False
    """A linear layer that neither a rule nor the plan covers is an error; false: it stays whole."""

    tp_size: Count = 1
    """1, or the same as `autotp_size`."""

    embedding_partition_dim: WholeNumber = 1
    """Nothing reads it."""

    lm_head_patterns: Names = ("lm_head", "embed_out")
    """DeepSpeed knows output heads by these names."""

    layer_specs: tuple[LayerPattern, ...] = Field(default=())
    """Rules in order: for each parameter the first match applies."""


class TpConfig(Section):
    """A second place for the degree, also written `tensor_parallel.tensor_parallel`.

    When the degree stands only here, DeepSpeed splits nothing and says nothing; here that is an error.
    """

    without_effect: ClassVar[dict[str, str]] = {
        "tp_grain_size": "shares are as even as the heads and the packed matrices of a layer allow",
    }

    tp_size: Count = 1
    """1, or the same as `autotp_size`."""

    tp_grain_size: Count = 1
    """DeepSpeed can make the shares multiples of this size."""


def _is_here(backend: str) -> str:
    if backend == "liger":
        what = "is not implemented: the loss reads the split logits once, and needs no kernels of Liger's"
        raise complaint(f'"liger" {what}', 'write "torch"')
    return backend


class TensorParallelConfig(Section):
    """The layers of a Hugging Face causal LM are split over neighbouring ranks, at every ZeRO stage.

    The ranks of a group work on the same sequences: data-parallel ranks are all ranks / `autotp_size`, and ZeRO shards
    over those.
    """

    aliases: ClassVar[dict[str, str]] = {
        "tensor_parallel": "tp",
        "kernel_inject": "replace_with_kernel_inject",
    }
    without_effect: ClassVar[dict[str, str]] = {
        "preset_model": "the model's own plan says how it is split; your own rules go into partition_config",
        "keep_module_on_host": "a rank reads only its own part of the weights, straight to where it stays",
        "replace_with_kernel_inject": "it is for inference, and does nothing in DeepSpeed's training, either",
    }
    differs: ClassVar[dict[str, str]] = {
        "dtype": "another dtype than that of fp16 and bf16 is an error; in DeepSpeed's training it does nothing",
        "tp_overlap_comm": "true by default",
        "sequence_parallel": "a key of this launcher; DeepSpeed has none for it",
    }

    autotp_size: WholeNumber = 0
    """Number of ranks that share each layer; 0 and 1: layers are not split. It must divide the number of ranks."""

    dtype: Dtype | None = None
    """Dtype of the split layers; null: that of the model. It follows from `fp16` and `bf16`; another one is refused."""

    tp_overlap_comm: Annotated[bool, BeforeValidator(null_is_true)] = True
    """In the backward of a column-split layer the gradient of the input is reduced while the gradient of the weight is
    computed."""

    sequence_parallel: bool = False
    """Between the split layers each rank has a slice of the sequence: norms, dropout and residuals are neither computed
    nor kept twice (Korthikanti et al. 2022, arXiv:2205.05198). Reduce-scatter and all-gather take the place of
    all-reduce; as many bytes are sent."""

    vocab_parallel_lm_head: bool | None = None
    """True: the output head must be split over the vocabulary, and no rank ever has all logits while it trains; a
    model that does not allow it is an error. False: logits are gathered. Null: split where the model allows it."""

    vocab_parallel_ce_backend: Annotated[Literal["torch", "liger"], AfterValidator(_is_here)] = "torch"
    """Code of the loss on split logits. "liger" is refused."""

    tp: TpConfig = Field(default_factory=TpConfig.model_construct)
    """A second place for the degree."""

    partition_config: PartitionConfig | None = None
    """Own rules; null: the model's own plan alone."""

    preset_model: (
        Annotated[
            Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"],
            BeforeValidator(lower),
        ]
        | None
    ) = None
    """DeepSpeed has rules for these models; here every model is split by its own plan."""

    keep_module_on_host: bool = False
    """DeepSpeed can leave loaded weights in host memory until they are split."""

    replace_with_kernel_inject: bool = False
    """DeepSpeed can inject inference kernels."""

    @property
    def degree(self) -> int:
        """Return how many ranks share a layer, at least 1."""
        return 1 if self.autotp_size == AUTO else max(1, self.autotp_size)


class ContextParallelConfig(Section):
    """The tokens of each sequence are shared by neighbouring ranks. They work on the same sequences: data-parallel
    ranks are all ranks / (`ulysses` x `ring`), and ZeRO shards over both.

    Without the section, `sequence_parallel_size` says how many ranks share a sequence.
    """

    differs: ClassVar[dict[str, str]] = {
        key: "a key of this launcher; DeepSpeed has sequence_parallel_size"
        for key in ("ulysses", "ring", "layout")
    }

    ulysses: WholeNumber = 0
    """Ranks that exchange heads for tokens around attention (Jacobs et al. 2023, arXiv:2309.14509); it must divide the
    query heads. 0: as many as the heads allow, of those that the ring leaves."""

    ring: WholeNumber = 0
    """Ranks, or groups of `ulysses` ranks, that send keys and values round (Liu et al. 2023, arXiv:2310.01889). 0: as
    many as Ulysses leaves."""

    layout: Annotated[Literal["zigzag", "contiguous", "striped"], BeforeValidator(lower)] = "zigzag"
    """Which tokens a rank of the ring has. "zigzag": one part from the beginning and one from the end, so that causal
    attention is as much work on every rank. "contiguous": one part. "striped": every `ring`-th token."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Return (ulysses, ring), 0 for one that is left open, also by "auto"."""
        ulysses, ring = (size if isinstance(size, int) else 0 for size in (self.ulysses, self.ring))
        return ulysses, ring


METHODS = ("best", "uniform", "parameters", "profile")
TYPE = "type:"
CHUNKS = {"interleaved": 2, "zbv": 2}
"""Schedule -> virtual stages of a rank unless `chunks` says otherwise; those not named have one."""
ASYNCHRONOUS = {
    "pipedream": "each stage updates its weights after every microbatch; on stage k of P a microbatch sees "
    "weights that are up to P - 1 - k updates old, in its forward and in its backward",
    "2bw": "all microbatches of a step see weights that are one update old; the first step sees the initial weights",
}
"""Schedules whose gradients are those of older weights -> of which ones."""


def method_of(text: Any) -> str | None:
    """Return a method of dealing out in small letters, a regular expression in its own; None where it is none."""
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
    """The blocks of a Hugging Face causal LM, or the layers of a `PipelineModule`, are divided among stages of ranks.

    A microbatch goes through the stages one after the other; a step has `gradient_accumulation_steps` of them. All
    ranks are stages x data-parallel ranks x `tensor_parallel.autotp_size`, and ZeRO shards what a stage holds over its
    data-parallel ranks. If a key is left out, the argument of a PipelineModule applies.
    """

    without_effect: ClassVar[dict[str, str]] = {
        "use_reentrant": "there is only one kind of checkpointing; gradients are the same",
        "pipe_partitioned": "each tensor-parallel rank sends whole activations to its own rank of the next stage",
        "grad_partitioned": "each tensor-parallel rank sends whole gradients to its own rank of the stage before",
    }
    differs: ClassVar[dict[str, str]] = {
        "stages": "sets the degree, for a Hugging Face model too; DeepSpeed reads it and does nothing",
        "partition": "divides the layers; DeepSpeed reads it and does nothing",
        "seed_layers": "acts on a PipelineModule; DeepSpeed reads it and does nothing",
        "schedule": "a key of this launcher; DeepSpeed has only 1f1b",
        "chunks": "a key of this launcher",
        "reduce_per_microbatch": "a key of this launcher; DeepSpeed refuses stage 2 in a pipeline",
        "gather_per_microbatch": "a key of this launcher; DeepSpeed refuses stage 3 in a pipeline",
    }

    stages: Count | None = None
    """Stages: groups of ranks that each hold a part of the layers. Null: 1, or what a PipelineModule says."""

    partition: Annotated[str, BeforeValidator(_method)] = "best"
    """The quantity that is balanced among the stages: "best" the estimated operations of a forward, "uniform" the
    number of layers, "parameters" their elements, "type:REGEX" the layers whose class name matches, "profile" the
    times that rank 0 measures before the cut (of a PipelineModule with the first rows of
    initialize(training_data=...))."""

    seed_layers: bool = False
    """The layer i of a PipelineModule is made under the seed `base_seed` + i. False: under one of its own, too, from
    `base_seed` and i; first values never depend on the cut."""

    activation_checkpoint_interval: WholeNumber = 0
    """Number of neighbouring layers of a stage that are recomputed together in backward. 0: what
    `activation_checkpointing`,
    or the PipelineModule, says."""

    pipe_partitioned: bool = True
    """In DeepSpeed each tensor-parallel rank sends its share of the activations to the next stage, where they are
    gathered."""

    grad_partitioned: bool = True
    """The same for the gradients that go back."""

    use_reentrant: bool = True
    """DeepSpeed has two kinds of checkpointing."""

    schedule: Annotated[
        Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "pipedream", "2bw"], BeforeValidator(lower)
    ] = "1f1b"
    """The order of work: "gpipe" all forwards first (arXiv:1811.06965); "1f1b" each forward after a backward, which
    keeps at most as many microbatches as stages (arXiv:2006.09503); "interleaved" several chunks a rank
    (arXiv:2104.04473); "zb-h1" and "zbv" postpone weight gradients to fill the gaps (arXiv:2401.10241).
    Two are experimental: asynchronous, and NOT equal to training in one process, for gradients are those of older
    weights. "pipedream" (SOSP 2019) updates after every microbatch, which counts as a batch of its own; its backward
    sees the weights of its forward, kept for it: up to P - k versions on stage k of P. "2bw" (arXiv:2006.09503)
    updates once a step with the gradient at the weights of one update ago: w(t+1) = w(t) - lr * gradient at w(t-1); 2
    versions."""

    chunks: Count | None = None
    """Model chunks (virtual stages) per rank; they are not neighbours. Null: 2 for "interleaved" and "zbv", else 1."""

    reduce_per_microbatch: bool = False
    """ZeRO stages 2 and 3 reduce gradients after every microbatch, and hold a shard of them. False: once a step, with
    whole gradients of the rank's layers in the meantime."""

    gather_per_microbatch: bool = False
    """ZeRO stage 3 gathers parameters for every forward and backward of a microbatch. False: once a step; they are kept
    until its last backward."""

    @property
    def degree(self) -> int:
        """Return how many ranks the layers are dealt out to, at least 1."""
        return 1 if self.stages in (None, AUTO) else int(self.stages or 1)

    @property
    def chunks_of_rank(self) -> int:
        """Return the number of virtual stages of a rank, at least 1."""
        return CHUNKS.get(self.schedule, 1) if self.chunks in (None, AUTO) else int(self.chunks or 1)

    @property
    def asynchronous(self) -> bool:
        """Return whether gradients are those of older weights."""
        return self.schedule in ASYNCHRONOUS

    @property
    def updates_inside(self) -> bool:
        """Return whether each stage updates its weights after each microbatch, inside of a step."""
        return self.schedule == "pipedream"
