"""A uniform view of any program's checkpoint, for conversion to other formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launcher.checkpoint import formats, store, tags
from launcher.checkpoint.place_in_schedule import steps_in_schedule
from launcher.checkpoint.reader import read_metadata
from launcher.checkpoint.slices import FlatSlice
from launcher.comm.plain import decode
from launcher.errors import CheckpointError

STEP = "scalar/step/"


class SourceCheckpoint:
    """The content of a checkpoint.

    Args:
        path: directory of the checkpoint.
        tag: its tag as a launcher checkpoint.
        meta: in the form that the engine writes.
        entries: name in the checkpoint -> shape and dtype of the tensor.
        read: fills tensors that are given by these names.

    Attributes:
        shapes: parameter name -> shape, each tied parameter once.
        states: kinds of optimizer state, such as "optimizer/exp_avg".
        steps: parameter name -> step count.
    """

    def __init__(
        self,
        path: Path,
        tag: str,
        meta: dict[str, Any],
        entries: dict[str, TensorStorageMetadata],
        read: Callable[[Mapping[str, Tensor | FlatSlice]], None],
    ) -> None:
        self.path, self.directory = path, path.parent
        self.tag, self.meta, self.entries, self._read = tag, meta, entries, read
        self.shapes = {
            name.removeprefix("model/"): tuple(entry.size)
            for name, entry in self.entries.items()
            if name.startswith("model/")
        }
        kinds = [name.split("/", 2)[:2] for name in self.entries if name.startswith("optimizer/")]
        self.states = sorted({"/".join(kind) for kind in kinds})
        counts = {name: torch.zeros(()) for name in self.entries if name.startswith(STEP)}
        self.load(counts)
        self.steps = {name.removeprefix(STEP): float(count) for name, count in counts.items()}

    @classmethod
    def open(cls, directory: Path, tag: str | None = None) -> SourceCheckpoint:
        """Open a checkpoint that launcher can load. Its checksums are verified once.

        Args:
            tag: default: the latest.

        Raises:
            CheckpointError: the checkpoint does not exist or is damaged.
        """
        tag, meta = store.load_meta(directory, tag)
        path = tags.tag_path(directory, tag)
        formats.check_bytes(path, 0, 1)
        metadata = read_metadata(path)
        entries = metadata.state_dict_metadata.items()
        kept = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        meta = {key: decode(value) for key, value in meta.items()}
        return cls(path, tag, meta, kept, store.reading(path, metadata))

    def load(self, tensors: Mapping[str, Tensor | FlatSlice]) -> None:
        """Fill tensors by their names in the checkpoint; tensors that it does not contain stay unchanged."""
        wanted = {name: tensor for name, tensor in tensors.items() if name in self.entries}
        if wanted:
            self._read(wanted)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return an unsharded tensor, by its name in the checkpoint.

        Args:
            dtype: None: the stored dtype.
        """
        entry = self.entries[name]
        made = torch.empty(entry.size, dtype=dtype or entry.properties.dtype)
        self.load({name: made})
        return made

    @cached_property
    def groups(self) -> list[list[str]]:
        """Return the names of the trained parameters, by param group, in the optimizer's order.

        Raises:
            CheckpointError: the checkpoint does not record them.
        """
        optimizer = self.meta["optimizer"]
        if optimizer is None:
            return []
        names = optimizer.get("names")
        if names is None and len(optimizer["param_groups"]) == 1:
            names = [
                [
                    name
                    for name in self.shapes
                    if any(f"{kind}/{name}" in self.entries for kind in self.states)
                ]
            ]
        if names is None:
            raise CheckpointError(
                f"{self.path} does not record which parameters are in which param group: it was written by an older "
                "version.",
                where=str(self.directory),
                fix="load it and save it again, or export only its weights (--format fp32)",
            )
        return [
            [name for name in group if name in self.shapes] for group in names
        ]  # without parameters that have no elements

    @property
    def options(self) -> list[dict[str, Any]]:
        """Return the options of the param groups."""
        return list(self.meta["optimizer"]["param_groups"]) if self.meta["optimizer"] else []

    @property
    def frozen(self) -> list[str]:
        """Return the names of the parameters that are not trained."""
        trained = {name for names in self.groups for name in names}
        return [name for name in self.shapes if name not in trained]

    @property
    def tied(self) -> dict[str, str]:
        """Return {other name: first name} of tied parameters."""
        return dict(self.meta.get("tied") or {})

    @property
    def config(self) -> dict[str, Any]:
        """Return the JSON config of the run."""
        return dict(self.meta.get("config") or {})

    @property
    def dtype(self) -> torch.dtype:
        """Return the model's dtype in the run, as opposed to that of its fp32 master weights."""
        kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
        on = [dtype for key, dtype in kinds.items() if dict(self.config.get(key) or {}).get("enabled")]
        return on[0] if on else torch.float32

    def dtype_of(self, name: str, otherwise: torch.dtype) -> torch.dtype:
        """Return `otherwise` for a floating-point parameter, and its stored dtype for any other."""
        own: torch.dtype = self.entries[f"model/{name}"].properties.dtype
        return otherwise if own.is_floating_point else own

    @property
    def clipping(self) -> float:
        """Return the maximum gradient norm (`gradient_clipping`)."""
        return float(self.config.get("gradient_clipping", 1.0))

    @property
    def schedule(self) -> Any:
        """Return the state of the LR scheduler, in the form of DeepSpeed's schedulers if possible."""
        state = self.meta["scheduler"]
        if (steps := steps_in_schedule(state)) is not None:
            return {"last_batch_iteration": steps - 1}
        if isinstance(state, dict) and "last_batch_iteration" in state:
            return {"last_batch_iteration": state["last_batch_iteration"]}
        return state

    def buffers(self) -> dict[str, Tensor]:
        """Return the persistent buffers."""
        made = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in self.entries.items()
            if name.startswith("buffer/")
        }
        self.load(made)
        return {name.removeprefix("buffer/"): tensor for name, tensor in made.items()}

    def whole_states(self, at_once: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield (name, {"model" or a state: unsharded tensor in fp32}) of each parameter.

        Args:
            at_once: maximum bytes in memory; a parameter that needs more is held alone.
        """
        batch: list[str] = []
        for name in [*self.shapes, None]:
            count = len(self.states) + 1
            size = 4 * count * sum(math.prod(self.shapes[n]) for n in (*batch, *((name,) if name else ())))
            if batch and (name is None or size > at_once):
                yield from self._whole(batch)
                batch = []
            batch += [name] if name else []

    def _whole(self, names: list[str]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        made = {
            f"{kind}/{name}": torch.empty(self.shapes[name], dtype=self.dtype_of(name, torch.float32))
            for name in names
            for kind in ("model", *self.states)
            if f"{kind}/{name}" in self.entries
        }
        self.load(made)
        for name in names:
            kinds = [kind for kind in ("model", *self.states) if f"{kind}/{name}" in made]
            yield name, {kind.removeprefix("optimizer/"): made[f"{kind}/{name}"] for kind in kinds}


def there_already(directory: Path) -> CheckpointError:
    """Return the error for an output path that already exists."""
    return CheckpointError(
        f"{directory} already exists.", where=str(directory), fix="choose another output directory"
    )
