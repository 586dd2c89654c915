"""Reads a Megatron-Core checkpoint under the parameter names of a Hugging Face model."""

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
from launcher.checkpoint.megatron.opened import MASTERS, WRITER, MegatronFiles, wrong
from launcher.checkpoint.names import COMMON_FILE, METADATA_FILE
from launcher.checkpoint.place_in_schedule import place_in_schedule
from launcher.checkpoint.reader import SafeReader, TensorLoadPlanner, common_volume, quietly
from launcher.checkpoint.slices import FlatSlice, fill
from launcher.checkpoint.source import STEP, SourceCheckpoint
from launcher.errors import CheckpointError
from launcher.models.build import build_on_meta, load_config
from launcher.models.names import ties_of
from launcher.models.settings import settings_of

logger = logging.getLogger("launcher")

_IN_16_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def open_megatron(directory: Path, model: str) -> SourceCheckpoint:
    """Open a checkpoint under the parameter names of a model.

    Args:
        model: as for `--model` of the recipes: a directory with config.json, or a name.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit the model.
    """
    made = build_on_meta(load_config(model))
    files, tensors = MegatronFiles.open(directory), tensors_of(made)
    _check_run(files, made.config)
    reader = _Reader(files, tensors)
    files.check_bytes()
    if left := files.unread():
        logger.warning("%s: not loaded: %s", directory, ", ".join(left))
    meta = _meta(files, reader.entries, tensors, ties_of(made), settings_of(made))
    return SourceCheckpoint(directory, directory.resolve().name, meta, reader.entries, reader.read)


