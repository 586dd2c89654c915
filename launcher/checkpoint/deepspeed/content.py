"""A checkpoint of DeepSpeed's under launcher's names: `model/<parameter>`, `optimizer/<state>/<parameter>`, and a meta.

See `engine/state.py` for the names, and for what the meta has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.deepspeed import files as ds_files
from launcher.checkpoint.deepspeed.files import Files
from launcher.checkpoint.deepspeed.layout import (
    FlatRange,
    Shapes,
    StoredTensor,
    equal_parts,
    parts_of,
    ranges,
    whole,
)
from launcher.checkpoint.deepspeed.meta import meta_of
from launcher.checkpoint.deepspeed.unpickle import load
from launcher.errors import CheckpointError


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds.

    Attributes:
        stored: name -> logical tensor.
        meta: as in launcher's own meta.json.
    """

    stored: dict[str, StoredTensor]
    meta: dict[str, Any]


def open_content(directory: Path) -> Content:
    """Open a checkpoint (one tag) of DeepSpeed's. Its tensors stay on the disk.

    Raises:
        CheckpointError: a file is missing, damaged, or of another run; or it is of a kind that is not read.
    """
    found = ds_files.find(directory)
    key = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in found.all)
    return _opened(directory, key)


@lru_cache(maxsize=1)
def _opened(directory: Path, key: object) -> Content:
    return _Reader(ds_files.find(directory)).content()


