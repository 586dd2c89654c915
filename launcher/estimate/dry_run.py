"""A run rehearsed: the real engine on one rank of a mesh of any size, with hollow tensors and ranks that do not exist.

What is measured is what the engine does: padding, prefetch, buffers, recomputation and all. Three steps are taken: in
the first one the optimizer makes its states and ZeRO-3 learns its order; the second one finds the peak; the third one
is looked at there: who holds what.
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.config import Config
from launcher.engine.assemble import initialize, split_layers
from launcher.engine.dtypes import DTYPES
from launcher.engine.engine import Engine
from launcher.errors import ConfigError
from launcher.estimate.hollow import Hollow
from launcher.estimate.live import Counting, LiveBytes
from launcher.pipeline.crossing import signature_of
from launcher.pipeline.staged import StagedModel
from launcher.tensor.head import loss_only
from launcher.zero.slot import Reader, Slot

DEVICE = torch.device("cpu")
IDS = 100  # token ids are below it
PHASES = ("forward", "backward", "step")
NEARLY = 0.95  # of the peak of the step before, when a look is worth its time


@dataclass(frozen=True)
class Held:
    """Bytes of tensors, by what they are for.

    Args:
        parameters: what this rank keeps of them between steps.
        gradients: of them; where the stage shards them, this rank's share.
        optimizer: master weights and states.
        buffers: gathered parameters, gradients on their way, and memory that waits to be used again.
        activations: all else: what backward will need, its temporaries, logits and loss.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations

    @property
    def model_states(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class DryRun:
    """What was found.

    Args:
        peaks: bytes at most in each phase of a step: forward, backward, step.
        at_peak: who holds what when there is most.
        between: the same between steps.
    """

    rank: int
    world: int
    peaks: dict[str, int]
    at_peak: Held
    between: Held

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def phase(self) -> str:
        """The one with the peak."""
        return max(self.peaks, key=lambda name: self.peaks[name])


def dry_run(model: nn.Module, config: Config, *, world: int, rank: int = 0, sequence: int = 2048) -> DryRun:
    """Take a few steps of a run without memory and without compute.

    Args:
        model: a causal LM on meta; it is used up.
        world, rank: of the run.
        sequence: tokens of a sequence; the JSON has the number of sequences and microbatches.

    Raises:
        ConfigError: the JSON does not go with so many ranks, or with the model.
    """
    _refuse_disks(config)
    _fill_buffers(model)
    batch = batch_of(config, sequence)
    with _ranks(world, rank):

        def make() -> Engine:
            whole = copy.deepcopy(model) if config.pipeline.degree > 1 else None
            engine = initialize(model=model, config=config, device=DEVICE, source=_Anything())[0]
            if whole is not None:
                learn_crossings(engine, whole, batch)
            return engine

        return rehearse(make, batch, Hollow)


def rehearse(
    make: Callable[[], Engine], batch: dict[str, Tensor], mode: Callable[[LiveBytes], Counting]
) -> DryRun:
    """What the steps of an engine take, looked at from inside.

    Args:
        make: gives the engine.
        batch: each of its microbatches.
        mode: `Hollow`, or `Counting` for a run that really computes.
    """
    watcher = _Watcher()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # modes belong to one thread
    with mode(watcher.live):
        engine = make()
        watcher.listen(engine)
        try:
            _step(engine, batch)
            between = held(engine, watcher.live.now)
            watcher.begin()
            _step(engine, batch)
            peaks = watcher.end()
            watcher.look_at(max(peaks.values()))
            _step(engine, batch)
            return DryRun(engine.mesh.rank, engine.mesh.world_size, peaks, watcher.seen or between, between)
        finally:
            engine.destroy()
            torch.set_num_threads(threads)


def _refuse_disks(config: Config) -> None:
    zero = config.zero_optimization
    for key, section in (
        ("offload_param", zero.offload_param),
        ("offload_optimizer", zero.offload_optimizer),
    ):
        if section is not None and section.device == "nvme":
            raise ConfigError(
                "a run with shards on NVMe cannot be rehearsed yet",
                where=f"zero_optimization.{key}.device",
                fix='write "cpu": what the disk would hold is counted as memory then',
            )


def batch_of(config: Config, sequence: int) -> dict[str, Tensor]:
    """A microbatch of one rank."""
    size = config.train_micro_batch_size_per_gpu
    ids = torch.randint(IDS, (size if isinstance(size, int) else 1, sequence))
    return {"input_ids": ids, "labels": ids}


def learn_crossings(engine: Engine, whole: nn.Module, batch: dict[str, Tensor]) -> None:
    """Tell the stages of this rank what crosses between all of them, as their neighbours would in the first step.

    Args:
        whole: the model on meta, not split and not cut; it is used up.
    """
    assert engine.runtime is not None
    own: Any = engine.runtime.staged
    split_model = split_layers(whole, engine.mesh, engine.resolved)
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


def held(engine: Engine, live: int) -> Held:
    """Who holds what of the bytes that are alive now."""
    states = engine.zero.held_bytes()
    optimizer = 0 if engine.optimizer is None else _bytes_of_states(engine)
    pool = engine.zero.pool
    gathered = sum(flat.full.nbytes for flat in engine.zero.flats if flat.sharded and flat.full is not None)
    buffers = pool.idle_bytes + gathered
    known = states["parameters"] + states["gradients"] + states["master"] + optimizer + buffers
    return Held(
        states["parameters"], states["gradients"], states["master"] + optimizer, buffers, max(0, live - known)
    )


class _Watcher:
    """Peaks by phase, and a look at the moment of the largest one."""

    def __init__(self) -> None:
        self.live = LiveBytes("cpu", self._at_new_peak)
        self.seen: Held | None = None
        self._phase, self._peaks = PHASES[0], dict.fromkeys(PHASES, 0)
        self._engine: Engine | None = None
        self._wanted: int | None = None

    def listen(self, engine: Engine) -> None:
        """From now on the engine says which phase it is in."""
        self._engine, said = engine, engine.watch.phase

        def phase(name: str, of: Engine) -> AbstractContextManager[None]:
            self._enter(name)
            return said(name, of)

        engine.watch.phase = phase  # type: ignore[method-assign,assignment]

    def begin(self) -> None:
        """A step begins whose peaks count."""
        self._peaks = dict.fromkeys(PHASES, 0)
        self.live.restart()

    def end(self) -> dict[str, int]:
        """The peaks since."""
        self._enter(self._phase)
        return dict(self._peaks)

    def look_at(self, peak: int) -> None:
        """In the next step: look whenever there is more than before, and nearly as much as this."""
        self._wanted = int(NEARLY * peak)
        self.live.restart()

    def _enter(self, phase: str) -> None:
        self._peaks[self._phase] = max(self._peaks[self._phase], self.live.peak)
        self._phase, self.live.peak = phase, self.live.now

    def _at_new_peak(self) -> str:
        if self._engine is not None and self._wanted is not None and self.live.now > self._wanted:
            self._wanted, self.seen = self.live.now, held(self._engine, self.live.now)
        return self._phase


def _step(engine: Engine, batch: dict[str, Tensor]) -> None:
    gc.collect()  # what waits for Python's collector is no need of the step
    number = engine.gradient_accumulation_steps()
    engine.run_microbatches([batch] * number, [1 / number] * number)
    engine.step()


def _bytes_of_states(engine: Engine) -> int:
    assert engine.optimizer is not None
    shown = sum(
        value.nbytes
        for state in engine.optimizer.inner.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )
    return shown + sum(state.held_bytes for state in engine.optimizer.states.values())


class _Anything:
    """Values of parameters that nobody looks at."""

    @contextmanager
    def open(self, slots: list[Slot]) -> Iterator[Reader]:
        dtypes = {slot.name: slot.leaf.dtype for slot in slots}
        yield lambda name, start, stop: torch.empty(stop - start, dtype=dtypes[name])


def _fill_buffers(model: nn.Module) -> None:
    """Buffers get zeros: they are small, and only their shapes matter."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=DEVICE)


@contextmanager
def _ranks(world: int, rank: int) -> Iterator[None]:
    """A process group of ranks that do not exist, but for this one."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    if world > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before
