"""`Saver`: implements the config's `checkpoint` section: where and how to save, which checkpoints to keep."""

from __future__ import annotations

import copy
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from launcher.checkpoint import retention, store
from launcher.checkpoint.ranks import CollectiveErrors, node_groups
from launcher.checkpoint.snapshot import Snapshot
from launcher.checkpoint.store import TensorMap
from launcher.comm.record import recorder
from launcher.config import CheckpointConfig
from launcher.errors import shortened

if TYPE_CHECKING:
    from launcher.checkpoint.peer_memory import PeerMemory


class Saver:
    """Saves and loads checkpoints for one engine.

    Every method except `let_change` and `raise_failure` is collective.

    Args:
        config: the `checkpoint` section.
        rank: 0 prints statistics.

    Attributes:
        in_background: a thread writes a copy of the state (`writer.decoupled`).
        steps_alone_change: only optimizer steps change the weights and the optimizer state, and they call
            `let_change` first. Neither has to be copied before `save` returns.
        memory: where `keep` stores the state that a restart resumes from; None: it is not stored.
        stalled_s: seconds that saves have blocked training.
    """

    memory: PeerMemory | None = None

    def __init__(self, config: CheckpointConfig, rank: int = 0) -> None:
        self.config, self.rank = config, rank
        self.in_background, self.steps_alone_change = config.writer.decoupled, False
        self.stalled_s = 0.0
        self._apart: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._snapshot = Snapshot()
        self._copied = threading.Event()
        self._copied.set()
        self.pending: list[Future[None]] = []  # at most one
        weakref.finalize(self, _say_unread, self.pending)

    @property
    def node_local(self) -> bool:
        """Return whether each node stores only the data of its own ranks."""
        return self.config.use_node_local_storage

    def save(
        self, directory: Path, tag: str, tensors: TensorMap, meta: Mapping[str, Any], latest: bool
    ) -> None:
        """Call `store.save` as configured: synchronously, or in the background with a copy of the state."""
        self._now_or_beside(tensors, meta, lambda t, m: self._save(directory, tag, t, m, latest))

    def keep(
        self, step: int, tensors: TensorMap, meta: Mapping[str, Any], then: Callable[[], None] = lambda: None
    ) -> None:
        """Call `PeerMemory.keep` and then `then`: synchronously or in the background, like `save`."""
        memory = self.memory
        assert memory is not None

        def write(tensors: TensorMap, meta: Mapping[str, Any]) -> None:
            memory.keep(step, tensors, meta)
            then()

        self._now_or_beside(tensors, meta, write)

    def _now_or_beside(
        self,
        tensors: TensorMap,
        meta: Mapping[str, Any],
        write: Callable[[TensorMap, Mapping[str, Any]], object],
    ) -> None:
        with self._stalling():
            self.wait()
            if not self.in_background:
                write(tensors, meta)
                return
            finish = self._snapshot.begin(tensors, later=self.steps_alone_change)
            frozen = copy.deepcopy(dict(meta))
            self._groups_of_ranks()  # created now: a collective of the main thread
            self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
            self._copied.clear()

            def work() -> None:
                try:
                    copies = finish()
                finally:
                    self._copied.set()
                write(copies, frozen)

            self.pending.append(self._thread.submit(work))

    def let_change(self) -> None:
        """Wait until a background save has copied the tensors that the optimizer step is about to change."""
        if not self._copied.is_set():
            with self._stalling():
                self._copied.wait()

    def load(self, directory: Path, tag: str, tensors: TensorMap, strict: bool) -> None:
        """Load the checkpoint that `find` returned, after waiting for a pending save."""
        self.wait()
        if self.memory is not None and directory == self.memory.directory:
            self.memory.load(tag, tensors, strict)
            return
        group, node = self._groups_of_ranks()
        store.load(directory, tag, tensors, group, strict, node=node, compared=True)

    def find(self, directory: Path, tag: str | None, missing_ok: bool) -> tuple[str, dict[str, Any]] | None:
        """Call `store.find` (or return what memory holds), after waiting for a pending save."""
        self.wait()
        if self.memory is not None and directory == self.memory.directory:
            return self.memory.found
        group, node = self._groups_of_ranks()
        return store.find(directory, tag, missing_ok=missing_ok, group=group, node=node)

    def wait(self) -> None:
        """Wait for the background save to finish; raise its CheckpointError, if any, on all ranks."""
        while self.pending:
            self.pending.pop().result()

    def raise_failure(self) -> None:
        """Raise the error of a failed background save; do not wait for one that is still running."""
        if self.pending and self.pending[0].done():
            self.wait()

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stalled_s += time.perf_counter() - began

    def _save(
        self, directory: Path, tag: str, tensors: TensorMap, meta: Mapping[str, Any], latest: bool
    ) -> None:
        group, node = self._groups_of_ranks()
        began = time.perf_counter()
        written = store.save(
            directory, tag, tensors, meta, group, latest, node=node, on_other_tags=self.config.tag_validation
        )
        if recorder is not None:
            recorder.saved(int(meta.get("global_steps", -1)))
        if self.config.keep_last is not None:
            keep = self.config.keep_last, self.config.keep_every
            CollectiveErrors(group, node).on_first(lambda: retention.delete_old(directory, *keep))
        if self.config.writer.show_statistics and self.rank == 0:
            seconds = time.perf_counter() - began
            megabytes = written / 1e6
            print(
                f"checkpoint {tag}: {megabytes:.1f} MB in {seconds:.2f} s, {megabytes / seconds:.0f} MB/s",
                flush=True,
            )

    def _groups_of_ranks(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Return (group of all ranks, group of this node's ranks if each node has its own directory).

        A background thread needs process groups of its own; other saves and loads use the default group.
        """
        if not (self.node_local or self.in_background):
            return None, None
        if self._apart is None:
            group, node = node_groups()
            self._apart = group, node if self.node_local else None
        return self._apart


def _say_unread(pending: list[Future[None]]) -> None:
    """Print, at the end of the run, the error of a background save that was never waited for."""
    for future in pending:
        if future.done() and (error := future.exception()) is not None:
            # torch's message about a lost peer starts with a path of its own sources and ends with more lines
            why = re.sub(r"^\[/\S+\] ", "", str(error).partition("\n")[0]).partition(". This may indicate")[0]
            print(f"The last checkpoint was not saved: {shortened(why, 200)}", file=sys.stderr, flush=True)