class _Reader:
    """Reads parameters and their optimizer states from Megatron's tensors.

    Attributes:
        entries: launcher's name -> shape and dtype.
    """

    def __init__(self, files: MegatronFiles, tensors: list[MegatronTensor]) -> None:
        self._files, self._tensors = files, tensors
        self._layers = 1 + max((t.layer for t in tensors if t.layer is not None), default=-1)
        self._by_layer: dict[str, dict[int | None, list[Any]]] = {}
        self._of = {name: tensor for tensor in tensors for name in tensor.shapes}
        self._check()
        self.entries = self._entries()
        self._last: tuple[str, int | None, dict[str, Tensor]] | None = None

    def read(self, tensors: Mapping[str, Tensor | FlatSlice]) -> None:
        """Fill tensors that are given by launcher's names."""
        for name, tensor in tensors.items():
            if name.startswith(STEP):
                tensor.fill_(self._files.steps or 0.0)
                continue
            kind, _, parameter = name.removeprefix("optimizer/").partition("/")
            of = self._of[parameter]
            key = self._weights(of) if kind == "model" else self._key(kind, of)
            assert key is not None
            fill(tensor, self._parts(key, of)[parameter])

    def _keys(self, kind: str, tensor: MegatronTensor) -> list[str]:
        """Return the keys of a tensor, or of one of its states, under all of its names."""
        keys = self._files.keys.get(kind, {})
        names = (tensor.key(name, stacked=stacked) for stacked in (True, False) for name in tensor.names)
        return [keys[name] for name in names if name in keys]

    def _key(self, kind: str, tensor: MegatronTensor) -> str | None:
        """Return the first key under which the tensor is stored; None if there is none.

        Frozen parameters have no states, so their layers are missing in the stacked states.
        """
        return next((key for key in self._keys(kind, tensor) if self._has(key, tensor)), None)

    def _has(self, key: str, tensor: MegatronTensor) -> bool:
        """Return whether the stored chunks cover a tensor; raise an error if they cover only a part of it."""
        sizes, at = (1, *tensor.shape), (tensor.layer or 0, *[0] * len(tensor.shape))
        if not self._is_stacked(key, tensor):
            sizes, at = sizes[1:], at[1:]
        chunks = self._chunks(key).get(at[0] if self._is_stacked(key, tensor) else None, ())
        found = sum(common_volume(torch.Size(at), torch.Size(sizes), c.offsets, c.sizes) for c in chunks)
        twice = any(
            common_volume(one.offsets, one.sizes, other.offsets, other.sizes)
            for number, one in enumerate(chunks)
            for other in chunks[:number]
        )
        if twice or found not in (0, math.prod(sizes)):
            raise wrong(
                self._files.directory / METADATA_FILE,
                f"is damaged: the chunks of {tensor.key(key, stacked=False)} overlap or are incomplete",
            )
        return found > 0

    def _chunks(self, key: str) -> dict[int | None, list[Any]]:
        """Return {layer: stored chunks of a tensor}; the key None has all chunks."""
        if key not in self._by_layer:
            found: dict[int | None, list[Any]] = {None: list(self._files.entry(key).chunks)}
            for chunk in self._files.entry(key).chunks:
                for layer in (
                    range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) if chunk.offsets else ()
                ):
                    found.setdefault(layer, []).append(chunk)
            self._by_layer[key] = found
        return self._by_layer[key]

    def _weights(self, tensor: MegatronTensor) -> str | None:
        """Return the key of the weights, preferably of the fp32 master weights."""
        return next((key for kind in (*MASTERS, "model") if (key := self._key(kind, tensor))), None)

    def _is_stacked(self, key: str, tensor: MegatronTensor) -> bool:
        """Return whether the stored tensor is a stack of all layers."""
        names = (tensor.key(name, stacked=True) for name in tensor.names)
        return tensor.layer is not None and key.endswith(tuple(names))

    def _entries(self) -> dict[str, TensorStorageMetadata]:
        found: dict[str, TensorStorageMetadata] = {}
        for tensor in self._tensors:
            keys = {"model": self._weights(tensor)}
            states = {state: self._key(state, tensor) for state in self._files.states}
            lacking = [state for state, key in states.items() if key is None]
            if lacking and len(lacking) < len(states):
                what = f"{tensor.key(tensor.names[0], stacked=False)} has no {', '.join(lacking)}"
                raise wrong(self._files.directory / METADATA_FILE, f"is damaged: {what}")
            keys |= {f"optimizer/{state}": key for state, key in states.items()}
            for kind, key in keys.items():
                if key is not None:
                    dtype = self._files.entry(key).properties.dtype
                    found |= {f"{kind}/{name}": _entry(dtype, shape) for name, shape in tensor.shapes.items()}
        trained = {name.split("/", 2)[2] for name in found if name.startswith("optimizer/")}
        return found | {f"{STEP}{name}": _entry(torch.float32, ()) for name in sorted(trained)}

    def _parts(self, key: str, tensor: MegatronTensor) -> dict[str, Tensor]:
        """Return the parameters in a stored tensor. Cache the last result: q, k and v are read one by one."""
        if self._last is None or self._last[:2] != (key, tensor.layer):
            self._last = None  # so that two tensors are never in memory
            self._last = key, tensor.layer, tensor.parts(self._whole(key, tensor))
        return self._last[2]

    def _whole(self, key: str, tensor: MegatronTensor) -> Tensor:
        """Return a stored tensor, or one layer of it, without the padding of the vocabulary."""
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
        """Check that all parameters are stored, that shapes match, and that there are no other tensors."""
        problems, used = list[str](), set[str]()
        for tensor in self._tensors:
            name = tensor.key(tensor.names[0], stacked=False)
            if not self._keys("model", tensor):
                problems.append(f"{name} is missing")
            for kind in self._files.keys:
                for key in self._keys(kind, tensor):
                    used.add(key)
                    problems += self._odd_shape(name, key, tensor)
        every = {key for keys in self._files.keys.values() for key in keys.values()}
        problems += [f"{key} is not a tensor of the model" for key in sorted(every - used)]
        if problems:
            raise CheckpointError(
                f"{self._files.directory} does not match the model: {'; '.join(problems[:4])}"
                f"{'; ...' if len(problems) > 4 else ''}.",
                where=str(self._files.directory),
                fix="set --model to the model that was trained",
            )
        for tensor in self._tensors:
            if self._key("model", tensor) is None:
                what = f"is damaged: {tensor.key(tensor.names[0], stacked=False)} is in none of the files"
                raise wrong(self._files.directory / METADATA_FILE, what)

    def _odd_shape(self, name: str, key: str, tensor: MegatronTensor) -> list[str]:
        size, wanted = tuple(self._files.entry(key).size), tensor.shape
        if self._is_stacked(key, tensor):
            wanted = (self._layers, *wanted)
        # Megatron pads the vocabulary so that all ranks have the same number of rows.
        padded = tensor.layer is None and size[1:] == wanted[1:] and size[0] > wanted[0]
        return [] if size == wanted or padded else [f"{name} has shape {list(size)}, expected {list(wanted)}"]


