"""Manages a directory of checkpoints: tags, `latest`, and the leftovers of killed saves.

- DIR/latest: the tag of the newest complete checkpoint, one line
- DIR/TAG/: meta.json, .metadata, *.distcp; meta.json has the others' checksums, and begins with its own
- DIR/.tmp-TAG/: a save that is in progress or was killed
- DIR/.old-TAG/: the previous TAG, while another save replaces it
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher.checkpoint.being_written import hold, is_being_written, let_go
from launcher.checkpoint.deepspeed.files import is_deepspeed
from launcher.checkpoint.durable import sync_directory, write_durably
from launcher.checkpoint.meta_file import read_meta
from launcher.checkpoint.names import (
    ITERATION_FILE,
    LATEST_FILE,
    META_FILE,
    METADATA_FILE,
    OLD,
    TMP,
    UNIVERSAL_FILE,
    fsdp_directories,
    is_megatron,
)
from launcher.errors import CheckpointError, ConfigError, shortened
from launcher.files import read_small

LONGEST_LATEST = 1 << 12
"""Maximum size of `latest` in bytes; a tag has at most 200."""

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=\-]{0,199}")


class WrittenByAnother(CheckpointError):
    """Another process is saving under the same tag."""


def check_tag(tag: str) -> str:
    """Return `tag` unchanged if it is a valid directory name on every system.

    Raises:
        CheckpointError: it has characters other than letters, digits, `_`, `-`, `=`, `.`, or is `latest`.
    """
    if tag == LATEST_FILE:
        raise CheckpointError(
            f"{LATEST_FILE!r} cannot be a tag: the file of that name records the latest checkpoint.",
            fix="omit the tag to load the latest checkpoint; choose another tag to save one",
        )
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise CheckpointError(
            f"{shortened(repr(tag))} is not a valid checkpoint tag.",
            fix="use letters, digits, '_', '-', '=' and '.', and start with a letter or digit: global_step100. To load "
            "a checkpoint with another name, rename its directory, and write the new name into `latest`",
        )
    return tag


def tag_path(directory: Path, tag: str) -> Path:
    """Return the directory from which to read the checkpoint `tag`.

    Raises:
        CheckpointError: no complete checkpoint has this tag.
    """
    # A save that is killed while it replaces a checkpoint of the same tag leaves the old one under `.old-`.
    for path in (directory / check_tag(tag), directory / f"{OLD}{tag}"):
        if (path / META_FILE).is_file():
            return path
    if is_foreign(directory / tag):
        return directory / tag
    refuse_foreign(directory / tag)
    _refuse_incomplete(directory / tag)
    there, absent = tags_there(directory), directory / tag / META_FILE
    why = f" {absent} is missing." if (directory / tag).is_dir() else ""
    raise CheckpointError(
        f"{directory} has no checkpoint with the tag {tag!r}.{why}",
        where=str(directory),
        fix=f"load one of: {there}" if there else "it has no checkpoints; check the directory",
    )


def _refuse_incomplete(path: Path) -> None:
    """Raise a CheckpointError that names the missing files if another program's checkpoint is incomplete."""
    kinds = (("*_optim_states.pt", "*_model_states.pt"), ("*.distcp", METADATA_FILE))
    for there, lacks in kinds:
        if (path / META_FILE).exists() or any(path.glob(lacks)) or not any(path.glob(there)):
            continue
        raise CheckpointError(
            f"{path} has {there}, but no {lacks}.",
            where=str(path),
            fix="copy all files of the checkpoint, or load another one (tag)",
        )


def is_foreign(path: Path) -> bool:
    """Return whether a directory is a checkpoint of DeepSpeed or of an FSDP2 program."""
    return is_deepspeed(path) or bool(fsdp_directories(path))


