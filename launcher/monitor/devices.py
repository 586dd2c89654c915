"""Device specifications from data sheets (`devices.json`), for utilisation, memory estimates and plans."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError

TABLE = Path(__file__).with_name("devices.json")


@dataclass(frozen=True)
class Device:
    """A device and its node. FLOP/s are for dense bf16; bandwidths are in bytes/s per direction.

    Args:
        title: display name.
        memory: bytes of memory visible to a program.
        flops, traffic: peak FLOP/s and memory bandwidth from the data sheet.
        per_node: devices per node in the vendor's systems.
        inside, across, host: bandwidth to the other devices of the node, to other nodes, and to host memory.
        matmul_share, traffic_share: shares of `flops` and `traffic` that training reaches.
        half_width: hidden size / tp at which products reach half of that share, since narrow ones are slower.
        network_share: share of `inside` and `across` that collectives reach.
        fp32_share: share of `flops` for fp32 products.
        host_traffic: host memory bandwidth per rank while all ranks use it.
        context, group: bytes of overhead besides tensors; see `device_budget.py`.
        launch: seconds to launch one operation from a model's code.
        synchronous: an operation ends before the next one is launched, as on a CPU.
        attention: torch's kernels for scaled_dot_product_attention on this device.
        calibrated_on: source of the shares; "" for the defaults.
    """

    title: str
    memory: float
    flops: float
    traffic: float
    per_node: int
    inside: float
    across: float
    host: float
    matmul_share: float
    traffic_share: float
    half_width: float
    network_share: float
    fp32_share: float
    host_traffic: float
    context: float
    group: float
    launch: float
    synchronous: bool
    attention: tuple[str, ...]
    calibrated_on: str


def peak_flops(name: str) -> float | None:
    """Return the peak FLOP/s of a device by its `torch.cuda.get_device_name()`; None if it is unknown."""
    row = _row(name)
    return None if row is None else float(row["tflops"]) * 1e12


def device(name: str) -> Device:
    """Return a device by name ("h100", "A100 40", "NVIDIA A100-SXM4-80GB") or file of `launch bench device`.

    Raises:
        ConfigError: the table has no such device, or the file is not valid.
    """
    return device_of(row_of(name))


def row_of(name: str) -> dict[str, Any]:
    """Return the row of a device from the table or a file; see `device`."""
    row = _measured(name) if name.endswith(".json") else _row(name)
    if row is None:
        known = [str(each["names"][0]).lower().replace(" ", "-") for each in _table()["devices"]]
        near = [one for one in known if name.lower() in one] or difflib.get_close_matches(name.lower(), known)
        meant = f"did you mean {near[0]}? " if name and near else ""
        if name[:1].isdigit() and not near:  # a number of bytes, which memory-estimate accepts
            meant = f"give its type, which determines its speed, and add --memory {name}; "
        raise ConfigError(f"unknown GPU {name!r}", where="--gpu", fix=f"{meant}known: {', '.join(known)}")
    return row


def device_of(row: dict[str, Any]) -> Device:
    """Return the device of a row, with defaults for missing figures."""
    shares = {**defaults(), **row}
    return Device(
        title=row["title"],
        memory=row["memory_gib"] * 2**30,
        flops=row["tflops"] * 1e12,
        traffic=row["memory_gb_s"] * 1e9,
        per_node=row["per_node"],
        inside=row["inside_gb_s"] * 1e9,
        across=row["across_gb_s"] * 1e9,
        host=row["host_gb_s"] * 1e9,
        matmul_share=shares["matmul"],
        traffic_share=shares["traffic"],
        half_width=shares["half_width"],
        network_share=shares["network"],
        fp32_share=shares["fp32"],
        host_traffic=shares["host_memory_gb_s"] * 1e9,
        context=shares["context_mib"] * 2**20,
        group=shares["group_mib"] * 2**20,
        launch=shares["launch_us"] * 1e-6,
        synchronous=shares["synchronous"],
        attention=tuple(shares["attention"]),
        calibrated_on=row.get("calibrated_on", ""),
    )


def defaults() -> dict[str, Any]:
    """Return the default figures for devices whose row does not contain them."""
    return dict(_table()["defaults"])


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def _measured(path: str) -> dict[str, Any]:
    try:
        row = json.loads(Path(path).read_text(encoding="utf-8"))
        missing = sorted(set(_table()["devices"][0]) - set(row))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", where="--gpu", fix="launch bench device --out FILE.json"
        ) from None
    if missing:
        raise ConfigError(
            f"{path} lacks {', '.join(missing)}", where="--gpu", fix="launch bench device --out FILE.json"
        )
    return dict(row)


def _row(name: str) -> dict[str, Any] | None:
    """Return the first row with a name whose words occur in sequence in `name`."""
    words = name.upper().replace("-", " ").split()
    for row in _table()["devices"]:
        if any(_runs_in(known.upper().split(), words) for known in row["names"]):
            return dict(row)
    return None


def _runs_in(wanted: list[str], words: list[str]) -> bool:
    return any(words[i : i + len(wanted)] == wanted for i in range(len(words)))
