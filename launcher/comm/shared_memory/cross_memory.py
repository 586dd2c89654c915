"""Reading the memory of another process of this machine: "cross memory attach" (process_vm_readv(2)).

This takes one copy, from one process into another, while a loopback socket takes two.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PR_SET_PTRACER = 0x59616D61


class _Region(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


@cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    region = ctypes.POINTER(_Region)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.process_vm_readv.argtypes = [
        ctypes.c_int, region, ctypes.c_ulong, region, ctypes.c_ulong, ctypes.c_ulong
    ]  # fmt: skip
    return library


def copy(pid: int, address: int, into: Tensor) -> None:
    """Fill `into` from an address in another process."""
    library = _library()
    done, size, start = 0, into.numel() * into.element_size(), into.data_ptr()
    while done < size:
        here, there = _Region(start + done, size - done), _Region(address + done, size - done)
        count = library.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"reading the memory of process {pid}: {os.strerror(number)}")
        done += count


def allow_siblings() -> None:
    """Allow other children of our parent to read this process, where Yama permits only ancestors."""
    _library().prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def machine() -> str:
    """Return an identifier of the running kernel and pid namespace, within which process ids are
    comparable."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {os.getpid()}"


def problem(every: list[tuple[str, int, int]]) -> str | None:
    """Return why this process cannot read the others; None if it can. `every`: (machine, pid, address of the
    pid) of each."""
    if len({machine for machine, _, _ in every}) > 1:
        return "the ranks are not on one machine"
    value = torch.zeros(1, dtype=torch.int64)
    try:
        for _, pid, address in every:
            copy(pid, address, value)
            if int(value) != pid:
                return f"process {pid} is not the expected rank"
    except OSError as error:
        return str(error)
    return None
