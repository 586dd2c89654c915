"""Training of a recipe as one of several replicas (`fault_tolerance`): averages gradients, joins a group.

[Note: a step of several replicas]

After the ranks of a replica have reduced their gradients, each rank averages its gradients with the
corresponding rank of every other replica, before the norm is computed. The local gradients stay unchanged
until all members have confirmed that they have the mean. If a member is lost during the exchange, the
remaining ones form a new group and exchange again; forward and backward are not repeated. All ranks of a
replica must take the same branch, so after each exchange they agree whether it succeeded on all of them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.checkpoint.names import META_FILE, METADATA_FILE
from launcher.checkpoint.peer_memory import PREFIX, PeerMemory
from launcher.cluster.replica_group import Epoch, ReplicaGroup, ReplicaLost, StateChannel
from launcher.engine import Engine
from launcher.engine.state import keep_state
from launcher.errors import LauncherError
from launcher.sizes import in_words

logger = logging.getLogger("launcher")


@dataclass
class Told:
    """Values that the members of an epoch have exchanged in a step."""

    loss: float
    """The mean over all tokens."""
    stops: bool
    """Whether a member was asked to stop."""
    waiting: bool
    """Whether a replica is waiting to join."""
    used: list[bool]
    """For each trainable parameter, whether any member had a gradient for it."""
    members: int = 1
    """Number of members."""


class ReplicaRun:
    """The replica that this rank belongs to. Every rank of the replica must call every method.

    Args:
        engine: the engine that trains the replica.

    Attributes:
        told: the values exchanged in the last step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.group = ReplicaGroup(dist.get_rank(), engine.resolved.fault_tolerance.timeout_s)
        self.told = Told(0.0, False, False, [])
        memory = PeerMemory.of_run(copies=False)
        if memory is None:
            raise LauncherError("replicas copy their state through /dev/shm, which is not available")
        self.memory = engine.saver.memory = memory
        self._mine = torch.zeros(5, dtype=torch.float64)
        engine.zero.callbacks.before_norm.append(self._average)

    # ---- joining ----------------------------------------------------------------------------

    def join(
        self,
        resume: Callable[[], None],
        take: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        """Join the group, with the state of another member, or, if all replicas are starting, from the
        checkpoint.

        Args:
            resume: loads the checkpoint that the run resumes from.
            take: called with the client state that the donor's `admit` received.

        Raises:
            RunIsOver: the other replicas have completed all steps.
        """
        while True:
            epoch = self._ask(-1, "fresh")
            if epoch.donor is None:
                resume()
                return
            try:
                tag = self._receive(epoch.donor)
            except ReplicaLost:
                tag = None
            if not self._agreed(tag is not None):
                continue  # the donor has died; other replicas may have the state
            assert tag is not None
            self.memory.find(-1)
            take(self.engine.load_checkpoint(self.memory.directory, tag)[1])
            self.memory.clear()
            say(
                f"joined the other replicas at step {self.engine.global_steps} with the state of "
                f"replica {epoch.donor}"
            )
            return

    def admit(self, client_state: Callable[[], dict[str, Any]]) -> None:
        """Admit waiting replicas between two steps, and send them the state in the background."""
        epoch = self.group.epoch
        if epoch is None or self.told.waiting:
            self.told.waiting = False
            epoch = self._ask(self.engine.global_steps, "boundary")
        if epoch.serves:
            channels = [self.group.channel(replica) for replica in epoch.serves]
            self.group.has_served()
            place = self.memory.directory / f"{PREFIX}{self.engine.global_steps}"
            keep_state(self.engine, client_state(), lambda: _send(place, channels))

    # ---- a step -----------------------------------------------------------------------------

    def begin_step(self, loss: float, tokens: int, *, stops: bool) -> None:
        """Record the values to send to the other replicas. Call it before engine.step().

        Args:
            loss: the loss of this replica.
            tokens: number of tokens in this rank's loss; determines the weight of the replica.
            stops: this rank was asked to stop.
        """
        step = self.engine.global_steps
        self._mine = torch.tensor([loss, step, tokens, stops, self.group.waiting], dtype=torch.float64)

    def _average(self) -> None:
        """Average the gradients over the replicas; see [Note: a step of several replicas]."""
        counts = self._mine[2:].clone()
        dist.all_reduce(counts)
        mine = torch.cat([self._mine[:2], counts])
        while True:
            if self.group.epoch is None:  # the group was lost after the last step
                self._ask(self.engine.global_steps, "failed")
            sums = self._exchange(mine)
            complete = self._agreed(sums is not None)
            if complete and self._agreed(self._all_have_it()):
                break
            if self._ask(self.engine.global_steps, "failed", has_result=complete).makes_step:
                self.told.waiting = False  # referred to the previous epoch
                break
        assert sums is not None
        self._put(sums)

    def _exchange(self, mine: Tensor) -> list[Tensor] | None:
        """Return the mean of each gradient over the members, or None if a member was lost."""
        zero = self.engine.zero
        used = torch.tensor([float(slot.used) for slot in zero.trainable_slots], dtype=torch.float64)
        try:
            every = torch.stack(self.group.swap(torch.cat([mine, used])))  # [members, 5 + slots]
            losses, steps, tokens = every[:, 0], every[:, 1], every[:, 2]
            if len(set(steps.tolist())) > 1:
                raise LauncherError(f"replicas are at different steps: {[int(step) for step in steps]}")
            total = float(tokens.sum())
            weights = tokens / total if total else torch.full_like(tokens, 1 / len(tokens))
            weight = float(mine[2]) / total if total else 1 / len(tokens)
            flags = every[:, 3:].sum(0).bool().tolist()
            self.told = Told(float((losses * weights).sum()), flags[0], flags[1], flags[2:], len(tokens))
            return self.group.weighted_sums([gradient.owned for gradient in zero.gradients], weight)
        except ReplicaLost as error:
            logger.debug("before step %d: %s", self.engine.global_steps + 1, error)
            return None

    def _all_have_it(self) -> bool:
        try:
            self.group.swap(torch.ones(1))
        except ReplicaLost:
            return False
        return True

    def _put(self, sums: list[Tensor]) -> None:
        zero = self.engine.zero
        for gradient, mean in zip(zero.gradients, sums, strict=True):
            owned = gradient.owned
            owned.copy_(mean.view_as(owned))
            gradient.rest(final=True)
        for slot, used in zip(zero.trainable_slots, self.told.used, strict=True):
            slot.used = used

    def _ask(self, step: int, kind: str, *, has_result: bool = False) -> Epoch:
        """Request a new epoch until all ranks of the replica are connected to those of the other members."""
        while True:
            epoch = self.group.ask(step, kind, has_result=has_result)
            if self._agreed(self.group.epoch is not None):
                return epoch

    @staticmethod
    def _agreed(fine: bool) -> bool:
        """Return whether `fine` is true on all ranks of the replica."""
        flag = torch.tensor(float(fine))
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    # ---- state of another replica -----------------------------------------------------------

    def _receive(self, donor: int) -> str:
        """Receive the files of the corresponding rank of the donor; return their tag."""
        self.memory.clear()
        channel = self.group.channel(donor)
        content = json.loads(channel.receive_text())
        if content["tag"] is None:
            raise NoRoom(f"replica {donor} has no room in /dev/shm for a copy of its state")
        place = self.memory.directory / content["tag"]
        place.mkdir(mode=0o700, exist_ok=True)
        for name, size in content["files"]:
            arriving = place / f"{name}.{os.getpid()}"
            _reserve(arriving, size)
            if size:
                channel.receive(torch.from_file(str(arriving), shared=True, size=size, dtype=torch.uint8))
            arriving.rename(place / name)
        return str(content["tag"])


class NoRoom(RuntimeError):
    """The state of another replica cannot be copied now. This replica is restarted and tries again."""


def _reserve(path: Path, size: int) -> None:
    """Allocate a file of `size` bytes: writing to an unreserved mapping when memory is full is fatal."""
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(1, size))
            file.truncate(size)
        except OSError as error:
            raise NoRoom(
                f"/dev/shm has no room for {in_words(size)} of another replica's state: {error}"
            ) from None


def _send(place: Path, channels: list[StateChannel]) -> None:
    """Send the files that this rank has written, with their metadata. Runs in the thread of the saver."""
    names = [f"__{dist.get_rank()}_0.distcp", METADATA_FILE, META_FILE]
    there = place.is_dir()  # otherwise /dev/shm was full
    files = (
        [(name, (place / name).stat().st_size) for name in names if (place / name).exists()] if there else []
    )
    for channel in channels:  # a replica that dies meanwhile requests the state again
        try:
            channel.send_text(json.dumps({"tag": place.name if there else None, "files": files}))
            for name, size in files:
                if size:
                    channel.send(
                        torch.from_file(str(place / name), shared=True, size=size, dtype=torch.uint8)
                    )
        except ReplicaLost as error:
            logger.debug("the state was not sent: %s", error)
    # Keep the other files: they are small, and ranks of this node still send them.
    (place / names[0]).unlink(missing_ok=True)
