"""Layouts of a run over its ranks: enumeration, and conversion from and to configurations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from launcher.config import Config
from launcher.plan.work import ModelWork

MICROBATCHES = (1, 2, 4, 8, 16, 32)
TENSOR = (1, 2, 4, 8, 16)
CONTEXT = (1, 2, 4, 8, 16)
ENOUGH = 4096  # minimum tokens of a sequence per cp rank
EXPERT = (1, 2, 4, 8, 16, 32, 64)
CHUNKS = (2, 3, 4, 5, 6, 7, 8)
OFFLOADS = ("none", "optimizer", "all")


@dataclass(frozen=True)
class Layout:
    """The parallelism and memory options of a run.

    Args:
        tp, pp, dp, cp: degrees; their product is the world size.
        stage: ZeRO stage.
        micro: sequences per microbatch.
        accumulation: microbatches per step.
        schedule, chunks: pipeline schedule and chunks; "1f1b" and 1 without stages.
        recompute: whether blocks use activation checkpointing.
        sequence_parallel: whether activations between split layers are sharded over the tp ranks.
        offload: "none", "optimizer" (optimizer states in host memory) or "all" (parameters as well).
        ep: expert-parallel degree, over dp and cp ranks.
        dispatch: what its ranks send each other: "pairs" or "tokens".
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    stage: int = 0
    micro: int = 1
    accumulation: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: bool = False
    sequence_parallel: bool = False
    offload: str = "none"
    cp: int = 1
    ep: int = 1
    dispatch: str = "pairs"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def mesh(self) -> tuple[int, int, int, int, int]:
        return self.tp, self.pp, self.dp, self.cp, self.ep

    @property
    def degrees(self) -> tuple[int, int, int, int, int]:
        """Return the degrees of all axes whose ranks communicate."""
        return self.dp, self.cp, self.tp, self.pp, self.ep

    @property
    def copies(self) -> int:
        """Return the number of ranks that hold the same parameters, over which ZeRO shards."""
        return self.dp * self.cp

    def in_words(self) -> str:
        """Return "tp 8, pp 4, dp 2, ZeRO 1, microbatch 1 x 32, 1f1b, blocks recomputed"."""
        words = [f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}", f"ZeRO {self.stage}"]
        words[2:2] = [f"cp {self.cp}"] * (self.cp > 1)
        words[-1:-1] = [f"ep {self.ep}"] * (self.ep > 1)
        words.append(f"microbatch {self.micro} x {self.accumulation}")
        if self.pp > 1:
            words.append(self.schedule + (f" x {self.chunks}" if self.schedule == "interleaved" else ""))
        words += ["blocks recomputed"] * self.recompute
        words += [f"offload {self.offload}"] * (self.offload != "none")
        return ", ".join(words)


