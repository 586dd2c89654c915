"""The manifest of `--sync`: the configuration, the script and the files of a directory, by their SHA-256.

In a git work tree the files are those that git does not ignore, committed or not; elsewhere all but
`__pycache__`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launcher.cluster.wire import Message
from launcher.errors import ConfigError

MOST_BYTES = 256 << 20
MOST_FILES = 20_000
PIECE = 48 << 10
TREE = "tree"
LEFT_OUT = (".git", "__pycache__")


@dataclass(frozen=True)
class SyncEntry:
    """A file, identified by its content, or a symbolic link, which is shipped as a link."""

    digest: str = ""
    size: int = 0
    """Bytes."""
    mode: int = 0o644
    """Permissions."""
    link: str = ""

    def to_json(self) -> Message:
        return {"link": self.link} if self.link else {"digest": self.digest, "mode": self.mode}


@dataclass(frozen=True)
class SyncManifest:
    """The files to ship."""

    entries: dict[str, SyncEntry] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    """Absolute path on this machine of each requested file -> its name in the copy."""
    sources: dict[str, str] = field(default_factory=dict)
    """Paths on this machine, by digest."""
    directory: str | None = None
    """Working directory of the ranks in the copy; None: they start where they would without a copy."""

    @property
    def size(self) -> int:
        """Return the total number of bytes; equal contents count once."""
        return sum({entry.digest: entry.size for entry in self.entries.values()}.values())

    def manifest(self) -> Message:
        """Return the message that announces the files to a node."""
        entries = {name: entry.to_json() for name, entry in sorted(self.entries.items())}
        digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
        return {"name": digest[:16], "entries": entries, "directory": self.directory}

    def pieces(self, digests: Iterable[str]) -> Iterator[Message]:
        """Yield the contents, in pieces for a control stream."""
        for digest in digests:
            path = self.sources[digest]
            try:
                with open(path, "rb") as file:
                    while data := file.read(PIECE):
                        yield {"digest": digest, "data": base64.b64encode(data).decode()}
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror}", where="--sync") from None
            yield {"digest": digest, "data": None}


def pack(files: Sequence[str], directory: str | None, cwd: str) -> SyncManifest:
    """Collect the files to ship.

    Args:
        files: absolute paths without symbolic links, inside or outside of the directory.
        directory: its path; None ships only `files`.
        cwd: the working directory on this machine. If a directory is shipped, ranks start at the same place
            in the copy.

    Raises:
        ConfigError: a file is missing or cannot be read, there is too much to send, or `cwd` is not in the
            directory.
    """
    found: dict[str, Path] = {}
    root = None
    start = None
    if directory is not None:
        root = Path(directory).resolve()
        if not root.is_dir():
            raise ConfigError(f"{directory} is not a directory", where="--sync", fix="pass a directory")
        if not Path(cwd).is_relative_to(root):
            raise ConfigError(
                f"the working directory {cwd} is not in {root}, so its copy would have no working directory",
                where="--sync",
                fix=f"start in {root}, or pass a directory that contains both",
            )
        found = {f"{TREE}/{name}": root / name for name in _listed(root)}
        start = str(Path(TREE, Path(cwd).relative_to(root)))
    places: dict[str, str] = {}
    for number, file in enumerate(files):
        path = Path(file)
        inside = root is not None and path.is_relative_to(root)
        name = f"{TREE}/{path.relative_to(root)}" if root and inside else f"{number}/{path.name}"
        places[file], found[name] = name, path
    _check_amount(found)
    entries = {name: _entry(path) for name, path in found.items()}
    sources = {entry.digest: str(found[name]) for name, entry in entries.items() if not entry.link}
    return SyncManifest(entries, places, sources, start)


def _check_amount(found: dict[str, Path]) -> None:
    sizes = {path: path.lstat().st_size for path in found.values() if os.path.lexists(path)}
    total = sum(sizes.values())
    if len(sizes) > MOST_FILES or total > MOST_BYTES:
        largest = sorted(sizes, key=lambda path: sizes[path], reverse=True)[:3]
        named = ", ".join(f"{path} ({spoken(sizes[path])})" for path in largest)
        raise ConfigError(
            f"{len(sizes)} files ({spoken(total)}) are too much to send: at most {MOST_FILES} files and "
            f"{spoken(MOST_BYTES)} are possible; the largest: {named}",
            where="--sync",
            fix="make git ignore what the run does not need, or put data where all hosts can read it",
        )


def _entry(path: Path) -> SyncEntry:
    try:
        if path.is_symlink():
            return SyncEntry(link=os.readlink(path))
        if not path.is_file():
            raise ConfigError(f"{path} is not a regular file", where="--sync")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            facts = os.fstat(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", where="--sync") from None
    return SyncEntry(digest, facts.st_size, facts.st_mode & 0o777)


def _listed(root: Path) -> list[str]:
    """Return the names of the files of a directory, relative to it."""
    in_git = any((place / ".git").exists() for place in (root, *root.parents))
    names = _not_ignored(root) if in_git else _all_of(root)
    if not names:
        left_out = ": git ignores everything there" if in_git else ""
        raise ConfigError(f"no files to send in {root}{left_out}", where="--sync")
    return names


def _not_ignored(root: Path) -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        asked = subprocess.run(command, capture_output=True)
        said = os.fsdecode(asked.stderr).strip()
    except OSError as error:
        asked, said = None, f"git cannot be started: {error.strerror}"
    if asked is None or asked.returncode != 0:
        raise ConfigError(
            f"cannot determine which files of {root} git ignores: {said}",
            where="--sync",
            fix="fix what git reports; all files are sent only from a directory outside any git repository",
        )
    names: list[str] = []
    for name in dict.fromkeys(os.fsdecode(asked.stdout).split("\0")):
        path = root / name
        if not name or not os.path.lexists(path):  # deleted, not yet committed
            continue
        if path.is_dir() and not path.is_symlink():  # a nested git repository
            names += [str(Path(name, inner)) for inner in _not_ignored(path)]
        else:
            names.append(name)
    return names


def _all_of(root: Path) -> list[str]:
    names: list[str] = []
    for place, directories, files in os.walk(root):
        links = [name for name in directories if Path(place, name).is_symlink()]
        directories[:] = sorted(set(directories) - set(links) - set(LEFT_OUT))
        names += [str(Path(place, name).relative_to(root)) for name in sorted([*files, *links])]
    return names


def spoken(size: int) -> str:
    """Return the number of bytes in human-readable form."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
