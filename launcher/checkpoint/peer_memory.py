"""Keeps copies of a run's state in the host memory of this node and the next one (`checkpoint.peer_memory`).

Each rank writes its part to a file under /dev/shm, in the format of checkpoints on disk, and sends it to a
rank of the next node. The state survives the loss of one node, and any number of ranks can resume from it
(Wang et al., Gemini, SOSP 2023). The agents of a run own the memory: it outlives the ranks, but not the run.

    $LAUNCHER_MEMORY/global_step<N>/    on each node: its ranks' files, and copies of the previous node's
    $LAUNCHER_MEMORY/.tmp-global_step<N>/    until all nodes have all files
"""

from __future__ import annotations

import logging
import os
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import Metadata

from launcher.checkpoint import store, tags
from launcher.checkpoint.checksums import FileChecksum, check_blocks, check_sizes
from launcher.checkpoint.meta_file import read_meta, write_meta
from launcher.checkpoint.names import META_FILE, METADATA_FILE
from launcher.checkpoint.ranks import CollectiveErrors, members_of_nodes, node_groups
from launcher.checkpoint.reader import TensorLoadPlanner, read_metadata
from launcher.checkpoint.save_checks import written_bytes
from launcher.checkpoint.writer import write_files
from launcher.cluster.node_spec import MEMORY_VARIABLE
from launcher.comm.plain import broadcast_from_first, gather_plain
from launcher.errors import CheckpointError
from launcher.sizes import in_words

PREFIX = "global_step"
PIECE = 64 << 20
"""Bytes per message."""
logger = logging.getLogger("launcher")


@dataclass(frozen=True)
class Move:
    """The transfer of a file from one rank to another."""

    name: str
    size: int
    source: int
    target: int


