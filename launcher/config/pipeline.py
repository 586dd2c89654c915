"""`pipeline`: the blocks of a model are dealt out to stages (Huang et al. 2018, arXiv:1811.06965)."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from launcher.config.problems import show
from launcher.config.section import AUTO, Section
from launcher.config.values import Count, WholeNumber, complaint, lower

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
MUCH = 0.2
"""Share of its time that a rank may stand still before it is worth a word."""


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
    try:
        re.compile(method.removeprefix(TYPE))
    except re.error as error:
        what = f"{show(method.removeprefix(TYPE))} is not a regular expression: {error.msg}"
        raise complaint(what, 'write for example "type:decoderlayer"') from None
    return method


def idle_share(schedule: str, stages: int, microbatches: int, chunks: int) -> float | None:
    """Return the share of a step in which ranks stand still, stages being alike; for "1f1b" (P - 1) / (m + P - 1).

    None where no formula is known, and for "zbv", which hardly waits. "zb-h1": forward, input gradient and weight
    gradient take the same time.
    """
    waits, works = stages - 1, microbatches * chunks
    if schedule == "interleaved":
        waits += max(0, stages - microbatches) * (chunks - 1)
    elif schedule == "zb-h1" and microbatches >= stages:
        works *= 3
    elif schedule not in ("1f1b", "gpipe", *ASYNCHRONOUS):  # these drain at the end of a step, too
        return None
    return waits / (works + waits)


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
    """What is balanced among the stages: "best" the estimated operations of a forward, "uniform" the number of layers,
    "parameters" their elements, "type:REGEX" the layers whose class name matches, "profile" the times that rank 0
    measures before the cut (of a PipelineModule with the first rows of initialize(training_data=...))."""

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
