"""The directory of checkpoints: tags, `latest`, what killed saves leave behind.

- DIR/latest: the name of the newest complete checkpoint, one line
- DIR/TAG/: meta.json, .metadata, *.distcp
- DIR/.tmp-TAG/: a save that is under way, or was killed
- DIR/.old-TAG/: what TAG was, while a second save of it takes its place
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from launcher.errors import CheckpointError

LATEST_FILE = "latest"
META_FILE = "meta.json"
FORMAT = 1
"""Version of the layout; written into meta.json."""

_TMP, _OLD = ".tmp-", ".old-"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")


def check_tag(tag: str) -> str:
    """`tag` itself, if it can name a directory on every system.

    Raises:
        CheckpointError: it has other characters than letters, digits, `_`, `-`, `.`, or is the word `latest`.
    """
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST_FILE:
        raise CheckpointError(
            f"{tag!r} cannot be the tag of a checkpoint.",
            fix="use letters, digits, '_', '-' and '.', and begin with a letter or digit: global_step100",
        )
    return tag


def tag_path(directory: Path, tag: str) -> Path:
    """Where the checkpoint `tag` is to be read from.

    Raises:
        CheckpointError: there is no complete one.
    """
    # A save killed while it replaced a checkpoint of the same tag leaves the former one beside.
    for path in (directory / check_tag(tag), directory / f"{_OLD}{tag}"):
        if (path / META_FILE).is_file():
            return path
    refuse_foreign(directory / tag)
    tags = list_tags(directory)
    raise CheckpointError(
        f"{directory} has no checkpoint with the tag {tag!r}.",
        where=str(directory),
        fix=f"load one of: {', '.join(tags[-5:])}" if tags else "it has none at all; check the directory",
    )


def refuse_foreign(path: Path) -> None:
    """Say it clearly where a directory is a checkpoint of DeepSpeed's.

    Raises:
        CheckpointError: it is.
    """
    universal = (path / "latest_universal").exists() or (path / "zero" / "optimizer_state.pt").exists()
    if universal or next(path.glob("*model_states.pt"), None) is not None:
        kind = "in DeepSpeed's universal layout" if universal else "of DeepSpeed's"
        raise CheckpointError(
            f"{path} has a checkpoint {kind}, which is not read here.",
            where=str(path),
            fix="write its weights with DeepSpeed's zero_to_fp32.py --safe_serialization, and start from those",
        )


def list_tags(directory: str | Path) -> list[str]:
    """Tags of the complete checkpoints in `directory`, the oldest first. [] where there is no such
    directory."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    times: dict[str, int] = {}
    for path in directory.iterdir():
        name = path.name.removeprefix(_OLD)
        if _TAG.fullmatch(name) and (path / META_FILE).is_file() and (name == path.name or name not in times):
            times[name] = _saved_at(path)
    return sorted(times, key=lambda tag: (times[tag], tag))


def latest_tag(directory: str | Path) -> str | None:
    """The tag that `latest` names; None where there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or names no possible tag.
    """
    path = Path(directory) / LATEST_FILE
    try:
        return check_tag(path.read_text(encoding="utf-8").strip())
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} names no checkpoint: {error}",
            where=str(path),
            fix=f"write one of the tags into it: {', '.join(list_tags(directory)[-5:])}",
        ) from error


def prune(directory: str | Path, keep: int) -> list[str]:
    """Delete all but the newest `keep` checkpoints, never the one that `latest` names; return the deleted
    tags.

    To be called on one rank.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint has to stay")
    directory = Path(directory)
    latest = latest_tag(directory)
    gone = [tag for tag in list_tags(directory)[:-keep] if tag != latest]
    for tag in gone:
        path = tag_path(directory, tag)
        # Renamed first: half a checkpoint must not look like one.
        doomed = directory / f"{_TMP}{tag}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    return gone


def start(directory: Path, tag: str) -> Path:
    """Clean up after killed saves and make the temporary directory of a new one."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.name.startswith(_TMP):
            shutil.rmtree(path)
        elif path.name.startswith(_OLD):
            whole = directory / path.name.removeprefix(_OLD)
            shutil.rmtree(path) if whole.exists() else os.rename(path, whole)
    temporary = temporary_path(directory, tag)
    temporary.mkdir()
    return temporary


def temporary_path(directory: Path, tag: str) -> Path:
    return directory / f"{_TMP}{tag}"


def discard(directory: Path, tag: str) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(temporary_path(directory, tag), ignore_errors=True)


def finish(directory: Path, tag: str, latest: bool = True) -> None:
    """Give the complete temporary directory its name, then move `latest` if that is wanted."""
    temporary, final, old = temporary_path(directory, tag), directory / tag, directory / f"{_OLD}{tag}"
    sync_directory(temporary)
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    sync_directory(directory)
    if latest:
        write_durably(directory / LATEST_FILE, tag + "\n")
    shutil.rmtree(old, ignore_errors=True)


def write_durably(path: Path, text: str) -> None:
    """Write a file so that after a crash it has the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_meta(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's meta.json.

    Raises:
        CheckpointError: it is corrupted, or of a newer format.
    """
    file = path / META_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content["format"]
        if not isinstance(content["meta"], dict) or not isinstance(content["files"], dict):
            raise TypeError("meta and files must be objects")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}",
            where=str(file),
            fix="the checkpoint is corrupted; load another tag",
        ) from error
    if version != FORMAT:
        raise CheckpointError(
            f"{file} is of format {version}; this version reads format {FORMAT}.",
            where=str(file),
            fix="load it with the version of launcher that wrote it",
        )
    return dict(content)


def _saved_at(path: Path) -> int:
    """When a checkpoint was saved, in ns. A corrupted one counts as old."""
    try:
        return int(read_meta(path).get("saved_at_ns", 0))
    except (CheckpointError, TypeError, ValueError):
        return 0