class _Reader:
    """Reads the files of a checkpoint, and gives their tensors names."""

    def __init__(self, found: Files) -> None:
        self.files = found
        self.models = {rank: load(path) for rank, path in found.model.items()}
        self.optimizers = {
            rank: self._optimizer_state(path, load(path)) for rank, path in found.optimizer.items()
        }
        self.model = self.models[0]
        self.stored: dict[str, StoredTensor] = {}

    def content(self) -> Content:
        self._check_ranks()
        if not isinstance(self.model.get("module"), dict):
            raise self._wrong(self.files.model[0], "has no state of a module")
        module: dict[str, Tensor] = self.model["module"]
        trained = list(self._groups())
        if self.optimizers:
            self._sharded(trained)
        states, groups = self._whole_states(trained) if not self.optimizers else self._base_state(0)
        self.stored |= {
            f"buffer/{name}": whole(module[name]) for name in self.model.get("buffer_names") or ()
        }
        for name in self._parameters():
            if f"model/{name}" not in self.stored and module[name].numel():
                self.stored[f"model/{name}"] = whole(module[name])
        self._frozen()
        self._check_whole()
        return Content(self.stored, meta_of(self.model, self.optimizers.get(0), groups, states, self._tied()))

    # ---- with ZeRO -------------------------------------------------------------------------------

    def _sharded(self, trained: Sequence[Shapes]) -> None:
        """Take master weights and states of stages 1 to 3."""
        first = self.optimizers[0]
        stage = 3 if "fp32_flat_groups" in first else 2
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        masters = {rank: list(state.get(key) or ()) for rank, state in self.optimizers.items()}
        if stage == 3:
            lengths = [flat.numel() for flat in masters[0]]
            runs = list(equal_parts(trained, lengths, len(masters)))
        else:
            by_group = [
                [masters[rank][g].numel() for rank in sorted(masters)] for g in range(len(masters[0]))
            ]
            runs = list(ranges(trained, by_group, first.get("param_alignment_paddings")))
        shapes = {name: tuple(shape) for group in trained for name, shape in group.items()}
        self._place("model", runs, shapes, lambda run: masters[run.rank][run.group])
        states = {rank: self._base_state(rank)[0] for rank in self.optimizers}
        for state_key in sorted({name for group in states[0].values() for name in group}):
            values = {rank: [group.get(state_key) for group in by.values()] for rank, by in states.items()}
            if all(isinstance(value, Tensor) and value.dim() for value in values[0]):
                self._place(
                    f"optimizer/{state_key}", runs, shapes, lambda run, v=values: v[run.rank][run.group]
                )  # type: ignore[misc]
        self._steps(runs, states[0])

    def _place(
        self, kind: str, runs: Iterable[FlatRange], shapes: Mapping[str, tuple[int, ...]], flat_of: Any
    ) -> None:
        for run in runs:
            flat, shape = flat_of(run), shapes[run.name]
            entry = self.stored.setdefault(f"{kind}/{run.name}", StoredTensor(shape, flat.dtype))
            try:
                entry.parts.extend(parts_of(run, shape, flat.view(-1)))
            except ValueError as error:
                raise self._wrong(self.files.optimizer[run.rank], f"is too short: {error}") from None

    def _steps(self, runs: Iterable[FlatRange], states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Give each parameter the count of steps of its group."""
        steps = [_step_of([group]) for group in states.values()]
        for run in runs:
            if (step := steps[run.group]) is not None:
                self.stored.setdefault(f"scalar/step/{run.name}", whole(torch.tensor(float(step))))

    def _base_state(self, rank: int) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
        """Return (number of the flat tensor -> its states, the options of the param groups)."""
        state = self.optimizers[rank]
        base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
        if not isinstance(base, dict) or "state" not in base:
            raise self._wrong(self.files.optimizer[rank], "has no state of the optimizer that launcher knows")
        return dict(base["state"]), list(base["param_groups"])

    def _optimizer_state(self, path: Path, content: dict[str, Any]) -> dict[str, Any]:
        state = content.get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise self._wrong(path, "has no state of an optimizer")
        return state

    # ---- without ZeRO ----------------------------------------------------------------------------

    def _whole_states(
        self, trained: Sequence[Shapes]
    ) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
        """Take the states of stage 0, by parameter or, in 16 bits, by group; and master weights there."""
        state = self.model.get("optimizer")
        if not isinstance(state, dict):
            return {}, []
        base = state.get("optimizer_state_dict", state)
        states, groups = dict(base["state"]), list(base["param_groups"])
        names = self._names_at_stage_0(states, groups)
        if masters := state.get("fp32_groups_flat"):
            shapes = {name: tuple(self.model["module"][name].shape) for group in names for name in group}
            group_shapes = [{name: shapes[name] for name in group} for group in names]
            runs = list(ranges(group_shapes, [[flat.numel()] for flat in masters], None))
            self._place("model", runs, shapes, lambda run: masters[run.group])
            for key in sorted({k for group in states.values() for k, v in group.items() if _is_flat(v)}):
                values = [states[number].get(key) for number in states]
                self._place(f"optimizer/{key}", runs, shapes, lambda run, v=values: v[run.group])  # type: ignore[misc]
            for run in runs:
                count = _step_of([states[list(states)[run.group]], groups[run.group]])
                self.stored.setdefault(f"scalar/step/{run.name}", whole(torch.tensor(float(count or 0))))
            return states, groups
        for group, options in zip(names, groups, strict=True):
            step = _step_of([*(states.get(number, {}) for number in options["params"]), options])
            for name, number in zip(group, options["params"], strict=True):
                for key, value in states.get(number, {}).items():
                    if isinstance(value, Tensor) and value.dim():
                        self.stored[f"optimizer/{key}/{name}"] = whole(value)
                if step is not None and number in states:
                    self.stored[f"scalar/step/{name}"] = whole(torch.tensor(float(step)))
        return states, groups

    def _names_at_stage_0(
        self, states: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]
    ) -> list[list[str]]:
        """Return the names of each group's parameters: stage 0 does not write them, so they are those of the model in
        its order.

        Raises:
            CheckpointError: they may be others.
        """
        names = self._parameters()
        counts = [len(group["params"]) for group in groups]
        if "fp32_groups_flat" in (self.model.get("optimizer") or {}):
            counts = [len(names)] * len(groups)
        if len(groups) != 1 or counts[0] != len(names):
            raise CheckpointError(
                f"{self.files.model[0]} was written at stage 0 and does not say which parameters are in which of its "
                f"{len(groups)} param groups.",
                where=str(self.files.directory),
                fix="pass load_optimizer_states=False, or save the run at stage 1 in DeepSpeed first",
            )
        return [names]

    # ---- both ------------------------------------------------------------------------------------

    def _parameters(self) -> list[str]:
        """Return the names of the model's parameters, each tied one once, in the order of the model."""
        skipped = {*(self.model.get("buffer_names") or ()), *self._tied()}
        return [name for name in self.model["module"] if name not in skipped]

    def _tied(self) -> dict[str, str]:
        """Return further names of parameters -> their first ones. Stage 0 does not write them; memory says it."""
        tied, first = _plain_dict(self.model.get("shared_params")), dict[int, str]()
        for name, tensor in self.model["module"].items():
            if tensor.numel() and first.setdefault(tensor.data_ptr(), name) != name:
                tied[name] = first[tensor.data_ptr()]
        return tied

    def _groups(self) -> list[Shapes]:
        """Return name -> shape of the trained parameters, by param group; [] at stage 0."""
        return [dict(group) for group in self.model.get("param_shapes") or ()]

    def _frozen(self) -> None:
        """Take frozen parameters; at stage 3 each rank has an equal part of them."""
        shapes = {
            name: tuple(shape) for name, shape in _plain_dict(self.model.get("frozen_param_shapes")).items()
        }
        parts = {
            rank: _plain_dict(model.get("frozen_param_fragments")) for rank, model in self.models.items()
        }
        lacking = [name for name in shapes if f"model/{name}" not in self.stored]
        for name in lacking:
            shape = shapes[name]
            if len(parts) == 1 and name in parts[0] and tuple(parts[0][name].shape) == shape:
                self.stored[f"model/{name}"] = whole(parts[0][name])
                continue
            runs = equal_parts([{name: shape}], [1], len(parts))
            self._place("model", runs, {name: shape}, lambda run, n=name: parts[run.rank][n])  # type: ignore[misc]

    def _check_ranks(self) -> None:
        """Check that there are as many files as ranks wrote, of one run."""
        if not self.optimizers:
            return
        first = self.optimizers[0]
        count = first.get("partition_count")
        ranks = max(count) if isinstance(count, list | tuple) else int(count or 1)
        if len(self.optimizers) < ranks:
            like = self.files.optimizer[0]
            raise ds_files.missing(
                like.with_name(like.name.replace("rank_0_", f"rank_{ranks - 1}_", 1)), like
            )
        for rank, state in self.optimizers.items():
            if state.get("partition_count") != count:
                raise self._wrong(
                    self.files.optimizer[rank], "is of another run: it has another number of ranks"
                )
        steps = {rank: _step_of(self._base_state(rank)[0].values()) for rank in self.optimizers}
        if other := next((rank for rank, step in steps.items() if step != steps[0]), None):
            raise self._wrong(
                self.files.optimizer[other],
                f"is of another save: it has made {steps[other]} steps, and that of rank 0 {steps[0]}",
            )

    def _check_whole(self) -> None:
        lacking = [name for name, entry in self.stored.items() if not entry.is_whole]
        if lacking:
            raise CheckpointError(
                f"{self.files.directory} has only parts of {len(lacking)} tensors: {', '.join(lacking[:5])}.",
                where=str(self.files.directory),
                fix="a file is of another run, or damaged; load another checkpoint (tag)",
            )

    def _wrong(self, path: Path, what: str) -> CheckpointError:
        return CheckpointError(
            f"{path} {what}.", where=str(path), fix="copy the file again, or load another checkpoint (tag)"
        )


def _plain_dict(value: Any) -> dict[str, Any]:
    """Return a dict, of pairs too; {} of None."""
    return dict(value) if value else {}


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1


def _step_of(states: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the count of steps of a group; DeepSpeed's FusedAdam counts in one of its parameters only."""
    steps = [state["step"] for state in states if "step" in state]
    return max((int(step) for step in steps), default=None)