class PeerMemory:
    """Checkpoints in the memory of this rank's node. Every method is collective.

    Args:
        directory: this node's directory.
        group: group of all ranks; None: the default group.
        node: group of the ranks of this node.
        copies: send copies to the next node.

    Attributes:
        found: the last result of `find`.
        keeps_copies: copies are sent, because there is another node.
    """

    def __init__(
        self,
        directory: Path,
        group: dist.ProcessGroup | None = None,
        node: dist.ProcessGroup | None = None,
        *,
        copies: bool = True,
    ) -> None:
        self.directory = directory
        self._ranks = CollectiveErrors(group, node)
        self._nodes = members_of_nodes(group)
        self.keeps_copies = copies and len(self._nodes) > 1
        self._key = "checkpoint.peer_memory" if copies else "fault_tolerance"
        self.found: tuple[str, dict[str, Any]] | None = None
        self._held: list[dict[str, int]] = []
        """For each node, {file: size} of the checkpoint that `find` returned."""

    @classmethod
    def of_run(cls, *, copies: bool = True) -> PeerMemory | None:
        """Return the memory owned by this run's agents; None if `launch` did not start it. Collective."""
        place = os.environ.get(MEMORY_VARIABLE)
        if place is None or not dist.is_initialized():
            return None
        return cls(Path(place), *node_groups(), copies=copies)

    # ---- saving -----------------------------------------------------------------------------

    def keep(self, step: int, tensors: store.TensorMap, meta: Mapping[str, Any]) -> bool:
        """Store the state of a step and delete earlier steps; return False if there is not enough memory.

        Raises:
            CheckpointError: on every rank, if one fails.
        """
        ranks, name = self._ranks, f"{PREFIX}{step}"
        place = self.directory / f"{tags.TMP}{name}"
        ranks.on_first(lambda: self._make(place))
        if not self._has_room(tensors):
            return False
        _, stamps = ranks.together(lambda: write_files(place, tensors, ranks.group, ranks.rank))
        every = [
            {file: FileChecksum.read(stamp) for file, stamp in stamps_of_one.items()}
            for stamps_of_one in gather_plain({f: s.write() for f, s in stamps.items()}, ranks.group)
        ]
        ranks.together(lambda: self._share_metadata(place, every, meta, name))
        transfer(place, list(self._copies(every)), ranks)
        ranks.on_first(lambda: self._finish(place, name))
        ranks.on_first(lambda: self._forget_all_but(name))
        return True

    def _make(self, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700, parents=True)

    def _has_room(self, tensors: store.TensorMap) -> bool:
        """Return whether every node has memory for its ranks' files and for copies of another node's."""
        mine = written_bytes(tensors)
        needed = sum(self._ranks.of_sharing(mine)) * (2 if self.keeps_copies else 1)
        free = shutil.disk_usage(self.directory).free
        lacking = [said for said in gather_plain([needed, free], self._ranks.group) if said[0] > said[1]]
        if lacking and self._ranks.rank == 0:
            logger.warning(
                "%s: no in-memory checkpoint: it needs %s per node, but only %s of /dev/shm is free",
                self._key, in_words(lacking[0][0]), in_words(lacking[0][1]),
            )  # fmt: skip
        return not lacking

    def _share_metadata(
        self, place: Path, every: list[dict[str, FileChecksum]], meta: Mapping[str, Any], name: str
    ) -> None:
        """Write the files' metadata on every node: `.metadata`, which rank 0 has written, and meta.json."""
        ranks = self._ranks
        text = b64encode((place / METADATA_FILE).read_bytes()).decode() if ranks.rank == 0 else None
        text, meta = broadcast_from_first((text, dict(meta)), ranks.group)
        if ranks.first:
            (place / METADATA_FILE).write_bytes(b64decode(text))
            stamps = {file: stamp for of_one in every for file, stamp in of_one.items()}
            write_meta(place, stamps, dict(meta), {"tag": name})

    def _copies(self, every: Sequence[Mapping[str, FileChecksum]]) -> Iterator[Move]:
        """Yield the transfers to the next node: from each rank to one of the ranks there."""
        for number, members in enumerate(self._nodes):
            following = self._nodes[(number + 1) % len(self._nodes)]
            for place, source in enumerate(members if self.keeps_copies else ()):
                target = following[place % len(following)]
                for file, stamp in every[source].items():
                    if file != METADATA_FILE:
                        yield Move(file, stamp.size, source, target)

    def clear(self) -> None:
        """Delete all steps."""
        self._ranks.on_first(lambda: self._forget_all_but(""))

    def _finish(self, place: Path, name: str) -> None:
        shutil.rmtree(self.directory / name, ignore_errors=True)
        place.rename(self.directory / name)

    def _forget_all_but(self, name: str) -> None:
        for path in self.directory.iterdir():
            if path.name != name and path.name.removeprefix(tags.TMP).startswith(PREFIX):
                shutil.rmtree(path)

    # ---- resuming ---------------------------------------------------------------------------

    def find(self, after: int) -> tuple[str, dict[str, Any]] | None:
        """Return (tag, meta) of the newest step whose files are all intact on some node; None if none is.

        Args:
            after: the newest step on disk; only later steps are considered. Rank 0's value is used.
        """
        said = gather_plain((after, self._inventory()), self._ranks.group)
        after = said[0][0]
        found = [self._merged(said[rank][1] for rank in members) for members in self._nodes]
        steps = {step for held in found for step in held if int(step.removeprefix(PREFIX)) > after}
        for step in sorted(steps, key=lambda step: int(step.removeprefix(PREFIX)), reverse=True):
            if (meta := self._meta_if_complete(step, [held.get(step, {}) for held in found])) is not None:
                self.found = step, meta
                return self.found
        return None

    def _meta_if_complete(self, step: str, held: list[dict[str, int]]) -> dict[str, Any] | None:
        """Send a step's metadata to all nodes and return its meta; None if some file is on no node."""
        self._held = held
        if not any(META_FILE in files for files in held):
            return None
        self._bring(step, [[META_FILE] for _ in self._nodes])
        content = self._ranks.together(lambda: read_meta(self.directory / step))
        lost = [name for name in content.files if not any(name in files for files in held)]
        if not lost:
            self._bring(step, [[METADATA_FILE] for _ in self._nodes])
            return content.meta
        if self._ranks.rank == 0:
            what = f"{len(lost)} of its {len(content.files)} files are missing on all nodes or damaged"
            logger.warning("%s: in-memory checkpoint %s cannot be used: %s", self._key, step, what)
        return None

    def load(self, tag: str, tensors: store.TensorMap, strict: bool) -> None:
        """Load the checkpoint that `find` returned; files that this node lacks come from other nodes."""
        wanted = self._ranks.together(lambda: self._files_for(tag, tensors, strict))
        every = gather_plain(wanted, self._ranks.group)
        self._bring(
            tag, [sorted({name for rank in members for name in every[rank]}) for members in self._nodes]
        )
        ranks = self._ranks
        store.load(self.directory, tag, tensors, ranks.group, strict, node=ranks.node, compared=True)

    def _inventory(self) -> dict[str, dict[str, int]]:
        """Return {step: {file: size}} of this node's intact files; each of its ranks checks a part."""
        share, shares = self._ranks.share
        found: dict[str, dict[str, int]] = {}
        for place in sorted(self.directory.glob(f"{PREFIX}*")):
            try:
                stamps = read_meta(place).files
            except CheckpointError as error:
                logger.warning(
                    "%s: in-memory checkpoint %s cannot be used: %s", self._key, place.name, error.what
                )
                continue
            files = {META_FILE: (place / META_FILE).stat().st_size}
            for name in sorted(stamps)[share::shares]:
                if _is_whole(place, name, stamps[name]):
                    files[name] = stamps[name].size
            found[place.name] = files
        return found

    @staticmethod
    def _merged(parts: Any) -> dict[str, dict[str, int]]:
        merged: dict[str, dict[str, int]] = {}
        for part in parts:
            for step, files in part.items():
                merged.setdefault(step, {}).update(files)
        return merged

    def _files_for(self, tag: str, tensors: store.TensorMap, strict: bool) -> list[str]:
        """Return the names of the files that this rank needs to read."""
        metadata: Metadata = read_metadata(self.directory / tag)
        planner = TensorLoadPlanner(flatten_state_dict=False, allow_partial_load=not strict)
        planner.set_up_planner(dict(tensors), metadata, is_coordinator=False)
        items = planner.create_local_plan().items
        return sorted({metadata.storage_data[item.storage_index].relative_path for item in items})

    def _bring(self, tag: str, wanted: Sequence[Sequence[str]]) -> None:
        """Send each node the files that it needs and does not have.

        Args:
            wanted: names of the files that each node needs.
        """
        place, ranks, moves = self.directory / tag, self._ranks, []
        for number, names in enumerate(wanted):
            for name in names:
                if name not in self._held[number]:
                    holder = next(other for other, held in enumerate(self._held) if name in held)
                    size = self._held[holder][name]
                    moves.append(Move(name, size, self._nodes[holder][0], self._nodes[number][0]))
        ranks.on_first(lambda: place.mkdir(mode=0o700, exist_ok=True))
        transfer(place, moves, ranks)
        for move in moves:
            number = next(n for n, members in enumerate(self._nodes) if move.target in members)
            self._held[number][move.name] = move.size
        ranks.together(lambda: self._compare(place, [m.name for m in moves if m.target == ranks.rank]))

    def _compare(self, place: Path, names: Sequence[str]) -> None:
        if names:
            stamps = read_meta(place).files
            check_blocks(place, {name: stamps[name] for name in names if name != META_FILE})


