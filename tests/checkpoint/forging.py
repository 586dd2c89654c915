"""Checkpoints whose meta.json agrees with changed files, and such as were written before there were checksums."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.checkpoint import checksums, tags
from launcher.checkpoint.meta_file import read_meta, write_meta


def agree(checkpoint: Path, name: str) -> None:
    """Let meta.json agree with a changed file, so that what is tested is the file's reader."""
    found, content = read_meta(checkpoint), (checkpoint / name).read_bytes()
    stamp = checksums.FileChecksum(len(content), (checksums.digest(content),) if content else ())
    more = {"tag": found.tag, "saved_at_ns": found.saved_at_ns, "latest": found.latest}
    write_meta(checkpoint, {**found.files, name: stamp}, found.meta, more)


def of_first_format(checkpoint: Path) -> None:
    """Write meta.json as it was before there were checksums."""
    found = read_meta(checkpoint)
    content = {
        "format": 1,
        "saved_at_ns": found.saved_at_ns,
        "files": {name: stamp.size for name, stamp in found.files.items()},
        "meta": found.meta,
    }
    (checkpoint / tags.META_FILE).write_text(json.dumps(content, indent=1))
