"""Write the results of the stages to results.json and report.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.ranks import DEVICE
from launcher.monitor.devices import peak_flops

_TEST = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL) (tests/.+?)(?: \([^()]*\))?$")
MIB = 2**20


def write(out: Path, codes: dict[str, int]) -> int:
    """Write both files; return 1 if something failed."""
    found = {
        "device": name(),
        "versions": versions(),
        "codes": codes,
        **{stage: _lines(out / f"{stage}.log") for stage in ("smoke", "memory", "speed")},
        "parity": _tests(out / "parity.log"),
    }
    (out / "results.json").write_text(json.dumps(found, indent=1))
    text = "\n".join(page(found)) + "\n"
    (out / "report.md").write_text(text)
    print(text)
    return int(any(codes.values()))


def name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"


def versions() -> dict[str, str]:
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": str(torch.version.cuda),
    }


def page(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of report.md."""
    said = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    yield f"# {found['device']}: {said}\n"
    yield f"Exit codes (124: the time was up): {found['codes']}\n"
    if found["smoke"]:
        wrong = [row for row in found["smoke"] if row["code"]]
        yield f"Commands: {len(found['smoke']) - len(wrong)} of {len(found['smoke'])} trained.\n"
        for row in wrong:
            yield f"- {row['config']}: {row['failed'].strip().splitlines()[-1][:200]}"
    tests = found["parity"]
    if tests["counts"]:
        yield f"Tests: {tests['counts']}\n"
    if found["memory"]:
        yield from _memory(found["memory"])
    if found["speed"]:
        yield from _speed(found["speed"], found["device"])


def _memory(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| way | ranks | peak, estimated | measured | off by | between steps, off by | on the card |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        if "failed" in row:
            yield f"| {row['mode']} | {row['ranks']} | {row['failed'].strip().splitlines()[-1][:120]} | | | | |"
            continue
        if "peak" not in row["found"][0]:
            continue
        each = max(row["found"], key=lambda rank: abs(rank["estimated"] / rank["peak"] - 1))
        yield (
            f"| {row['mode']} | {row['ranks']} | {each['estimated'] / MIB:,.0f} | {each['peak'] / MIB:,.0f} | "
            f"{each['estimated'] / each['peak'] - 1:+.1%} | "
            f"{each['estimated_between'] / each['between'] - 1:+.1%} | {each['card'] / MIB:,.0f} |"
        )
    yield ""


def _speed(rows: list[dict[str, Any]], device: str) -> Iterator[str]:
    most = peak_flops(device)
    yield "| row | shape | s a step | spread | tokens/s | TFLOP/s | MFU | peak, MiB | loss |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        if "failed" in row:
            yield f"| {row['row']} | {row['shape']} | {row['failed'].strip().splitlines()[-1][:120]} | | | | | | |"
            continue
        share = f"{row['tflops'] * 1e12 / most:.1%}" if most else ""
        yield (
            f"| {row['row']} | {row['shape']} | {row['seconds']:.3f} | {row['spread']:.3f} | "
            f"{row['tokens_per_s']:,.0f} | {row['tflops']:.1f} | {share} | {row.get('peak', 0) / MIB:,.0f} | "
            f"{row['loss']:.4f} |"
        )
    yield ""


def _lines(log: Path) -> list[dict[str, Any]]:
    if not log.exists():
        return []
    return [
        json.loads(line)
        for line in log.read_text().splitlines()
        if line.startswith("{") and line.endswith("}")
    ]


def _tests(log: Path) -> dict[str, Any]:
    """Parse the results of tests from pytest's output."""
    if not log.exists():
        return {"counts": {}, "failed": []}
    ends: dict[str, str] = {}
    for line in log.read_text(errors="replace").splitlines():
        if match := _TEST.match(line.rstrip()):
            ends.setdefault(match[2], match[1])
    failed = sorted(test for test, end in ends.items() if end in ("FAILED", "ERROR"))
    return {"counts": dict(Counter(ends.values())), "failed": failed}
