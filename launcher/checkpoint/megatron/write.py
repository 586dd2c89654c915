"""Writes a checkpoint in Megatron-Core's torch_dist format, layer by layer.

Megatron's distributed, float16 and fp32 optimizers read the same values under different names. All names are
written, and those with the same values point to the same bytes.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from launcher.checkpoint.deepspeed.write import new_directory
from launcher.checkpoint.durable import DurableFile, write_durably
from launcher.checkpoint.hub_model import check_model
from launcher.checkpoint.megatron.common import common_of
from launcher.checkpoint.megatron.names import LAYERS, MegatronTensor, tensors_of
from launcher.checkpoint.names import BACKEND_FILE, COMMON_FILE, ITERATION_FILE, LATEST_FILE, METADATA_FILE
from launcher.checkpoint.source import SourceCheckpoint
from launcher.errors import CheckpointError
from launcher.models.build import build_on_meta, load_config

FILE = "__0_0.distcp"
MASTERS = ("optimizer.state.param.", "optimizer.state.fp32_param.")
_STATELESS = tuple(
    f"{LAYERS}{name}._extra_state"
    for name in (
        *("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"),
        *("mlp.linear_fc1", "mlp.linear_fc2"),
    )
)
"""Objects that Transformer Engine saves for fp8, and that Megatron requires on loading."""
_EXPERTS = tuple(f"{LAYERS}mlp.experts.experts.linear_fc{n}._extra_state" for n in (1, 2))


def write_megatron(stored: SourceCheckpoint, model: str, out: Path) -> Path:
    """Write a checkpoint for Megatron-Core's `dist_checkpointing.load`; return its directory.

    Args:
        model: the model that was trained: a directory with config.json, or a name.

    Raises:
        CheckpointError: Megatron does not support the model or its optimizer, or `out` has a checkpoint of
            that step.
    """
    made = build_on_meta(load_config(model))
    tensors = tensors_of(made)
    check_model(stored, made, model)
    _check_layers(stored, tensors)
    _check_optimizer(stored)
    step = int(stored.meta["global_steps"])
    if (out / LATEST_FILE).exists() or (out / ITERATION_FILE).is_dir():
        raise CheckpointError(
            f"{out} has checkpoints of another program.",
            where=str(out),
            fix="choose another output directory",
        )
    with new_directory(out, f"iter_{step:07d}") as directory:
        writer = _Writer(directory / FILE, stored, made.config)
        with DurableFile(directory / FILE) as file:
            for tensor in tensors:
                writer.write(file, tensor)
            writer.write_stateless(file)
            file.finish()
        (directory / METADATA_FILE).write_bytes(pickle.dumps(writer.metadata))
        torch.save(common_of(stored, step, made.config), directory / COMMON_FILE)
        backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        backends |= {"common_backend": "torch", "common_backend_version": 1}
        (directory / BACKEND_FILE).write_text(json.dumps(backends))
    write_durably(out / ITERATION_FILE, str(step))
    return out / f"iter_{step:07d}"


class _Writer:
    """Writes tensors to one file and records their locations."""

    def __init__(self, path: Path, stored: SourceCheckpoint, config: Any) -> None:
        self.metadata = Metadata({}, planner_data=None, storage_data={})
        self._file, self._stored = path.name, stored
        self._layers, self._experts = int(config.num_hidden_layers), _experts_of(config)

    def write(self, file: Any, tensor: MegatronTensor) -> None:
        """Write a tensor and its states."""
        own = self._stored.dtype_of(next(iter(tensor.shapes)), self._stored.dtype)
        place = self._put(file, tensor, self._joined("model", tensor, own), [""])
        states = [
            s for s in self._stored.states if f"{s}/{next(iter(tensor.shapes))}" in self._stored.entries
        ]
        if not states:
            return
        if own == torch.float32:
            self._note(tensor, own, list(MASTERS), place)
        else:
            self._put(file, tensor, self._joined("model", tensor, torch.float32), list(MASTERS))
        for state in states:
            self._put(
                file,
                tensor,
                self._joined(state, tensor, torch.float32),
                [f"optimizer.state.{state.removeprefix('optimizer/')}."],
            )

    def write_stateless(self, file: Any) -> None:
        """Write the empty objects that Megatron requires on loading; all point to the same bytes."""
        empty = io.BytesIO()
        torch.save([None], empty)  # one object: None
        place = _StorageInfo(self._file, file.tell(), file.write(empty.getvalue()))
        for layer in range(self._layers):
            names = [f"{name}/shard_{layer}_{self._layers}" for name in _STATELESS]
            for expert in range(self._experts):
                shard = f"shard_{layer}.{expert}_{self._layers}.{self._experts}"
                names += [f"{name}/{shard}" for name in _EXPERTS]
            for name in names:
                self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
                self.metadata.storage_data[MetadataIndex(name)] = place

    def _joined(self, kind: str, tensor: MegatronTensor, dtype: torch.dtype) -> Tensor:
        return tensor.joined([self._stored.tensor(f"{kind}/{name}", dtype) for name in tensor.shapes])

    def _put(self, file: Any, tensor: MegatronTensor, values: Tensor, prefixes: list[str]) -> _StorageInfo:
        start = file.tell()
        # Saved as one layer of a stack: torch.distributed.checkpoint records the shape of the stack.
        torch.save(values if tensor.layer is None else values.unsqueeze(0), file)
        place = _StorageInfo(self._file, start, file.tell() - start)
        self._note(tensor, values.dtype, prefixes, place)
        return place

    def _note(
        self, tensor: MegatronTensor, dtype: torch.dtype, prefixes: list[str], place: _StorageInfo
    ) -> None:
        for prefix in prefixes:
            for name in tensor.names:
                self._note_one(f"{prefix}{tensor.key(name, stacked=True)}", tensor, dtype, place)

    def _note_one(self, key: str, tensor: MegatronTensor, dtype: torch.dtype, place: _StorageInfo) -> None:
        stack = () if tensor.layer is None else (self._layers,)
        size = torch.Size((*stack, *tensor.shape))
        offsets = torch.Size(((tensor.layer or 0) if stack else 0, *([0] * (len(size) - 1))))
        chunk = ChunkStorageMetadata(offsets, torch.Size((*((1,) if stack else ()), *tensor.shape)))
        entry = self.metadata.state_dict_metadata.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=dtype), size, [])
        )
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(chunk)
        self.metadata.storage_data[MetadataIndex(key, offsets)] = place


def _check_optimizer(stored: SourceCheckpoint) -> None:
    """Check that the optimizer has no state, or the states of Megatron's Adam."""
    adam = {"optimizer/exp_avg", "optimizer/exp_avg_sq"}
    if set(stored.states) not in (set(), adam):
        raise CheckpointError(
            f"The optimizer of {stored.path} has the states {', '.join(_bare(stored.states))}; Megatron's Adam has "
            f"{', '.join(_bare(adam))}.",
            where=str(stored.path),
            fix="export only the weights: --format hf",
        )


