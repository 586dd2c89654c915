"""Coordinates the ranks that save or load together, so that they fail together or not at all."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from typing import Literal, TypeAlias, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from launcher.comm.plain import gather_plain
from launcher.errors import CheckpointError, TagsDiffer

Disagreement: TypeAlias = Literal["Ignore", "Warn", "Fail"]
T = TypeVar("T")


class CollectiveErrors:
    """The ranks of a group, which fail together or not at all.

    Args:
        group: None: all ranks, or this process alone without torch.distributed.
        node: the ranks of this node, if each node has its own directory; None: all ranks share one directory.
        alone: use this process alone, even if there are process groups.

    Attributes:
        rank: of this process in the group.
        first: this rank creates the directory, and writes the files that do not belong to a rank.
        sharing: the ranks that share this rank's directory.
        share: (this rank's index among `sharing`, their number).
    """

    def __init__(
        self, group: dist.ProcessGroup | None, node: dist.ProcessGroup | None = None, *, alone: bool = False
    ) -> None:
        self.group, self.node = group, node
        self.alone = alone or not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.sharing = group if node is None else node
        self.share = (
            (0, 1) if self.alone else (dist.get_rank(self.sharing), dist.get_world_size(self.sharing))
        )
        self.first = self.share[0] == 0

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it fails on one, raise on all."""
        failure: str | None = None
        cause: BaseException | None = None
        try:
            result = work()
        except (Exception, CheckpointException) as error:
            if self.alone and _was_interrupted(error):
                raise KeyboardInterrupt from error
            cause, failure = error, _describe(error, None if self.alone else self.rank)
        failures = self._gather(failure)
        if not any(failures):
            return result
        if isinstance(cause, CheckpointError):
            raise cause
        raise CheckpointError(next(text for text in failures if text)) from cause

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Run `work` on the first rank of each directory while the others wait; if it fails, raise on all."""
        return self.together(lambda: work() if self.first else None)

    def agreed(self, what: str, value: str, otherwise: Disagreement = "Fail") -> str:
        """Return rank 0's value.

        Raises:
            TagsDiffer: another rank has another value, and `otherwise` is "Fail".
        """
        values = self._gather(value)
        if len(set(values)) > 1 and otherwise != "Ignore":
            said = f"The ranks disagree about the {what}: {sorted(set(map(str, values)))}."
            if otherwise == "Fail":
                raise TagsDiffer(said, fix="pass the same value on every rank")
            if self.rank == 0:
                warnings.warn(f"{said} All ranks use rank 0's: {values[0]}.", stacklevel=4)
        return str(values[0])

    def of_sharing(self, value: T) -> list[T]:
        """Gather a plain value from the ranks that share this rank's directory."""
        return [value] if self.alone else gather_plain(value, self.sharing)

    def _gather(self, value: str | None) -> list[str | None]:
        return [value] if self.alone else gather_plain(value, self.group)


def node_groups() -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return (group of all ranks, group of this node's ranks), both separate from training's groups.

    Ranks with the same GROUP_RANK (torchrun's node rank) share a node; if it is not set, ranks with the same
    host name do. Collective over all ranks. Without a process group: (None, None).
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None, None
    members = members_of_nodes()
    everyone = dist.new_group(backend="gloo")
    groups = [dist.new_group(ranks, backend="gloo") for ranks in members]
    return everyone, next(g for g, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks)


def members_of_nodes(group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return the ranks of each node, ordered by their first ranks. Collective."""
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(gather_plain(os.environ.get("GROUP_RANK") or socket.gethostname(), group)):
        members.setdefault(name, []).append(rank)
    return list(members.values())


def _was_interrupted(error: BaseException) -> bool:
    """Return whether an error is Ctrl-C, which torch.distributed.checkpoint wraps."""
    inner = error.failures.values() if isinstance(error, CheckpointException) else ()
    return any(isinstance(failure[0], KeyboardInterrupt) for failure in inner)


def root_cause(error: BaseException) -> BaseException:
    """Return the OSError that caused an error, if there is one: torch.save reports only its consequence."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _describe(error: BaseException, rank: int | None) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        failed, (inner, _) = next(iter(error.failures.items()))
        return _describe(inner, None if rank is None else failed)
    if isinstance(error, CheckpointError):
        return str(error)
    on = "" if rank is None else f" on rank {rank}"
    if isinstance(error, OSError):
        return f"The checkpoint could not be written or read{on}: {error}"
    return f"The checkpoint failed{on}: {type(error).__name__}: {error}"