def _check_run(files: MegatronFiles, config: Any) -> None:
    """Check that the model computes the same as the run's model, as far as the run's arguments specify it.

    The rows of q, k and v are ordered by head: with other heads they would be mixed up silently.
    """
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    rotary = getattr(config, "rope_parameters", None) or {}
    mine = {
        "num_attention_heads": heads,
        "num_query_groups": groups if files.args.get("group_query_attention") else None,
        "kv_channels": getattr(config, "head_dim", None) or int(config.hidden_size) // heads,
        "swiglu": config.model_type != "gpt2",
        "norm_epsilon": getattr(config, "rms_norm_eps", None) or getattr(config, "layer_norm_epsilon", None),
        "rotary_base": rotary.get("rope_theta"),
        "apply_layernorm_1p": False,
        "rotary_interleaved": False,
    }
    said = {key: files.args.get(key) for key in mine}
    if not files.args.get("group_query_attention") and files.args and groups != heads:
        said["num_query_groups"], mine["num_query_groups"] = said["num_attention_heads"], groups
    other = [
        f"{key} {theirs}, not {mine[key]}"
        for key, theirs in said.items()
        if theirs is not None and mine[key] is not None and float(theirs) != float(mine[key])
    ]
    if other:
        raise CheckpointError(
            f"{files.directory} is a checkpoint of another model than --model: its run had {'; '.join(other)}.",
            where=str(files.directory / COMMON_FILE),
            fix="set --model to the model that was trained, with a matching config.json",
        )


def _meta(
    files: MegatronFiles,
    entries: Mapping[str, Any],
    tensors: list[MegatronTensor],
    ties: dict[str, str],
    settings: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the meta in the form of launcher's own."""
    trained = {name.split("/", 2)[2] for name in entries if name.startswith("optimizer/")}
    groups = [[name for name in group if name in trained] for group in _groups(files.options, tensors)]
    batch, micro = (files.args.get(key) for key in ("global_batch_size", "micro_batch_size"))
    options, states = files.options, frozenset(files.states)
    kinds = {files.entry(key).properties.dtype for key in files.keys["model"].values()}
    config: dict[str, Any] = {key: {"enabled": True} for key, dtype in _IN_16_BITS.items() if dtype in kinds}
    if isinstance(batch, int) and isinstance(micro, int):
        config |= {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}
    scale = files.loss_scale
    loss_scale = {"dynamic": scale is not None, "scale": scale or 1.0, "tolerance": 1, "step": 0}
    loss_scale["last_overflow"] = -1
    optimizer = {
        "type": types_of(states, {}),
        "param_groups": [{key: group[key] for key in OPTIONS if key in group} for group in options],
        "names": groups,
    }
    return {
        "global_steps": files.iteration, "global_samples": int(files.args.get("consumed_train_samples") or 0),
        "micro_steps": files.iteration, "skipped_steps": 0, "loss_scale": loss_scale,
        "scheduler": place_in_schedule(files.iteration),
        "optimizer": optimizer if files.options and states else None,
        "world_size": int(files.args.get("data_parallel_size") or 1), "writer": WRITER, "config": config,
        "model": settings, "tied": ties, "client_state": {},
    }  # fmt: skip


def _groups(options: list[dict[str, Any]], tensors: list[MegatronTensor]) -> list[list[str]]:
    """Return the names of the parameters of each param group.

    Megatron stores no names. It groups parameters by weight decay (none on biases and vectors), by expert
    parallelism, and by a separate learning rate for embeddings and head.
    """
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
