"""A checkpoint of Megatron-Core under the names of a Hugging Face model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from launcher.checkpoint.deepspeed.meta import OPTIONS, types_of
from launcher.checkpoint.megatron.names import MegatronTensor, tensors_of
from launcher.checkpoint.megatron.opened import MASTERS, WRITER, MegatronFiles
from launcher.checkpoint.names import COMMON_FILE
from launcher.checkpoint.reader import SafeReader, TensorLoadPlanner, quietly
from launcher.checkpoint.slices import FlatSlice
from launcher.checkpoint.source import STEP, SourceCheckpoint
from launcher.errors import CheckpointError
from launcher.models.build import build_on_meta, load_config

logger = logging.getLogger("launcher")

_IN_16_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def open_megatron(directory: Path, model: str) -> SourceCheckpoint:
    """Open a checkpoint under the names of a model.

    Args:
        model: as `--model` of the recipes: a directory with config.json, or a name.

    Raises:
        CheckpointError: it is damaged, or not of such a model.
    """
    made = build_on_meta(load_config(model))
    files, tensors = MegatronFiles.open(directory), tensors_of(made)
    _check_heads(files, made.config)
    reader = _Reader(files, tensors)
    files.check_bytes()
    if left := files.unread():
        logger.warning("of %s this is not read: %s", directory, ", ".join(left))
    return SourceCheckpoint(
        directory, directory.resolve().name, _meta(files, tensors), reader.entries, reader.read
    )


class _Reader:
    """Reads parameters and their states out of Megatron's tensors.

    Attributes:
        entries: launcher's name -> shape and dtype.
    """

    def __init__(self, files: MegatronFiles, tensors: list[MegatronTensor]) -> None:
        self._files, self._tensors = files, tensors
        self._layers = 1 + max((t.layer for t in tensors if t.layer is not None), default=-1)
        self._of = {name: tensor for tensor in tensors for name in tensor.shapes}
        self._check()
        self.entries = self._entries()
        self._last: tuple[str, int | None, dict[str, Tensor]] | None = None

    def read(self, tensors: Mapping[str, Tensor | FlatSlice]) -> None:
        """Fill whole tensors by launcher's names."""
        for name, tensor in tensors.items():
            assert isinstance(tensor, Tensor) and not isinstance(tensor, FlatSlice)
            if name.startswith(STEP):
                tensor.fill_(self._files.steps or 0.0)
                continue
            kind, _, parameter = name.removeprefix("optimizer/").partition("/")
            of = self._of[parameter]
            key = self._weights(of) if kind == "model" else self._key(kind, of)
            assert key is not None
            tensor.copy_(self._parts(key, of)[parameter])

    def _keys(self, kind: str, tensor: MegatronTensor) -> list[str]:
        """Return the keys of a tensor, or of its state, under all of its names."""
        keys = self._files.keys.get(kind, {})
        names = (tensor.key(name, stacked=stacked) for stacked in (True, False) for name in tensor.names)
        return [keys[name] for name in names if name in keys]

    def _key(self, kind: str, tensor: MegatronTensor) -> str | None:
        """Return the key that counts; None: there is none."""
        return next(iter(self._keys(kind, tensor)), None)

    def _weights(self, tensor: MegatronTensor) -> str | None:
        """Return the key of the weights: in fp32, where they are there in fp32."""
        return next((key for kind in (*MASTERS, "model") if (key := self._key(kind, tensor))), None)

    def _is_stacked(self, key: str, tensor: MegatronTensor) -> bool:
        """Return whether the stored tensor has all layers."""
        names = (tensor.key(name, stacked=True) for name in tensor.names)
        return tensor.layer is not None and key.endswith(tuple(names))

    def _entries(self) -> dict[str, TensorStorageMetadata]:
        found: dict[str, TensorStorageMetadata] = {}
        for tensor in self._tensors:
            keys = {"model": self._weights(tensor)}
            keys |= {f"optimizer/{state}": self._key(state, tensor) for state in self._files.states}
            for kind, key in keys.items():
                if key is not None:
                    dtype = self._files.entry(key).properties.dtype
                    found |= {f"{kind}/{name}": _entry(dtype, shape) for name, shape in tensor.shapes.items()}
        trained = {name.split("/", 2)[2] for name in found if name.startswith("optimizer/")}
        return found | {f"{STEP}{name}": _entry(torch.float32, ()) for name in sorted(trained)}

    def _parts(self, key: str, tensor: MegatronTensor) -> dict[str, Tensor]:
        """Return the parameters in a stored tensor. The last one is kept: q, k and v are asked for one by one."""
        if self._last is None or self._last[:2] != (key, tensor.layer):
            self._last = None  # so that two are never in memory
            self._last = key, tensor.layer, tensor.parts(self._whole(key, tensor))
        return self._last[2]

    def _whole(self, key: str, tensor: MegatronTensor) -> Tensor:
        """Return a stored tensor, or its part of one layer, without what the vocabulary is padded by."""
        entry, count = self._files.entry(key), math.prod(tensor.shape)
        start = tensor.layer * count if tensor.layer is not None and self._is_stacked(key, tensor) else 0
        made = torch.empty(count, dtype=entry.properties.dtype)
        wanted = {key: FlatSlice(made, tuple(entry.size), start, start + count)}
        quietly(
            lambda: dcp.load(
                wanted,
                storage_reader=SafeReader(self._files.directory, self._files.tensors),
                planner=TensorLoadPlanner(flatten_state_dict=False),
                no_dist=True,
            )
        )
        return made.view(tensor.shape)

    def _check(self) -> None:
        """Check that every parameter and its states are there in their shapes, and that nothing is left over."""
        problems, used = list[str](), set[str]()
        for tensor in self._tensors:
            name = tensor.key(tensor.names[0], stacked=False)
            if self._key("model", tensor) is None:
                problems.append(f"{name} is not there")
            for kind in self._files.keys:
                for key in self._keys(kind, tensor):
                    used.add(key)
                    problems += self._odd_shape(name, key, tensor)
        every = {key for keys in self._files.keys.values() for key in keys.values()}
        problems += [f"{key} is none of the model's" for key in sorted(every - used)]
        if problems:
            raise CheckpointError(
                f"{self._files.directory} is not a checkpoint of such a model: {'; '.join(problems[:4])}"
                f"{'; ...' if len(problems) > 4 else ''}.",
                where=str(self._files.directory),
                fix="name the model that was trained",
            )

    def _odd_shape(self, name: str, key: str, tensor: MegatronTensor) -> list[str]:
        size, wanted = tuple(self._files.entry(key).size), tensor.shape
        if self._is_stacked(key, tensor):
            wanted = (self._layers, *wanted)
        # Megatron pads the vocabulary so that all ranks have equally many rows.
        padded = tensor.layer is None and size[1:] == wanted[1:] and size[0] > wanted[0]
        return [] if size == wanted or padded else [f"{name} has the shape {list(size)}, not {list(wanted)}"]