def layouts(
    work: ModelWork,
    world: int,
    batch: int,
    *,
    stages: tuple[int, ...] = (0, 1, 2, 3),
    recompute: tuple[bool, ...] = (False, True),
    offloads: tuple[str, ...] = OFFLOADS,
) -> Iterator[Layout]:
    """Yield all layouts of `world` ranks that can run the model with `batch` sequences per step.

    Args:
        stages, recompute, offloads: values to try.
    """
    for (tp, pp, dp, cp), ep in product(meshes(work, world), EXPERT):
        if batch % dp or not _spreads(work, tp, dp * cp, ep):
            continue
        for micro in MICROBATCHES:
            if (batch // dp) % micro:
                continue
            accumulation = batch // dp // micro
            for schedule, chunks in _schedules(work, pp, accumulation):
                for stage in stages:
                    for offload in offloads:
                        if not _makes_sense(stage, dp * cp, offload):
                            continue
                        for recomputed in recompute:
                            yield Layout(
                                tp,
                                pp,
                                dp,
                                stage,
                                micro,
                                accumulation,
                                schedule,
                                chunks,
                                recomputed,
                                tp > 1 and work.sequence % (tp * cp) == 0,
                                offload,
                                cp,
                                ep,
                            )


def _spreads(work: ModelWork, tp: int, copies: int, ep: int) -> bool:
    """Return whether to try an expert-parallel degree.

    Together with tp, it would work only without `sequence_parallel`, which is rarely the fastest.
    """
    return ep == 1 or (tp == 1 and copies % ep == 0 and work.experts >= ep)


def _makes_sense(stage: int, copies: int, offload: str) -> bool:
    """Return whether to try a stage: offload has a minimum stage, and higher stages need several ranks."""
    least = {"none": 0, "optimizer": 1, "all": 3}[offload]
    return stage >= least and (copies > 1 or stage == least)


def meshes(work: ModelWork, world: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tp, pp, dp, cp): tp divides the heads, stages have blocks, and cp ranks have enough tokens."""
    for tp, cp in product(TENSOR, CONTEXT):
        if world % (tp * cp) or work.heads % tp or (cp > 1 and work.sequence < cp * ENOUGH):
            continue
        if tp > 1 and work.packed:
            continue
        if cp > 1 and work.in_one_piece:
            continue
        rest = world // tp // cp
        for pp in range(1, 2 if work.in_one_piece else min(rest, work.layers) + 1):
            if rest % pp == 0:
                yield tp, pp, rest // pp, cp


def _schedules(work: ModelWork, pp: int, microbatches: int) -> Iterator[tuple[str, int]]:
    yield "1f1b", 1
    if pp == 1:
        return
    if microbatches >= pp:
        yield "zb-h1", 1
        for chunks in CHUNKS:
            if chunks * pp <= work.layers and microbatches % pp == 0:
                yield "interleaved", chunks
    if 2 * pp <= work.layers:
        yield "zbv", 2


def layout_of(config: Config, world: int) -> Layout:
    """Return the layout of a run.

    Args:
        config: resolved configuration.
        world: world size.
    """
    tensor, pipeline, zero = config.tensor_parallel, config.pipeline, config.zero_optimization
    states = zero.offload_optimizer is not None and zero.offload_optimizer.device != "none"
    offload = "all" if zero.parameters_elsewhere is not None else "optimizer" if states else "none"
    return Layout(
        tp=tensor.degree,
        pp=pipeline.degree,
        dp=config.dp_degree(world),
        stage=zero.stage,
        micro=int(str(config.train_micro_batch_size_per_gpu)),
        accumulation=int(str(config.gradient_accumulation_steps)),
        schedule=pipeline.schedule,
        chunks=pipeline.chunks_of_rank,
        recompute=config.activation_checkpointing is not None or pipeline.activation_checkpoint_interval > 0,
        sequence_parallel=tensor.sequence_parallel,
        offload=offload,
        cp=config.cp_degree,
        ep=config.expert_parallel.degree,
        dispatch=config.expert_parallel.dispatch,
    )


def as_json(layout: Layout, *, dtype: str = "bf16") -> dict[str, Any]:
    """Return the configuration of a layout as the content of a ds_config.json, with AdamW as the optimizer.

    Args:
        dtype: "bf16", "fp16" or "fp32".
    """
    zero: dict[str, Any] = {"stage": layout.stage}
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro,
        "gradient_accumulation_steps": layout.accumulation,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "gradient_clipping": 1.0,
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if layout.tp > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tp, "sequence_parallel": layout.sequence_parallel}
    if layout.cp > 1:
        config["sequence_parallel_size"] = layout.cp
    if layout.ep > 1:
        config["expert_parallel"] = {"size": layout.ep, "dispatch": layout.dispatch}
    if layout.pp > 1:
        config["pipeline"] = {"stages": layout.pp, "schedule": layout.schedule}
        if layout.schedule == "interleaved":
            config["pipeline"]["chunks"] = layout.chunks
    if layout.recompute:
        config["activation_checkpointing"] = {"partition_activations": False}
    return config
