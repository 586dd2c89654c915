"""Reads and writes a checkpoint's meta.json: checksums of the other files, and the meta passed to `save`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoint.checksums import FileChecksum, damaged, digest
from launcher.checkpoint.durable import write_durably
from launcher.checkpoint.names import META_FILE
from launcher.errors import CheckpointError

FORMAT = 2
"""Version of the layout, written into meta.json. Format 1 had no checksums."""


@dataclass(frozen=True)
class CheckpointMeta:
    """The content of meta.json.

    Attributes:
        meta: the meta passed to `save`.
        files: name -> size and checksums of the other files.
        saved_at_ns: time of the save.
        latest: whether the save updated `latest`; None in format 1.
        checksums: whether there are checksums; False in format 1.
        tag: tag that it was saved under; None in format 1.
    """

    meta: dict[str, Any]
    files: dict[str, FileChecksum]
    saved_at_ns: int
    latest: bool | None
    checksums: bool
    tag: str | None


def write_meta(
    path: Path, files: Mapping[str, FileChecksum], meta: dict[str, Any], more: Mapping[str, Any]
) -> None:
    """Write a checkpoint's meta.json. Its first line contains the checksum of all other lines."""
    content = {**more, "files": {name: stamp.write() for name, stamp in files.items()}, "meta": meta}
    body = json.dumps(content, indent=1).removeprefix("{\n")
    write_durably(path / META_FILE, _first_line(body.encode()) + body)


def _first_line(body: bytes) -> str:
    return f'{{"format": {FORMAT}, "xxh3": "{digest(body)}",\n'


def read_meta(path: Path) -> CheckpointMeta:
    """Return the content of a checkpoint's meta.json.

    Raises:
        CheckpointError: the file is damaged, or of a newer format.
    """
    file = path / META_FILE
    try:
        raw = file.read_bytes()
        content = json.loads(raw)
        version = content["format"]
        if version == FORMAT:
            first, _, body = raw.partition(b"\n")
            if first.decode() + "\n" != _first_line(body):
                raise damaged(file)
        files = {str(name): FileChecksum.read(stamp) for name, stamp in content["files"].items()}
        if any((stamp.blocks is None) == (version == FORMAT) for stamp in files.values()):
            raise ValueError(f"its list of files is not valid in format {version}")
        if not isinstance(content["meta"], dict):
            raise TypeError("meta must be an object")
        saved_at, latest = int(content.get("saved_at_ns", 0)), content.get("latest")
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}",
            where=str(file),
            fix="the checkpoint is corrupted; load another checkpoint (tag)",
        ) from error
    if version not in (1, FORMAT):
        raise CheckpointError(
            f"{file} has format {version}; this version reads formats up to {FORMAT}.",
            where=str(file),
            fix="load it with the version of launcher that wrote it, or another tag if the file is damaged",
        )
    return CheckpointMeta(content["meta"], files, saved_at, latest, version == FORMAT, content.get("tag"))