def _check_heads(files: MegatronFiles, config: Any) -> None:
    """Check that the model has the heads of the run. The rows of q, k and v lie by them, and with others they would be
    mixed up without a word."""
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    theirs = files.args.get("num_attention_heads", heads)
    theirs_groups = files.args.get("num_query_groups") if files.args.get("group_query_attention") else theirs
    if files.args and (theirs, theirs_groups) != (heads, groups):
        raise CheckpointError(
            f"{files.directory} is of a model with {theirs} heads and {theirs_groups} of keys and values; the model "
            f"named has {heads} and {groups}.",
            where=str(files.directory / COMMON_FILE),
            fix="name the model that was trained",
        )


def _meta(files: MegatronFiles, tensors: list[MegatronTensor]) -> dict[str, Any]:
    """Return the meta, as launcher's own has it."""
    options, states = files.options, frozenset(files.states)
    kinds = {files.entry(key).properties.dtype for key in files.keys["model"].values()}
    config = {key: {"enabled": True} for key, dtype in _IN_16_BITS.items() if dtype in kinds}
    optimizer = {
        "type": types_of(states, {}),
        "param_groups": [{key: group[key] for key in OPTIONS if key in group} for group in options],
        "names": _groups(options, tensors),
    }
    return {
        "global_steps": files.iteration, "global_samples": int(files.args.get("consumed_train_samples") or 0),
        "micro_steps": files.iteration, "skipped_steps": 0,
        "loss_scale": {"dynamic": False, "scale": 1.0, "tolerance": 1, "step": 0, "last_overflow": -1},
        "scheduler": None, "optimizer": optimizer if options and states else None,
        "world_size": int(files.args.get("data_parallel_size") or 1), "writer": WRITER, "config": config, "model": None,
        "tied": {}, "client_state": {},
    }  # fmt: skip


def _groups(options: list[dict[str, Any]], tensors: list[MegatronTensor]) -> list[list[str]]:
    """Return the names of the parameters of each param group. Megatron keeps no names: it divides by weight decay (none
    on biases and vectors), experts spread over ranks, and a rate of its own for embeddings and head."""
    names: list[list[str]] = [[] for _ in options]
    for tensor in tensors:
        for name, shape in tensor.shapes.items():
            said = {
                "is_expert_parallel": ".experts." in tensor.names[0],
                "is_decoupled_lr": tensor.names[0].startswith(("embedding.word", "output_layer")),
                "wd_mult": len(shape) > 1 and not name.endswith(".bias"),
            }
            fitting = list(range(len(options)))
            for key, value in said.items():
                same = [number for number in fitting if bool(options[number].get(key, value)) == value]
                fitting = same or fitting
            if fitting:
                names[fitting[0]].append(name)
    return names


def _entry(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