def _check_layers(stored: SourceCheckpoint, tensors: list[MegatronTensor]) -> None:
    """Check that all layers have the same tensors, and that none of Megatron's tensors is partly frozen."""
    by_layer: dict[int | None, set[tuple[str, ...]]] = {}
    for tensor in tensors:
        by_layer.setdefault(tensor.layer, set()).add(tensor.names)
        trained = [f"{state}/{name}" in stored.entries for state in stored.states for name in tensor.shapes]
        if any(trained) and not all(trained):
            raise CheckpointError(
                f"Some of {', '.join(tensor.shapes)} are frozen and some are trained; Megatron stores them in one "
                "tensor.",
                where=str(stored.path),
                fix="export only the weights: --format hf",
            )
    if len({frozenset(names) for layer, names in by_layer.items() if layer is not None}) > 1:
        raise CheckpointError(
            "The layers of the model differ (some have experts); only models with identical layers are supported.",
            where=str(stored.path),
            fix="export only the weights: --format hf",
        )


def not_written(stored: SourceCheckpoint) -> Iterator[str]:
    """Yield messages about state that is changed or not written."""
    if stored.options:
        yield "not written: scheduler state; start Megatron-LM with --override-opt_param-scheduler and your schedule"
    yield "not written: RNG states"
    if stored.dtype == torch.float16:
        yield "not written: loss scale"
    if stored.options and not stored.states:
        yield "not written: optimizer state; the optimizer is not Adam or has not stepped yet"
    vectors = [
        name
        for options, names in zip(stored.options, stored.groups, strict=True)
        for name in names
        if options.get("weight_decay") and len(stored.shapes[name]) < 2
    ]
    if vectors:
        yield f"changed: {len(vectors)} biases and norms had weight decay in this run; Megatron-Core excludes them"
    if len(set(stored.steps.values())) > 1:
        yield "changed: the parameters have different step counts; Megatron has only one, which is set to the largest"
    more = [{key: options.get(key) for key in ("betas", "eps")} for options in stored.options]
    if any(one != more[0] for one in more):
        yield "changed: Megatron has only one pair of betas and one eps, which are set to those of the first group"
    rates = {float(options["lr"]) for options in stored.options if "lr" in options}
    decays = {float(options.get("weight_decay", 0.0)) for options in stored.options} - {0.0}
    if len(rates) > 1 or len(decays) > 1:
        yield (
            "changed: Megatron has only one learning rate and one weight decay, which are set to the first learning "
            "rate and the largest weight decay"
        )


def _bare(states: Any) -> list[str]:
    return sorted(state.removeprefix("optimizer/") for state in states)


def _experts_of(config: Any) -> int:
    names = ("num_local_experts", "num_experts")
    return int(next((getattr(config, name) for name in names if getattr(config, name, None)), 0))
