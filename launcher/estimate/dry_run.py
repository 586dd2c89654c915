"""A run rehearsed: the real engine on one rank of a mesh of any size, with hollow tensors and ranks that do not exist.

What is measured is what the engine does: padding, prefetch, buffers, recomputation and all. Three steps are taken: in
the first one the optimizer makes its states and ZeRO-3 learns its order; the second one finds the peak; the third one
is looked at there: who holds what.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.config import Config
from launcher.engine.assemble import initialize
from launcher.engine.engine import Engine
from launcher.errors import ConfigError
from launcher.estimate.hollow import Hollow
from launcher.estimate.live import Counting, LiveBytes
from launcher.zero.slot import Reader, Slot

DEVICE = torch.device("cpu")
IDS = 100  # token ids are below it
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
    if config.pipeline.degree > 1:
        raise ConfigError(
            "a dry run of a model in stages is not there yet",
            where="pipeline.stages",
            fix="leave --dry-run out",
        )
    _fill_buffers(model)
    with _ranks(world, rank):
        return rehearse(
            lambda: initialize(model=model, config=config, device=DEVICE, source=_Anything())[0],
            sequence,
            Hollow,
        )


def rehearse(make: Callable[[], Engine], sequence: int, mode: Callable[[LiveBytes], Counting]) -> DryRun:
    """What the steps of an engine take, looked at from inside.

    Args:
        make: gives the engine.
        mode: `Hollow`, or `Counting` for a run that really computes.
    """
    watcher = _Watcher()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # modes belong to one thread
    with mode(watcher.live):
        engine = make()
        try:
            _step(engine, sequence, watcher)
            between = held(engine, watcher.live.now)
            watcher.begin(engine)
            _step(engine, sequence, watcher)
            peaks = dict(watcher.peaks)
            watcher.look_at(max(peaks.values()))
            _step(engine, sequence, watcher)
            world, rank = engine.mesh.world_size, engine.mesh.rank
            return DryRun(rank, world, peaks, watcher.seen or between, between)
        finally:
            engine.destroy()
            torch.set_num_threads(threads)


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
        self.phase, self.peaks = "forward", dict.fromkeys(("forward", "backward", "step"), 0)
        self.engine: Engine | None = None
        self.seen: Held | None = None
        self._wanted: int | None = None

    def begin(self, engine: Engine) -> None:
        """A step begins whose peaks count."""
        self.engine = engine
        self.peaks = dict.fromkeys(self.peaks, 0)
        self.live.restart()

    def look_at(self, peak: int) -> None:
        """In the next step: look whenever there is more than before, and nearly as much as this."""
        self._wanted = int(NEARLY * peak)
        self.live.restart()

    def enter(self, phase: str) -> None:
        """What follows is counted for this phase."""
        self.leave()
        self.phase, self.live.peak = phase, self.live.now

    def leave(self) -> None:
        self.peaks[self.phase] = max(self.peaks[self.phase], self.live.peak)

    def _at_new_peak(self) -> str:
        if self.engine is not None and self._wanted is not None and self.live.now > self._wanted:
            self._wanted, self.seen = self.live.now, held(self.engine, self.live.now)
        return self.phase


def _step(engine: Engine, sequence: int, watcher: _Watcher) -> None:
    gc.collect()  # what waits for Python's collector is no need of the step
    for _ in range(engine.gradient_accumulation_steps()):
        ids = torch.randint(IDS, (engine.train_micro_batch_size_per_gpu(), sequence))
        watcher.enter("forward")
        loss = engine(input_ids=ids, labels=ids).loss
        watcher.enter("backward")
        engine.backward(loss)
        del loss
        watcher.enter("step")
        engine.step()
    watcher.leave()


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
