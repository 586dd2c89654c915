"""What an agent finds on its node: versions, memory, devices, files, and how the others reach it."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from launcher.cluster import cores, gpus
from launcher.cluster.selection import MASKS
from launcher.cluster.wire import Message

PACKAGES = ("launcher", "torch", "transformers")
REACH_S = 3.0


def collect(hello: Message) -> Message:
    """The facts that the front end judges (`preflight.py`).

    Args:
        hello: `needs` are files that the run reads, `count_gpus` whether devices matter.
    """
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: _version(name) for name in PACKAGES},
        "source": _digest_of_package(),
        "files": {path: digest(Path(path)) for path in hello["needs"]},
        "memory": psutil.virtual_memory().available,
        "cores": len(cores.usable_cores()),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "gpus": gpus.count() if hello["count_gpus"] else 0,
        "mask": next((os.environ[name] for name in MASKS if name in os.environ), None),
        "addresses": addresses(),
        "clock": time.time(),
    }


def addresses() -> list[str]:
    """Of this node, those first by which it is known to others."""
    server = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    found = [
        (address.family == socket.AF_INET6, address.address)
        for entries in psutil.net_if_addrs().values()
        for address in entries
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    usable = [text for _, text in sorted(found) if not text.startswith(("127.", "::1", "fe80", "169.254."))]
    return list(dict.fromkeys([*server, *usable]))


def interface_towards(addr: str, port: int) -> str | None:
    """The network interface by which this node talks to `addr`; None where that is not known."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(addr, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            mine = probe.getsockname()[0]
    except OSError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == mine for entry in entries):
            return None if name == "lo" else name
    return None


def reachable(candidates: list[str], port: int) -> list[str]:
    """Those addresses at which something answers on `port`, in their order."""

    def answers(address: str) -> bool:
        try:
            socket.create_connection((address, port), timeout=REACH_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max(1, len(candidates))) as pool:
        return [a for a, there in zip(candidates, pool.map(answers, candidates), strict=True) if there]


class Probe:
    """Holds the rendezvous port of the first node until its rank 0 takes it: the other nodes try it before."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def listen(self, addr: str, port: int) -> Message:
        """Take a port: a free one for 0. `addr` empty means all addresses. Returns `port`, or `problem`."""
        self.close()
        family = socket.AF_INET6 if ":" in addr else socket.AF_INET
        probe = socket.socket(family, socket.SOCK_STREAM)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((addr, port))
            probe.listen(128)
        except OSError as error:
            probe.close()
            return {"problem": error.strerror or str(error)}
        self._socket = probe
        return {"port": probe.getsockname()[1]}

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def digest(path: Path) -> str | None:
    """Of a file's content; None where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def _digest_of_package() -> str:
    """Of the code of this package: versions alone do not tell two work trees apart."""
    room: Any = Path(__file__).resolve().parent
    text = b"".join(path.read_bytes() for path in sorted(room.glob("*.py")))
    return hashlib.sha256(text).hexdigest()[:16]
