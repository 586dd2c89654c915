"""Bitwise checks that detect silent data corruption by memory and processors (`replica_check`).

There are three checks. Values replicated on several ranks are compared between them. Values that one rank
holds alone between two steps are checksummed. Computations are run twice. If a check fails, the optimizer
does not step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.comm.plain import gather_plain
from launcher.errors import LauncherError, first_names
from launcher.pipeline.executor.batches import LazySequence

if TYPE_CHECKING:
    from launcher.config.fault_tolerance import ReplicaCheckConfig
    from launcher.engine.core import EngineCore
    from launcher.zero.features.resting import RestingValues

logger = logging.getLogger("launcher")
Losses = tuple[Tensor, Sequence[float]]


class BitChecks:
    """The bitwise checks of an engine.

    Args:
        section: the `replica_check` section.
    """

    def __init__(self, section: ReplicaCheckConfig) -> None:
        self._section = section
        self._resting: RestingValues | None = None
        self._replayed = False  # in this step
        self._said = False  # that some steps are not replayed

    def before_step(self, engine: EngineCore) -> None:
        """Check the values that the step is about to change. Collective.

        Raises:
            LauncherError: on every rank that was compared: a check failed, and `action` is not "warn".
        """
        every, optimizer = self._section.every, engine.optimizer
        if self._replays_in(engine) and not self._replayed:
            if not self._said:
                logger.warning(
                    "step %d is not replayed (replica_check.replay_every): this script calls forward "
                    "and backward itself; only steps of engine.train_batch() are replayed",
                    engine.global_steps + 1,
                )
            self._said = True
        self._replayed = False
        if optimizer is None or engine.versions is not None:
            return
        if every and (engine.global_steps + 1) % every == 0 and engine.world_size > 1:
            from launcher.zero.features.replicas import compare_replicas

            with self._acting(engine):
                compare_replicas(engine.zero.flats, optimizer.states_in_memory)
        if self._resting is not None:
            with self._acting(engine):
                _raise_where(
                    gather_plain(self._resting.changed(engine.zero.flats, optimizer.states_in_memory)),
                    "has different bits in {} than after the previous step, although nothing has "
                    "written to it",
                    "test the memory of this rank's host or GPU, and resume from a checkpoint before "
                    "this step on another one. Writes through tensor.data are not detected: write to "
                    "the tensor instead",
                )

    def after_step(self, engine: EngineCore) -> None:
        """Record checksums of the values that only this rank holds until the next step."""
        if engine.optimizer is None or engine.versions is not None:
            return
        if self._resting is None:
            from launcher.zero.features.resting import RestingValues

            self._resting = RestingValues()
        self._resting.note(engine.zero.flats, engine.optimizer.states_in_memory)

    def forget(self) -> None:
        """Discard the recorded checksums, after a checkpoint was loaded."""
        if self._resting is not None:
            self._resting.forget()

    def microbatches(
        self, engine: EngineCore, batches: LazySequence[Any], run: Callable[[Sequence[Any]], Losses]
    ) -> Losses:
        """Return run(batches), which computes a step's microbatches; run it twice every `replay_every` steps.

        Raises:
            LauncherError: on every rank: the bits of a gradient or a loss differed the second time.
        """
        if not self._replays_in(engine) or engine._backwards:
            return run(batches)
        self._replayed = True
        return self._twice(engine, batches, run)

    def _replays_in(self, engine: EngineCore) -> bool:
        """Return whether the microbatches of the current step are computed twice."""
        every = self._section.replay_every
        return bool(every) and (engine.global_steps + 1) % every == 0

    def _twice(
        self, engine: EngineCore, batches: LazySequence[Any], run: Callable[[Sequence[Any]], Losses]
    ) -> Losses:
        from launcher.engine.random_state import random_states, restore_random_states
        from launcher.zero.features.watched_gradients import WatchedGradients

        begin, after_reading = random_states("", engine.device), []

        def read(index: int) -> Any:
            """Read a batch, and store the random state after it: reading may draw random numbers."""
            batch = batches[index]
            after_reading.append(random_states("", engine.device))
            return batch

        def read_again(index: int) -> Any:
            restore_random_states(after_reading[index], engine.device)
            return batches[index]

        buffers = [
            (module._buffers, name, buffer, buffer.clone())
            for module in engine.module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        watched = WatchedGradients(engine.zero.gradients)
        with watched, _deterministic():
            flush, length = engine.zero.reducer.flush, len(batches)
            first = watched.bits(lambda: run(LazySequence(length, read)), flush)[0]
            engine.zero.zero_grad()
            restore_random_states(begin, engine.device)
            with torch.no_grad():
                for owners, name, buffer, before in buffers:
                    owners[name] = buffer.copy_(before)  # a module may have replaced the tensor
            for forget in engine.zero.callbacks.before_replay:
                forget()
            second, losses = watched.bits(lambda: run(LazySequence(length, read_again)), flush)
        with self._acting(engine):
            _raise_where(
                gather_plain([name for name in first if first[name] != second[name]]),
                "computed different bits of {} when it replayed the step",
                "if these are all ranks and every replayed step fails, the model is probably not "
                "deterministic, and replay_every cannot be used with it. Otherwise test the processors "
                "and the memory of this rank's host or GPU, and resume from a checkpoint on another one",
            )
        return losses

    @contextmanager
    def _acting(self, engine: EngineCore) -> Iterator[None]:
        """Raise a LauncherError raised inside, or only log it, depending on `action`."""
        try:
            yield
        except LauncherError as error:
            if self._section.action == "stop":
                raise
            logger.warning("before step %d: %s", engine.global_steps + 1, error)


def _raise_where(found: Sequence[Sequence[str]], what: str, fix: str) -> None:
    """Raise LauncherError if any rank has found a mismatch.

    Args:
        found: for each rank, the names that differ.
        what: a format string for the names; the rank is prepended.
    """
    told = [f"rank {rank} {what.format(first_names(names))}" for rank, names in enumerate(found) if names]
    if told:
        raise LauncherError("; ".join(told), where="replica_check", fix=fix)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Use deterministic algorithms in torch where they exist."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
