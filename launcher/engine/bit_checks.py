"""Checks, bit for bit, that find what memory and processors get wrong without a word (`replica_check`).

Three of them, for three kinds of values. What several ranks hold alike is compared between them. What one rank holds
alone between two steps has a checksum. And what is computed is computed twice. A step in which one of them finds
something is not made.
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
    """The checks of an engine.

    Args:
        section: `replica_check`.
    """

    def __init__(self, section: ReplicaCheckConfig) -> None:
        self._section = section
        self._resting: RestingValues | None = None
        self._replayed = False  # this step
        self._said = False  # that some are not

    def before_step(self, engine: EngineCore) -> None:
        """Look at what the step is about to change. Collective.

        Raises:
            LauncherError: on every rank that was compared: something is wrong, and the JSON does not say "warn".
        """
        every, optimizer = self._section.every, engine.optimizer
        if self._replays_in(engine) and not self._replayed:
            if not self._said:
                logger.warning(
                    "step %d is not replayed (replica_check.replay_every): this script calls forward and backward by "
                    "itself; only the steps of engine.train_batch() are",
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
                    "has other bits in {} than after the step before, and no program has written to it",
                    "test the memory of this rank's host or GPU, and go on from a checkpoint before this step on "
                    "another one. A program that writes through tensor.data is not seen: let it write to the tensor",
                )

    def after_step(self, engine: EngineCore) -> None:
        """Note the bits of what this rank alone holds until the next step."""
        if engine.optimizer is None or engine.versions is not None:
            return
        if self._resting is None:
            from launcher.zero.features.resting import RestingValues

            self._resting = RestingValues()
        self._resting.note(engine.zero.flats, engine.optimizer.states_in_memory)

    def forget(self) -> None:
        """Forget the bits of what rests: it was loaded."""
        if self._resting is not None:
            self._resting.forget()

    def microbatches(
        self, engine: EngineCore, batches: LazySequence[Any], run: Callable[[Sequence[Any]], Losses]
    ) -> Losses:
        """Return what `run` returns, which computes the microbatches of a step; every so many steps it does so twice.

        Raises:
            LauncherError: on every rank: the bits of a gradient or of a loss were others the second time.
        """
        if not self._replays_in(engine) or engine._backwards:
            return run(batches)
        self._replayed = True
        return self._twice(engine, batches, run)

    def _replays_in(self, engine: EngineCore) -> bool:
        """Return whether the microbatches of the present step are to be computed twice."""
        every = self._section.replay_every
        return bool(every) and (engine.global_steps + 1) % every == 0

    def _twice(
        self, engine: EngineCore, batches: LazySequence[Any], run: Callable[[Sequence[Any]], Losses]
    ) -> Losses:
        from launcher.engine.random_state import random_states, restore_random_states
        from launcher.zero.features.watched_gradients import WatchedGradients

        begin, after_reading = random_states("", engine.device), []

        def read(index: int) -> Any:
            """Data may draw random numbers, too, and are read once: the model draws what comes after."""
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
                    owners[name] = buffer.copy_(before)  # a module may have put another tensor in its place
            for forget in engine.zero.callbacks.before_replay:
                forget()
            second, losses = watched.bits(lambda: run(LazySequence(length, read_again)), flush)
        with self._acting(engine):
            _raise_where(
                gather_plain([name for name in first if first[name] != second[name]]),
                "computed other bits of {} when it computed the step again",
                "if these are all ranks, the model is probably not deterministic, and replay_every cannot be used with "
                "it: see whether it says the same at every such step. Else test the processors and the memory of this "
                "rank's host or GPU, and go on from a checkpoint on another one",
            )
        return losses

    @contextmanager
    def _acting(self, engine: EngineCore) -> Iterator[None]:
        """Raise what is found inside, or only say it, as the JSON says."""
        try:
            yield
        except LauncherError as error:
            if self._section.action == "stop":
                raise
            logger.warning("before step %d: %s", engine.global_steps + 1, error)


def _raise_where(found: Sequence[Sequence[str]], what: str, fix: str) -> None:
    """Raise LauncherError where a rank has found something.

    Args:
        found: of each rank, names.
        what: with a place for the names; the rank stands before it.
    """
    told = [f"rank {rank} {what.format(first_names(names))}" for rank, names in enumerate(found) if names]
    if told:
        raise LauncherError("; ".join(told), where="replica_check", fix=fix)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let torch take operations that give the same bits twice, where there are such."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
