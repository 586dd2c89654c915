"""Dry run: the real engine as one rank of a mesh of any size, with fake tensors and a fake process group.

The measurement includes everything that the engine does: padding, prefetch, buffers and recomputation. It
takes three steps. In the first one, the optimizer creates its states and ZeRO-3 records the order of its
units. In the second one, buffers are allocated in that order, some after the peak. The third one is measured,
with a breakdown by component as memory approaches the peak of the second.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.config import Config
from launcher.engine.assemble import initialize, split_layers
from launcher.engine.dtypes import DTYPES
from launcher.engine.engine import Engine
from launcher.engine.offloading import HOST, open_placements
from launcher.engine.same_inputs import CutBy
from launcher.engine.sharing import share_sequences
from launcher.estimate.answer import PHASES, DeviceBytes, Estimate
from launcher.estimate.fake import FakeMode, fused_dropout
from launcher.estimate.live import LiveBytes, LiveBytesMode
from launcher.estimate.model_trace import fill_buffers, microbatch, one_thread
from launcher.estimate.offloaded_bytes import gradients_of, masters_of, on, parameters_of
from launcher.estimate.tiers import CountingTier
from launcher.offload.tier import buffer
from launcher.pipeline.crossing import signature_of
from launcher.pipeline.hf.staged import StagedModel
from launcher.tensor.split_model import loss_only
from launcher.zero.gradients import FlatGradient
from launcher.zero.slot import ParamReader, ParamSlot

DEVICE = torch.device("cpu", 0)  # its tensors are CPU tensors, but placements differ from the host's
NEARLY = 0.95  # share of the previous step's peak above which a breakdown is worth its time


def dry_run(
    model: nn.Module,
    config: Config,
    *,
    world: int,
    rank: int = 0,
    sequence: int = 2048,
    device: torch.device = DEVICE,
) -> Estimate:
    """Take a few steps of a run without allocating memory and without computing.

    Args:
        model: a causal LM on meta; consumed by the dry run.
        world, rank: world size and rank.
        sequence: sequence length in tokens; the JSON sets the numbers of sequences and microbatches.
        device: HOST if device and host share one memory, as in a run on CPUs.

    Raises:
        ConfigError: the JSON does not fit the number of ranks or the model.
    """
    fill_buffers(model, device)
    with _ranks(world, rank), fused_dropout():

        def make(live: LiveBytes) -> Engine:
            whole = copy.deepcopy(model) if config.pipeline.degree > 1 else None
            placements = partial(open_placements, tier_at=lambda path: CountingTier())
            if device != HOST:
                placements = partial(
                    placements, make=lambda numel, dtype: live.note_host(buffer(numel, dtype))
                )
            engine = initialize(
                model=model,
                config=config,
                device=device,
                source=_Anything(),
                placements=placements,
                seq_length=sequence,  # stages are cut for it, as in a recipe
            )[0]
            if whole is not None:
                learn_crossings(engine, whole, batch_of(engine, sequence))
            return engine

        return rehearse(make, sequence, FakeMode)


def rehearse(
    make: Callable[[LiveBytes], Engine], sequence: int, mode: Callable[[LiveBytes], LiveBytesMode]
) -> Estimate:
    """Return the memory of an engine's steps, measured from inside the process.

    Args:
        make: creates the engine; it must register separate host memory with the `LiveBytes` that it gets.
        sequence: sequence length of the microbatches in tokens.
        mode: `FakeMode`, or `LiveBytesMode` for a run that really computes.
    """
    watcher = _Watcher()
    with one_thread(), mode(watcher.live):
        engine = make(watcher.live)
        watcher.listen(engine)
        batch = batch_of(engine, sequence)
        try:
            _step(engine, batch)
            _note_states(engine, watcher.live)
            watcher.begin()
            _step(engine, batch)
            watcher.look_at(max(watcher.end().values()))
            watcher.begin()
            # The first step with all buffers already allocated, as in all later steps.
            _step(engine, batch)
            peaks, between = watcher.end(), held(engine, watcher.live.now)
            tiers = engine.zero.placements.tiers
            return Estimate(
                engine.mesh.rank,
                engine.mesh.world_size,
                peaks,
                watcher.seen or between,
                between,
                watcher.live.host_peak,
                sum(tier.most for tier in tiers if isinstance(tier, CountingTier)),
            )
        finally:
            engine.destroy()


def batch_of(engine: Engine, sequence: int) -> dict[str, Tensor]:
    """Return a microbatch for the engine's rank."""
    return microbatch(engine.module, engine.train_micro_batch_size_per_gpu(), sequence)


