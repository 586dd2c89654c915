"""`tensor_parallel`: layers are split over ranks (Shoeybi et al. 2019, arXiv:1909.08053)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from launcher.config.data_types import Dtype
from launcher.config.partition import PartitionConfig
from launcher.config.section import AUTO, Conflict, Count, Remark, Section, WholeNumber, lower


def _null_is_true(value: Any) -> Any:
    return True if value is None else value


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
        "tp_overlap_comm": "true unless it is written false",
        "sequence_parallel": "a key of this launcher; DeepSpeed has none for it",
    }

    autotp_size: WholeNumber = 0
    """Ranks that share a layer; 0 and 1: none do. It must divide the number of ranks."""

    dtype: Dtype | None = None
    """Dtype of the split layers; null: that of the model. It follows from `fp16` and `bf16`; another one is refused."""

    tp_overlap_comm: Annotated[bool, BeforeValidator(_null_is_true)] = True
    """In the backward of a column-split layer the gradient of the input is reduced while the gradient of the weight is
    computed."""

    sequence_parallel: bool = False
    """Between the split layers each rank has a slice of the sequence: norms, dropout and residuals are neither computed
    nor kept twice (Korthikanti et al. 2022, arXiv:2205.05198). Reduce-scatter and all-gather take the place of
    all-reduce; as many bytes are sent."""

    vocab_parallel_lm_head: bool | None = None
    """True: the output head must be split over the vocabulary, and no rank ever has all logits while it trains; a model
    with which that cannot be is an error. False: logits are gathered. Null: split where the model allows it."""

    vocab_parallel_ce_backend: Literal["torch", "liger"] = "torch"
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
    """DeepSpeed can put kernels for inference in."""

    @property
    def degree(self) -> int:
        """Ranks that share a layer, at least 1."""
        return 1 if self.autotp_size == AUTO else max(1, self.autotp_size)

    def conflicts(self) -> Iterator[Conflict]:
        yield from self._sizes()
        if self.vocab_parallel_ce_backend == "liger":
            what = "is not implemented: the loss reads the split logits once, and needs no kernels of Liger's"
            yield Conflict(("vocab_parallel_ce_backend",), f'"liger" {what}', 'write "torch"')

    def _sizes(self) -> Iterator[Conflict]:
        """The degree at its other places: 1, or the same."""
        rules = self.partition_config
        for key, size in (
            ("tp.tp_size", self.tp.tp_size),
            ("partition_config.tp_size", rules and rules.tp_size),
        ):
            if AUTO in (size, self.autotp_size) or size in (None, 1, self.autotp_size):
                continue
            keys = (key, "autotp_size")
            if "autotp_size" in self.model_fields_set:
                what = f"{key} {size} contradicts autotp_size {self.autotp_size}"
                yield Conflict(keys, what, f"write the same number, or delete {key}")
            else:
                what = f"{key} {size} alone splits nothing, neither here nor in DeepSpeed"
                yield Conflict(keys, what, f'write "autotp_size": {size} in tensor_parallel')

    def remarks(self) -> Iterator[Remark]:
        if self.sequence_parallel is True and self.degree == 1:
            yield Remark("sequence_parallel", "does nothing while autotp_size leaves every layer on one rank")
