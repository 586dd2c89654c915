"""`Estimator`: estimates the memory of ranks for many configurations of one model, in milliseconds each.

An estimate has three parts. The memory behavior of blocks is traced once for each way of running them
(`model_trace.py`). The engine's own code for stages, tensor parallelism and sharding determines what a rank
holds (`rank_part.py`, `simulated.py`). Then the actions of a step are replayed with the engine's own buffer
pool, unsharder and reducer, which determine what is in memory at each point (`replay.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from launcher.comm import Mesh
from launcher.config import CheckpointConfig, Config
from launcher.config.fault_tolerance import of_replica
from launcher.engine.assemble import resolve
from launcher.engine.offloading import HOST
from launcher.errors import ConfigError
from launcher.estimate.answer import DeviceBytes, Estimate
from launcher.estimate.attention_kernels import CPU_KERNELS
from launcher.estimate.model_trace import ModelTrace, ModelTraces, section_of
from launcher.estimate.offloaded_bytes import on
from launcher.estimate.rank_part import RankPart, RankParts
from launcher.estimate.replay import ScriptedStep, StepScript
from launcher.estimate.simulated import META, SimulatedRank
from launcher.estimate.states import StateBytes
from launcher.models.build import build_on_meta
from launcher.optim.build import params_of
from launcher.optim.upload import upload_bytes
from launcher.tensor.split import whole_numel

LONG = 2048
"""Default sequence length in tokens."""


class Estimator:
    """Estimates the memory of runs of one model; the traces of its blocks are cached.

    Args:
        model: a causal LM's config, or the model on meta, whose frozen parameters get no gradients.
        expert_load: tokens routed to the experts of the busiest rank, relative to an even share.
        attention: kernels of the device; see `attention_kernels.py`.
        on_host: whether the run is on CPUs, where device and host share one memory.
    """

    def __init__(
        self,
        model: PretrainedConfig | nn.Module,
        expert_load: float = 1.0,
        attention: Collection[str] = CPU_KERNELS,
        *,
        on_host: bool = False,
    ) -> None:
        whole: Any = model if isinstance(model, nn.Module) else build_on_meta(model)
        self.model = whole
        self.parameters = sum(map(whole_numel, self.model.parameters()))
        self.trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        text: Any = whole.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None)
        self.sequence = min(LONG, most) if isinstance(most, int) and most > 0 else LONG
        self._portions, self._traces = RankParts(self.model), ModelTraces(self.model, expert_load, attention)
        self._states: dict[str, StateBytes] = {}
        self._on_host = on_host

    def estimate(self, config: Config, world: int, rank: int = 0, sequence: int | None = None) -> Estimate:
        """Return the estimated memory of one rank.

        Args:
            config: configuration as loaded; "auto" is resolved here.
            world, rank: world size and rank. Ranks of one pipeline stage differ only by uneven splits.
            sequence: sequence length in tokens; None uses `LONG`, limited to the model's maximum.

        Raises:
            ConfigError: the JSON does not fit the number of ranks or the model.
        """
        sequence = sequence or self.sequence
        config, replicas = of_replica(config), config.fault_tolerance.replicas
        if world % replicas:
            raise ConfigError(f"{world} ranks cannot be divided into {replicas} replicas")
        world, rank = world // replicas, rank % (world // replicas)
        mesh, resolved, portion = self._laid_out(config, world, rank, sequence)
        states = self._states_of(resolved)
        paper = SimulatedRank(portion, resolved, mesh, states, on_host=self._on_host)
        script = StepScript(paper, portion, resolved, mesh, *self._traced(resolved, portion, sequence))
        step = _steady(script, paper)
        between = _held(paper, paper.pool.idle_bytes, 0)
        host = _host(paper) + _copies_of(resolved.checkpoint) * _written(paper, states)
        if not self._on_host:
            host += upload_bytes(gradient.flat for gradient in paper.gradients)
        if replicas > 1:
            host += _exchanged(paper)
        at_peak, kept = _held(paper, *step.at_peak), [held.total() for held in paper.kept()]
        return Estimate(rank, world, step.peaks, at_peak, between, host, paper.disk.most, tuple(kept))

    @property
    def attention(self) -> list[str]:
        """Return the attention kernels used so far."""
        return sorted(self._traces.used)

    def kept(self, config: Config, world: int, sequence: int | None = None) -> int:
        """Return the activation bytes that all blocks save for backward, per microbatch and tp rank."""
        sequence = sequence or self.sequence
        _, resolved, portion = self._laid_out(config, world, 0, sequence)
        traced, _ = self._traced(resolved, portion, sequence)
        return sum(traced(block).of(block).kept for block in range(len(portion.names)))

    def ranks(self, config: Config, world: int) -> range:
        """Return the ranks to estimate: the first of each pipeline stage, which stands for the others."""
        world //= config.fault_tolerance.replicas  # all replicas are alike
        return range(0, world, max(1, world // config.pipeline.degree))

    def run(self, config: Config, world: int, sequence: int | None = None) -> list[Estimate]:
        """Return the estimates of the ranks that `ranks` selects."""
        return [self.estimate(config, world, rank, sequence) for rank in self.ranks(config, world)]

    def copy(self) -> nn.Module:
        """Return a copy of the model on meta, for callers that modify it."""
        return copy.deepcopy(self.model)

    def _laid_out(
        self, config: Config, world: int, rank: int, sequence: int
    ) -> tuple[Mesh, Config, RankPart]:
        """Return the rank's mesh, the configuration resolved on it, and the rank's part of the model."""
        section = config.tensor_parallel
        degrees = {"pp": config.pipeline.degree, "cp": config.cp_degree, "tp": section.degree}
        mesh = Mesh.planned(META, world, rank, dp=config.dp_degree(world), **degrees)
        resolved = resolve(config, mesh, self.model, {})
        return mesh, resolved, self._portions.of(resolved, mesh, sequence)

    def _states_of(self, config: Config) -> StateBytes:
        key = repr(config.optimizer and (config.optimizer.type, params_of(config.optimizer), config.bf16))
        if key not in self._states:
            self._states[key] = StateBytes(config, self.model)
        return self._states[key]

    def _traced(self, config: Config, portion: RankPart, sequence: int) -> Any:
        """Return (the trace for each block, the trace for the modules before and after the blocks)."""
        section = section_of(config)
        plain = lambda: self._traces.of(config, sequence, recomputed=False)  # noqa: E731
        if section is None:
            found = plain()
            return lambda block: found, found
        again = self._traces.of(config, sequence, recomputed=True)
        number = len(portion.blocks)
        count = min(section.number_checkpoints or number, number)
        if count == number:
            return lambda block: again, again
        own = [name for name, _ in portion.blocks]
        chosen = {own[i * number // count] for i in range(count)}
        others = plain()

        def of(block: int) -> ModelTrace:
            return again if portion.names[block] in chosen else others

        return of, others


def _steady(script: StepScript, paper: SimulatedRank) -> ScriptedStep:
    """Return a steady-state step.

    In the first step, the unsharder records its order. In the second one, buffers may still be allocated
    after the peak; from the third one on they exist at the peak as well.
    """
    ScriptedStep(script).run(most=1)
    step, buffers = ScriptedStep(script), paper.pool.idle_bytes
    step.run()
    if paper.pool.idle_bytes > buffers:
        step = ScriptedStep(script)
        step.run()
    return step


def _held(paper: SimulatedRank, buffers: int, activations: int) -> DeviceBytes:
    parameters, gradients, optimizer = (on(META, held) for held in paper.kept())
    return DeviceBytes(parameters, gradients, optimizer, buffers, activations)


def _host(paper: SimulatedRank) -> int:
    """Return the bytes in host memory of offloaded shards, and of the buffers for shards on NVMe."""
    host = sum(on(HOST, held) for held in paper.kept())
    return host + paper.placements.buffers.idle.most


def _exchanged(paper: SimulatedRank) -> int:
    """Return the bytes of the fp32 gradients averaged over replicas, and of an equal receive buffer."""
    owned = (gradient.flat.owned for gradient in paper.gradients)
    return 8 * sum(part.stop - part.start for part in owned)


def _copies_of(section: CheckpointConfig) -> int:
    """Return how many copies of a rank's part of a checkpoint are in host memory.

    A background save holds one; `peer_memory` holds two steps each of this node and of the previous node.
    """
    in_memory = section.peer_memory.every > 0
    return int(section.writer.decoupled or in_memory) + 4 * in_memory


def _written(paper: SimulatedRank, states: StateBytes) -> int:
    """Return the bytes of this rank's part of a checkpoint."""
    total = 0
    for flat in paper.flats:
        share = flat.shard_span.stop - flat.shard_span.start
        total += share * flat.master_dtype.itemsize
    for gradient in paper.gradients:
        share = gradient.flat.shard_span.stop - gradient.flat.shard_span.start
        total += share * sum(dtype.itemsize for dtype in states.dtypes(gradient).values())
    return total