def transfer(place: Path, moves: Sequence[Move], ranks: CollectiveErrors) -> None:
    """Send files between ranks; each node has its own `place`. Collective: all ranks pass the same moves."""
    pieces: list[Callable[[], dist.Work | None]] = []
    for move in moves:
        if ranks.rank not in (move.source, move.target) or move.source == move.target:
            continue
        if not move.size:
            if ranks.rank == move.target:
                (place / move.name).touch()
            continue
        content = torch.from_file(str(place / move.name), shared=True, size=move.size, dtype=torch.uint8)
        pieces += [_message(part, move, ranks) for part in content.split(PIECE)]
    for work in [start() for start in pieces]:
        if work is not None:
            work.wait()
    ranks.together(lambda: None)


def _message(part: torch.Tensor, move: Move, ranks: CollectiveErrors) -> Callable[[], dist.Work | None]:
    if ranks.rank == move.source:
        return lambda: dist.isend(part, group=ranks.group, group_dst=move.target)
    return lambda: dist.irecv(part, group=ranks.group, group_src=move.source)


def _is_whole(place: Path, name: str, stamp: FileChecksum) -> bool:
    try:
        check_sizes(place, {name: stamp})
        check_blocks(place, {name: stamp})
    except (CheckpointError, OSError):
        return False
    return True
