"""Benchmark of this machine's devices: matrix products, memory, links and launches, as a row for `devices.json`.

`launch bench device` runs it on every rank; rank 0 writes the row to the file given as the argument.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from launcher.comm import Mesh, all_reduce, init_distributed, pick_device

ROUNDS = 7
SIDES = {"cuda": (4096, 8192), "cpu": (512, 1024)}  # sizes of square matrix products
ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 24}  # elements to read and write, and to send
SHARES = {"matmul": 0.9, "traffic": 0.9, "network": 1.0}
"""Shares that training reaches of the measured figures, which are already below data sheet peaks."""


def measure(device: torch.device) -> dict[str, Any]:
    """Return the row of this machine; every rank must call this function.

    CPUs are measured in fp32, GPUs in bf16.
    """
    mesh = Mesh.build(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    flops = max(_products(device, side, dtype) for side in SIDES[device.type])
    row = {
        "names": ["THIS MACHINE"],
        "title": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, fp32",
        "memory_gib": round(_memory(device, mesh.world_size) / 2**30, 1),
        "tflops": _short(flops / 1e12),
        "memory_gb_s": _short(_traffic(device, dtype) / 1e9),
        "per_node": mesh.world_size,
        "inside_gb_s": _short(_link(mesh, dtype) / 1e9),
    }
    row["across_gb_s"] = row["inside_gb_s"]
    row["host_gb_s"] = _short(_host(device) / 1e9)
    row["launch_us"] = _short(_launch(device) * 1e6)
    if device.type == "cpu":
        row |= {"fp32": 1.0, "host_memory_gb_s": row["memory_gb_s"]}
        row |= {"context_mib": 0, "group_mib": 0, "attention": ["cpu"], "half_width": 0, "synchronous": True}
    where = f"measured by `launch bench device` on {mesh.world_size} ranks"
    return {**row, **SHARES, "calibrated_on": where, "source": where}


def _products(device: torch.device, side: int, dtype: torch.dtype) -> float:
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _seconds(device, lambda: left @ right)


def _traffic(device: torch.device, dtype: torch.dtype) -> float:
    source = torch.ones(ELEMENTS[device.type], device=device, dtype=dtype)
    target = torch.empty_like(source)
    return 3 * source.nbytes / _seconds(device, lambda: torch.add(source, target, out=target))


def _link(mesh: Mesh, dtype: torch.dtype) -> float:
    """Return the bus bandwidth of an all-reduce in bytes/s; for a single rank, its memory bandwidth."""
    buffer = torch.zeros(ELEMENTS[mesh.device.type] // 4, device=mesh.device, dtype=dtype)
    if mesh.world_size == 1:
        return _traffic(mesh.device, dtype)
    seconds = _seconds(mesh.device, lambda: all_reduce(buffer, mesh.dp, "bench").wait())
    return 2 * (mesh.world_size - 1) / mesh.world_size * buffer.nbytes / seconds


def _host(device: torch.device) -> float:
    on_host = torch.ones(ELEMENTS[device.type], pin_memory=device.type == "cuda")
    there = torch.empty_like(on_host, device=device)
    return on_host.nbytes / _seconds(device, lambda: there.copy_(on_host, non_blocking=True))


def _launch(device: torch.device) -> float:
    """Return the seconds to launch an operation of a block, Python's part included: those of a Llama without work."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from launcher.plan.work import work_of

    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    config = AutoConfig.for_model("llama", num_hidden_layers=8, **size)
    model = AutoModelForCausalLM.from_config(config).to(device)
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    return _seconds(device, lambda: model(tokens, use_cache=False)) / work_of(config, 2).operations


def _memory(device: torch.device, ranks: int) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """Return the median seconds of several rounds, after one warmup round."""
    taken = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def _short(number: float) -> float:
    return float(f"{number:.4g}")


def main() -> None:
    init_distributed()
    row = measure(pick_device())
    if int(os.environ.get("RANK", "0")) == 0:
        Path(sys.argv[1]).write_text(json.dumps(row, indent=2) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
