"""Checksums of a checkpoint's files: computed while they are written, verified before any content is used.

Files are hashed in blocks (XXH3, 64 bits), so that ranks can split a large file and errors name the position.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from launcher.checkpoint.durable import DurableFile
from launcher.errors import CheckpointError

BLOCK = 1 << 26
_PIECE = 1 << 20  # read at a time; small enough to be hashed while it is still in the cache


@dataclass(frozen=True)
class FileChecksum:
    """The size and checksums that a file must have.

    Attributes:
        blocks: the digest of each block of `BLOCK` bytes; None in checkpoints of the first format.
    """

    size: int
    blocks: tuple[str, ...] | None = None

    @classmethod
    def read(cls, content: Any) -> FileChecksum:
        """Parse the result of `write`."""
        if isinstance(content, int):
            return cls(content)
        size, blocks = content["bytes"], content["xxh3"]
        if not (isinstance(size, int) and isinstance(blocks, list) and len(blocks) == -(-size // BLOCK)):
            raise ValueError(f"{content} is not a valid entry of file checksums")
        return cls(size, tuple(blocks))

    def write(self) -> dict[str, Any]:
        """Return the checksums as JSON values."""
        return {"bytes": self.size, "xxh3": list(self.blocks or ())}


class _Hasher:
    """Hashes a stream block by block."""

    def __init__(self) -> None:
        self.size = 0
        self._blocks: list[str] = []
        self._open = xxhash.xxh3_64()

    def update(self, content: memoryview) -> None:
        while content:
            room = BLOCK - self.size % BLOCK
            part, content = content[:room], content[room:]
            self._open.update(part)
            self.size += len(part)
            if len(part) == room:
                self._blocks.append(self._open.hexdigest())
                self._open.reset()

    def stamp(self) -> FileChecksum:
        rest = [self._open.hexdigest()] if self.size % BLOCK else []
        return FileChecksum(self.size, (*self._blocks, *rest))


class HashedFile(DurableFile):
    """A durable file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.hasher = _Hasher()

    def write(self, content: Any) -> int:
        with memoryview(content) as view, view.cast("B") as flat:
            self.hasher.update(flat)
        return super().write(content)


class HashingFileSystem(FileSystem):
    """torch's file system; `stamps` maps the name of each file written through it to its checksums."""

    def __init__(self) -> None:
        super().__init__()
        self.stamps: dict[str, FileChecksum] = {}

    @contextmanager
    def written(self, path: Path) -> Generator[HashedFile, None, None]:
        """Open a file for writing; record its checksums when it is closed."""
        with HashedFile(path) as file:
            yield file
        self.stamps[path.name] = file.hasher.stamp()

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
        return self.written(Path(path)) if mode == "wb" else super().create_stream(path, mode)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        if (stamp := self.stamps.pop(Path(path).name, None)) is not None:
            self.stamps[Path(new_path).name] = stamp


def digest(content: bytes) -> str:
    """Return the checksum of a short text."""
    return cast(str, xxhash.xxh3_64_hexdigest(content))


def check_sizes(directory: Path, stamps: Mapping[str, FileChecksum]) -> None:
    """Check that all files exist and have their recorded sizes.

    Raises:
        CheckpointError: a file is missing or has another size.
    """
    for name, stamp in stamps.items():
        path = directory / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != stamp.size:
            state = "is missing" if actual is None else f"has {actual} bytes instead of {stamp.size}"
            raise CheckpointError(
                f"{path} {state}.",
                where=str(path),
                fix="the checkpoint is incomplete or damaged; load another checkpoint (tag)",
            )


def check_blocks(
    directory: Path, stamps: Mapping[str, FileChecksum], share: int = 0, shares: int = 1
) -> None:
    """Verify the checksums of all blocks, or of share number `share` out of `shares`.

    Shares are contiguous in file order, so that a rank hashes roughly the data that it reads afterwards.

    Raises:
        CheckpointError: a checksum is wrong.
    """
    blocks = [(name, at) for name, stamp in stamps.items() for at in range(len(stamp.blocks or ()))]
    mine = blocks[len(blocks) * share // shares : len(blocks) * (share + 1) // shares]
    wanted: dict[str, list[int]] = {}
    for name, at in mine:
        wanted.setdefault(name, []).append(at)
    for name, places in wanted.items():
        for at, found in zip(places, _digests(directory / name, places), strict=True):
            if found != (stamps[name].blocks or ())[at]:
                raise damaged(directory / name, f"between bytes {at * BLOCK:,} and {(at + 1) * BLOCK:,}")


def damaged(path: Path, place: str = "") -> CheckpointError:
    """Return the error for a file with a wrong checksum."""
    return CheckpointError(
        f"{path} is damaged: checksum mismatch{place and f' {place}'}.",
        where=str(path),
        fix="load another checkpoint (tag); if you have changed the file yourself, restore it",
    )


def _digests(path: Path, places: list[int]) -> Iterator[str]:
    """Yield the digests of consecutive blocks."""
    piece = memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        file.seek(places[0] * BLOCK)
        for _ in places:
            hashed, left = xxhash.xxh3_64(), BLOCK
            while left and (count := file.readinto(piece[: min(left, _PIECE)])):
                hashed.update(piece[:count])
                left -= count
            yield hashed.hexdigest()
