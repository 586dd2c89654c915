"""Describes the checkpoints in a directory, as text or as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launcher.checkpoint import formats, store, tags
from launcher.checkpoint.megatron.opened import WRITER, MegatronFiles, directory_of
from launcher.checkpoint.names import TORCHTITAN, is_megatron
from launcher.checkpoint.place_in_schedule import steps_in_schedule
from launcher.checkpoint.reader import read_metadata
from launcher.comm.plain import decode

KINDS = {"model": "parameters", "buffer": "buffers", "optimizer": "optimizer states"}


@dataclass(frozen=True)
class Inspected:
    """Description of one checkpoint.

    Args:
        path: directory of the tag.
        kind: the program that wrote it, and its format.
        meta: in the form of launcher's own meta.json.
        tensors: name in the checkpoint -> (shape, dtype).
        disk_bytes: size of its files.
        verified: whether the checksums have been verified.
        others: other tags in the directory.
    """

    path: Path
    kind: str
    meta: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], str]]
    disk_bytes: int
    verified: bool
    others: list[str]

    def counted(self) -> dict[str, tuple[int, int]]:
        """Return {kind of tensors: (number of tensors, number of elements)}."""
        found: dict[str, tuple[int, int]] = {}
        for name, (shape, _) in self.tensors.items():
            kind = KINDS.get(name.partition("/")[0])
            if kind is not None:
                number, elements = found.get(kind, (0, 0))
                found[kind] = number + 1, elements + math.prod(shape)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        keys = (
            "global_steps",
            "global_samples",
            "skipped_steps",
            "world_size",
            "optimizer",
            "scheduler",
            "tied",
        )
        return {
            "path": str(self.path),
            "format": self.kind,
            **{key: self.meta.get(key) for key in keys},
            "client_state": sorted(self.meta.get("client_state") or {}),
            "disk_bytes": self.disk_bytes,
            "checksums_verified": self.verified,
            "tensors": {
                name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in self.tensors.items()
            },
        }

    def lines(self, *, tensors: bool) -> list[str]:
        """Return the description as lines of text; with `tensors`, list every tensor."""
        meta = self.meta
        rows = [
            ("step", f"{meta.get('global_steps')}, after {meta.get('global_samples')} samples"),
            ("skipped steps", str(meta.get("skipped_steps") or "")),
            ("data-parallel ranks" if "writer" in meta else "ranks", str(meta.get("world_size"))),
            ("ZeRO stage", str(((meta.get("config") or {}).get("zero_optimization") or {}).get("stage", ""))),
            *(
                (kind, f"{n} tensors, {size:,} elements{self._dtypes(kind)}")
                for kind, (n, size) in self.counted().items()
            ),
            *(("optimizer" if number == 0 else "", line) for number, line in enumerate(self._optimizer())),
            ("schedule", _iteration(meta.get("scheduler"))),
            ("tied", ", ".join(f"{one} = {other}" for one, other in (meta.get("tied") or {}).items())),
            ("client state", ", ".join(sorted(meta.get("client_state") or {}))),
            ("bytes on disk", f"{self.disk_bytes:,}"),
            (
                "checksums",
                self._checksums(),
            ),
            ("other tags", ", ".join(self.others)),
            ("import with", f"launch import {self.path} OUT --model M" if self._is_imported else ""),
        ]
        told = [f"{self.path}: {self.kind}", *(f"  {label:<24} {text}" for label, text in rows if text)]
        if tensors:
            width = max(map(len, self.tensors), default=0)
            told.append("")
            told += [
                f"{name:<{width}}  {dtype:<9} {list(shape)}" for name, (shape, dtype) in self.tensors.items()
            ]
        return told

    @property
    def _is_imported(self) -> bool:
        return self.meta.get("writer") in (WRITER, TORCHTITAN)

    def _checksums(self) -> str:
        if not self.verified:
            return "not verified (use --verify)"
        without = " (DeepSpeed's swap files have no checksums)" if any(self.path.rglob("*.swp")) else ""
        return f"verified: no file is damaged{without}"

    def _dtypes(self, kind: str) -> str:
        found = Counter(
            dtype for name, (_, dtype) in self.tensors.items() if KINDS.get(name.partition("/")[0]) == kind
        )
        return f", {' and '.join(found)}"

    def _optimizer(self) -> list[str]:
        optimizer = self.meta.get("optimizer")
        if not optimizer:
            return ["none"]
        kind = optimizer.get("type")
        groups = optimizer["param_groups"]
        lines = [" or ".join(kind) if isinstance(kind, list) else str(kind)]
        for number, group in enumerate(groups):
            rate, decay = (_number(group.get(key, 0)) for key in ("lr", "weight_decay"))
            said = f"lr {rate}, weight decay {decay}, " if "lr" in group else ""
            count = f"{len(optimizer['names'][number])} parameters" if "names" in optimizer else ""
            lines.append(f"group {number}: {said}{count}".rstrip(" ,"))
        return lines


def inspect(directory: Path, tag: str | None, *, verify: bool) -> Inspected:
    """Describe a checkpoint.

    Raises:
        CheckpointError: the checkpoint does not exist, or one of its files is damaged.
    """
    if (megatron := directory_of(directory, tag)) is not None:
        return _of_megatron(megatron, verify=verify)
    tag, meta = store.load_meta(directory, tag)
    path = tags.tag_path(directory, tag)
    if verify:
        formats.check_bytes(path, 0, 1)
    entries = read_metadata(path).state_dict_metadata
    found = Inspected(
        path,
        _kind(path, meta),
        {key: decode(value) for key, value in meta.items()},
        _shapes(entries),
        _size(path),
        verify,
        [other for other in tags.list_tags(directory) if other != tag],
    )
    formats.close(path)
    return found


def _of_megatron(path: Path, *, verify: bool) -> Inspected:
    """Describe a Megatron-Core checkpoint, under Megatron's own parameter names."""
    files = MegatronFiles.open(path)
    if verify:
        files.check_bytes()
    entries: dict[str, TensorStorageMetadata] = {}
    for kind, keys in files.keys.items():
        of = "model" if kind == "model" else "optimizer"
        entries |= {f"{of}/{key}": files.entry(key) for key in keys.values()}
    samples = files.args.get("consumed_train_samples", 0)
    meta = {
        "global_steps": files.iteration,
        "global_samples": samples,
        "world_size": files.args.get("data_parallel_size", "not recorded"),
        "optimizer": {"type": "Adam", "param_groups": files.options} if files.options else None,
        "writer": WRITER,
    }
    others = [p.name for p in sorted(path.parent.glob("iter_*")) if p.name != path.name and is_megatron(p)]
    return Inspected(path, _kind(path, meta), meta, _shapes(entries), _size(path), verify, others)


def _shapes(entries: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        name: (tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _size(path: Path) -> int:
    """Return the total size of the files in a directory, in bytes."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _kind(path: Path, meta: dict[str, Any]) -> str:
    if "writer" not in meta:
        return "a launcher checkpoint"
    layout = ", in its universal layout" if (path / "zero").is_dir() else ""
    return f"a checkpoint of {meta['writer']}{layout}"


def _iteration(schedule: Any) -> str:
    at = schedule.get("last_batch_iteration") if isinstance(schedule, dict) else None
    if (steps := steps_in_schedule(schedule)) is not None:
        return f"scheduler state not saved; the schedule resumes at step {steps}"
    return "" if schedule is None else "scheduler state saved" if at is None else f"at iteration {at}"