def learn_crossings(engine: Engine, whole: nn.Module, batch: dict[str, Tensor]) -> None:
    """Record the tensors sent between all stages, which in a run are exchanged in the first step.

    Args:
        whole: the unsharded model on meta, not cut into stages; consumed by this function.
    """
    own: Any = engine.runtime.staged
    split_model = split_layers(whole, engine.mesh, engine.resolved)
    share_sequences(whole, engine.mesh, engine.resolved, CutBy.HOOKS)
    dtype = DTYPES[engine.resolved.dtype]
    for module in whole.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
    stages = len(own.rank_of)
    alone = StagedModel(whole, own.boundaries, [0] * stages, 0, split_model.sequence)
    signature = signature_of(batch)
    received: tuple[Tensor, ...] = ()
    with torch.no_grad(), loss_only():
        for stage in range(stages):
            received = alone.forward(stage, received, signature, lambda module: module(**batch))
            own.tell(stage, signature, alone.learned(stage, signature))


def held(engine: Engine, live: int) -> DeviceBytes:
    """Break the bytes that are live on the device down by component."""
    zero = engine.zero
    pool, device = zero.pool, zero.pool.device
    gathered = sum(flat.full.nbytes for flat in zero.flats if flat.sharded and flat.full is not None)
    buffers = pool.idle_bytes + gathered
    optimizer = masters_of(zero.flats)
    for gradient, tensors in _states(engine).items():
        optimizer[gradient.flat.optim_placement] += sum(tensor.nbytes for tensor in tensors)
    kept = parameters_of(zero.flats), gradients_of(zero.gradients), optimizer
    parameters, gradients, states = (on(device, one) for one in kept)
    known = parameters + gradients + states + buffers
    return DeviceBytes(parameters, gradients, states, buffers, max(0, live - known))


class _Watcher:
    """Tracks the peak of each phase, and the bytes by component at the largest one."""

    def __init__(self) -> None:
        self.live = LiveBytes(self._at_new_peak)
        self.seen: DeviceBytes | None = None
        self._phase, self._peaks = PHASES[0], dict.fromkeys(PHASES, 0)
        self._engine: Engine | None = None
        self._wanted: int | None = None

    def listen(self, engine: Engine) -> None:
        """Follow the phases of the engine from now on."""
        self._engine, said = engine, engine.telemetry.phase

        def phase(name: str, of: Engine) -> AbstractContextManager[None]:
            self._enter(name)
            return said(name, of)

        engine.telemetry.phase = phase  # type: ignore[method-assign,assignment]

    def begin(self) -> None:
        """Reset the peaks at the start of a measured step."""
        self._peaks = dict.fromkeys(PHASES, 0)
        self.live.restart()

    def end(self) -> dict[str, int]:
        """Return the peaks since `begin`."""
        self._enter(self._phase)
        return dict(self._peaks)

    def look_at(self, peak: int) -> None:
        """Take a breakdown at each new peak of the next step that is close to `peak`."""
        self._wanted = int(NEARLY * peak)
        self.live.restart()

    def _enter(self, phase: str) -> None:
        self._peaks[self._phase] = max(self._peaks[self._phase], self.live.peak)
        self._phase = phase
        self.live.restart()

    def _at_new_peak(self) -> None:
        if self._engine is not None and self._wanted is not None and self.live.now > self._wanted:
            self._wanted, self.seen = self.live.now, held(self._engine, self.live.now)


def _step(engine: Engine, batch: dict[str, Tensor]) -> None:
    gc.collect()  # uncollected garbage must not count as memory of the step
    number = engine.gradient_accumulation_steps()
    engine.run_microbatches([batch] * number, [1 / number] * number)
    engine.step()


def _states(engine: Engine) -> dict[FlatGradient, list[Tensor]]:
    """Return the optimizer's state tensors for each flat buffer."""
    optimizer = engine.optimizer
    if optimizer is None:
        return {}
    known = optimizer.inner.state
    return {
        gradient: [
            value
            for slot in gradient.flat.slots
            if (tensor := optimizer.tensors.get(slot.name)) is not None
            for value in known.get(tensor, {}).values()
            if isinstance(value, Tensor)
        ]
        for gradient in engine.zero.gradients
    }


def _note_states(engine: Engine, live: LiveBytes) -> None:
    """Count the optimizer states of shards that are offloaded to the host as host memory."""
    for gradient, tensors in _states(engine).items():
        if gradient.flat.optim_placement.device != engine.zero.pool.device:
            for tensor in tensors:
                live.note_host(tensor)


class _Anything:
    """Source of uninitialized parameter values, which nothing reads."""

    @contextmanager
    def open(self, slots: list[ParamSlot]) -> Iterator[ParamReader]:
        dtypes = {slot.name: slot.leaf.dtype for slot in slots}
        yield lambda name, start, stop: torch.empty(stop - start, dtype=dtypes[name])


@contextmanager
def _ranks(world: int, rank: int) -> Iterator[None]:
    """Run inside a fake process group, in which only this rank exists."""
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
