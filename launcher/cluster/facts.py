"""Facts about a node, collected by its agent: versions, memory, devices, files, and addresses."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from launcher.cluster import cores, gpus
from launcher.cluster.wire import Message

PACKAGES = ("launcher", "torch", "transformers")


def collect(hello: Message) -> Message:
    """Return the facts that the front end checks (`preflight.py`).

    Args:
        hello: `needs` lists the files that the run reads, `count_gpus` specifies whether to count devices.
    """
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": _versions(PACKAGES),
        "source": _digest_of_package(),
        "files": {path: digest(Path(path)) for path in hello["needs"]},
        "memory": psutil.virtual_memory().available,
        "cores": len(cores.usable_cores()),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "gpus": gpus.count() if hello["count_gpus"] else 0,
        "mask": next((os.environ[name] for name in gpus.MASKS if name in os.environ), None),
        "addresses": addresses(),
        "clock": time.time(),
    }


def addresses() -> list[str]:
    """Return the addresses of this node, starting with the one through which ssh reached it."""
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
    """Return the network interface through which this node reaches `addr`; None if unknown."""
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


def _versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of installed packages, from the names of their directories.

    Importing importlib.metadata would take longer than all other work of an agent.
    """
    found: dict[str, str | None] = dict.fromkeys(packages)
    for place in reversed(sys.path):  # the first match on sys.path wins
        with contextlib.suppress(OSError):
            for name in os.listdir(place or "."):
                package, dash, version = name.removesuffix(".dist-info").partition("-")
                if package in found and dash and os.path.exists(os.path.join(place, name, "METADATA")):
                    found[package] = version
    return found


def digest(path: Path) -> str | None:
    """Return the digest of a file's content; None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def _digest_of_package() -> str:
    """Return a digest of this package's code: version numbers alone do not distinguish two work trees."""
    package: Any = Path(__file__).resolve().parent
    text = b"".join(path.read_bytes() for path in sorted(package.glob("*.py")))
    return hashlib.sha256(text).hexdigest()[:16]