def refuse_foreign(path: Path) -> None:
    """Raise an error with instructions if a directory is a single checkpoint of another program.

    Raises:
        CheckpointError: it is a single checkpoint.
    """
    refuse_unread(path)
    if is_foreign(path):
        raise CheckpointError(
            f"{path} is a single{' DeepSpeed' if is_deepspeed(path) else ''} checkpoint, not a directory of several.",
            where=str(path),
            fix=f"load the directory {path.parent} with the tag {path.name}",
        )


def refuse_unread(path: Path) -> None:
    """Raise an error with instructions if a checkpoint has to be converted before it can be loaded.

    Raises:
        CheckpointError: the checkpoint has to be converted.
    """
    through_hub = "convert it to Hugging Face format, and start from that model (--model)"
    convert = f"{through_hub}; use Megatron-LM's tools/checkpoint/convert.py"
    kinds = (
        (
            is_megatron(path) or (path / ITERATION_FILE).is_file(),
            "Megatron-Core checkpoint, whose parameters have other names",
            f"convert it with `launch import {path} OUT --model M`, then load OUT",
        ),
        (
            any(path.glob("mp_rank_*/model_optim_rng.pt")),
            "checkpoint in Megatron-LM's older format (--ckpt-format torch)",
            convert,
        ),
        (
            (path / "checkpoint_metadata.json").is_file() and (path / "model_config.json").is_file(),
            "nanotron checkpoint",
            f"{through_hub}; use nanotron's examples/llama/convert_nanotron_to_hf.py",
        ),
    )
    for found, what, fix in kinds:
        if found:
            raise CheckpointError(
                f"{path} is a {what}; it cannot be loaded directly.", where=str(path), fix=fix
            )


