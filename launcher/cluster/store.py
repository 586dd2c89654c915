"""A node's copies of the files that `--sync` ships, stored by SHA-256 so that no content is sent twice.

    contents/DIGEST     each content once
    copies/NAME/        files as they were shipped; NAME is a hash of their names, permissions and contents
    arriving-*/         incomplete files; those of a killed agent are removed by the next one

Copies and contents that no run has used for a month are deleted.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.cluster.wire import Message
from launcher.scratch import Scratch

KEEP_S = 30 * 86400


class SyncedCopy:
    """One copy on this node.

    Args:
        manifest: the result of `SyncManifest.manifest`.
        root: default `$LAUNCHER_CACHE/sync` or `~/.cache/launcher/sync`.
    """

    def __init__(self, manifest: Message, root: Path | None = None) -> None:
        cache = Path(os.environ.get("LAUNCHER_CACHE") or Path.home() / ".cache" / "launcher")
        self.root = root or cache / "sync"
        self._entries: dict[str, Message] = manifest["entries"]
        self._contents, self._copies = self.root / "contents", self.root / "copies"
        self._copy = self._copies / manifest["name"]
        self._directory: str | None = manifest["directory"]
        self._arriving: tuple[Any, Any] | None = None
        self._in_use: int | None = None
        self._scratch: Scratch | None = None

    def missing(self) -> list[str]:
        """Return the digests of contents that are missing or damaged.

        Raises:
            OSError: the directory cannot be created or read.
        """
        for place in (self._contents, self._copies):
            place.mkdir(parents=True, exist_ok=True)
        self._scratch = Scratch(self.root, "arriving-", "agent")
        wanted = dict.fromkeys(entry["digest"] for entry in self._entries.values() if "digest" in entry)
        return [digest for digest in wanted if _digest_of(self._contents / digest) != digest]

    def take(self, digest: str, data: str | None) -> None:
        """Receive a piece of a content, in base64; None marks its end.

        Raises:
            OSError: it cannot be written.
            ValueError: the content does not match its digest.
        """
        if self._arriving is None:
            assert self._scratch is not None
            file = tempfile.NamedTemporaryFile(dir=self._scratch.path, delete=False)  # noqa: SIM115
            self._arriving = file, hashlib.sha256()
        file, seen = self._arriving
        if data is not None:
            piece = base64.b64decode(data)
            seen.update(piece)
            file.write(piece)
            return
        self._arriving = None
        file.close()
        if seen.hexdigest() != digest:
            os.unlink(file.name)
            raise ValueError(digest)
        os.replace(file.name, self._contents / digest)

    def build(self) -> Path:
        """Create the copy, or repair an existing one, and change to its working directory.

        Raises:
            OSError: it cannot be written.
        """
        with (self._copies / f".{self._copy.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # only one of the agents on a shared disk builds
            if self._copy.is_dir():
                self._fill(self._copy)
            else:
                assert self._scratch is not None
                temporary = Path(tempfile.mkdtemp(dir=self._scratch.path))
                self._fill(temporary)
                temporary.rename(self._copy)
        os.utime(self._copy)
        self._in_use = os.open(self._copy, os.O_RDONLY)  # held open and locked until the agent ends
        fcntl.flock(self._in_use, fcntl.LOCK_SH)
        if self._directory is not None:
            os.makedirs(self._copy / self._directory, exist_ok=True)  # git does not track empty directories
            os.chdir(self._copy / self._directory)
        self._forget()
        if self._scratch is not None:
            self._scratch.close()
        return self._copy

    def _fill(self, base: Path) -> None:
        for name, entry in self._entries.items():
            path = base / name
            if "link" in entry:
                if path.is_symlink() and os.readlink(path) == entry["link"]:
                    continue
            elif not path.is_symlink() and _digest_of(path) == entry["digest"]:
                os.utime(self._contents / entry["digest"])
                path.chmod(entry["mode"])
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            if "link" in entry:
                os.symlink(entry["link"], temporary)
            else:
                os.utime(self._contents / entry["digest"])
                temporary.unlink(missing_ok=True)
                temporary.touch(0o600)  # private until it has its final permissions
                shutil.copyfile(self._contents / entry["digest"], temporary)
                temporary.chmod(entry["mode"])
            os.replace(temporary, path)

    def _forget(self) -> None:
        """Delete copies and contents that have not been used for `KEEP_S`."""
        before = time.time() - KEEP_S
        for path in [*self._contents.iterdir(), *self._copies.iterdir()]:
            with contextlib.suppress(OSError):  # another agent deletes it, or uses it
                if path.lstat().st_mtime >= before:
                    continue
                if not path.is_dir():
                    path.unlink()
                    continue
                held = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                finally:
                    os.close(held)


class SyncedCopyWriter:
    """The agent's part of `--sync`. Slow work runs in threads, while the agent listens to the front end.

    Args:
        manifest: see `SyncedCopy`.
    """

    def __init__(self, manifest: Message) -> None:
        self._store = SyncedCopy(manifest)
        self._said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._failed = False
        self._do(lambda: {"is": "lacks", "digests": self._store.missing()})

    def news(self) -> list[Message]:
        """Return the messages since the last call."""
        return [self._said.get() for _ in range(self._said.qsize())]

    def take(self, digest: str, data: str | None) -> None:
        if self._failed:
            return
        try:
            self._store.take(digest, data)
        except OSError as error:
            self._fail(_why(error))
        except ValueError:
            self._fail("", digest)

    def build(self) -> None:
        if not self._failed:
            self._do(lambda: {"is": "copied", "root": str(self._store.build())})

    def _do(self, work: Callable[[], Message]) -> None:
        def run() -> None:
            try:
                self._said.put(work())
            except OSError as error:
                self._fail(_why(error))

        threading.Thread(target=run, daemon=True).start()

    def _fail(self, why: str, digest: str | None = None) -> None:
        self._failed = True
        self._said.put({"is": "uncopied", "why": why, "digest": digest})


def _why(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)


def _digest_of(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