def list_tags(directory: str | Path) -> list[str]:
    """Return the tags of the complete checkpoints in `directory`, oldest first; [] if it does not exist."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    times: dict[str, int] = {}
    for path in directory.iterdir():
        name = path.name.removeprefix(OLD)
        if _TAG.fullmatch(name) and (path / META_FILE).is_file() and (name == path.name or name not in times):
            times[name] = _saved_at(path)
    return sorted(times, key=lambda tag: (times[tag], tag))


def tags_there(directory: Path) -> str:
    """Return the newest tags in a directory as text for messages; "" if there are none.

    Checkpoints of other programs are listed only if launcher saved none.
    """
    found = list_tags(directory)
    if not found and directory.is_dir():
        foreign = [path.name for path in directory.iterdir() if is_foreign(path) or is_megatron(path)]
        found = sorted(foreign, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    return last_of(found)


def last_of(names: Sequence[str]) -> str:
    """Return the last names of a list as text for messages."""
    return ("... " if len(names) > 5 else "") + ", ".join(names[-5:])


def latest_tag(directory: str | Path, file: str = LATEST_FILE) -> str | None:
    """Return the tag stored in `latest`, or in another file; None if the file does not exist.

    Raises:
        CheckpointError: the file cannot be read, or does not contain a valid tag.
    """
    path = Path(directory) / file
    try:
        text = read_small(path, "the file", where=str(path), fix="", largest=LONGEST_LATEST)
        return check_tag(text.strip())
    except (ConfigError, CheckpointError) as error:
        if not os.path.lexists(path):
            return None
        there = tags_there(Path(directory))
        raise CheckpointError(
            f"{path} does not name a checkpoint: {error.what}",
            where=str(path),
            fix=f"write one of the tags into it: {there}" if there else "pass the tag of a checkpoint",
        ) from error


def tag_to_load(directory: Path) -> tuple[str | None, str | None]:
    """Return (the tag that `latest` names, a warning to log or None).

    A save that is killed just before it updates `latest` leaves it behind the newest checkpoint. A damaged
    `latest` may also name another checkpoint. These cases cannot be distinguished, so both return a warning.

    Raises:
        CheckpointError: the file cannot be read, or names a checkpoint that does not exist.
    """
    file, named, newest = directory / LATEST_FILE, latest_tag(directory), _newest_that_was_latest(directory)
    if named is None:
        if newest is None:
            universal = latest_tag(directory, UNIVERSAL_FILE)
            return (
                universal,
                universal and f"{file} is missing. Loading {universal}, which {UNIVERSAL_FILE} names.",
            )
        return newest, f"{file} is missing. Loading the newest checkpoint that it named: {newest}."
    known = list_tags(directory)
    if known and named not in known and not (directory / named).is_dir():
        raise CheckpointError(
            f"{file} names {named!r}, but there is no such checkpoint.",
            where=str(file),
            fix=f"write one of these into it: {tags_there(directory)}",
        )
    if newest is None or named == newest or named not in known:
        return named, None
    if _saved_at(tag_path(directory, named)) == _saved_at(tag_path(directory, newest)):
        return named, None
    return named, (
        f"{file} names {named}, but the newest checkpoint that was saved as the latest is {newest}. Loading "
        f"{named}; if you did not write that name yourself, load {newest} by its tag."
    )


def path_to_load(directory: Path, tag: str | None) -> Path | None:
    """Return the checkpoint with a tag, or the one to load by default; None if there is no default."""
    chosen = tag if tag is not None else tag_to_load(directory)[0]
    return None if chosen is None else tag_path(directory, chosen)


def _newest_that_was_latest(directory: Path) -> str | None:
    for tag in reversed(list_tags(directory)):
        try:
            if read_meta(tag_path(directory, tag)).latest:
                return tag
        except CheckpointError:
            continue  # reported when it is loaded
    return None


def start(directory: Path, tag: str) -> Path:
    """Clean up after killed saves and create the temporary directory of a new one.

    Raises:
        WrittenByAnother: another process is writing this tag.
        CheckpointError: `directory` is not writable.
    """
    temporary = temporary_path(directory, tag)
    let_go(temporary)  # left by an interrupted save of this process
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _clean(directory, temporary)
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"Cannot write to {directory}: {error}",
            where=str(directory),
            fix="choose a directory that can be created and written",
        ) from error
    hold(temporary)
    return temporary


def _clean(directory: Path, mine: Path) -> None:
    """Remove or restore the leftovers of killed saves."""
    for path in directory.iterdir():
        if path.name.startswith(TMP):
            if not is_being_written(path):
                shutil.rmtree(path)
            elif path == mine:
                raise WrittenByAnother(
                    f"Another process is writing {directory / tag_of(path)}.",
                    where=str(path),
                    fix="wait until it is done, or write to another directory",
                )
        elif path.name.startswith(OLD):
            whole = directory / path.name.removeprefix(OLD)
            shutil.rmtree(path) if whole.exists() else os.rename(path, whole)


def temporary_path(directory: Path, tag: str) -> Path:
    return directory / f"{TMP}{tag}"


def tag_of(path: Path) -> str:
    """Return the tag of a directory, which may have the prefix of one being written or replaced."""
    return path.name.removeprefix(TMP).removeprefix(OLD)


def discard(directory: Path, tag: str) -> None:
    """Remove the files of a failed save of this process, but not those of another process."""
    if let_go(temporary_path(directory, tag)):
        shutil.rmtree(temporary_path(directory, tag), ignore_errors=True)


def finish(directory: Path, tag: str, latest: bool = True) -> None:
    """Rename the complete temporary directory to its tag, then update `latest` if requested."""
    temporary, final, old = temporary_path(directory, tag), directory / tag, directory / f"{OLD}{tag}"
    sync_directory(temporary)
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    sync_directory(directory)
    if latest:
        write_durably(directory / LATEST_FILE, tag + "\n")
    shutil.rmtree(old, ignore_errors=True)
    let_go(temporary)


def _saved_at(path: Path) -> int:
    """Return the time of a checkpoint's save, in ns; 0 if it is corrupted, so that it counts as oldest."""
    try:
        return read_meta(path).saved_at_ns
    except CheckpointError:
        return 0
