"""The files of one of DeepSpeed's checkpoints, opened: what each rank wrote, and whether they belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from launcher.checkpoint.deepspeed.experts import ExpertFiles
from launcher.checkpoint.deepspeed.files import RankFiles, missing, unread
from launcher.checkpoint.deepspeed.layout import Shapes
from launcher.checkpoint.deepspeed.unpickle import load
from launcher.errors import CheckpointError

States = dict[Any, dict[str, Any]]


class OpenedFiles:
    """The content of one model-parallel rank's files. Tensors stay on the disk.

    Attributes:
        models: data-parallel rank -> what it wrote of the model.
        optimizers: data-parallel rank -> its part of the optimizer's state; {} without ZeRO.
        experts: of its layers of experts.
        module: its state dict, with the experts; at stage 3 parameters are empty there. The rank of a PipelineModule
            wrote none: `pipeline.py` puts it together.

    Raises:
        CheckpointError: a file is damaged, missing, or of another run or save.
    """

    def __init__(self, found: RankFiles) -> None:
        self.files = found
        self.models = {rank: load(path) for rank, path in found.model.items()}
        self.optimizers = {rank: self._state(path, load(path)) for rank, path in found.optimizer.items()}
        module = self.model.get("module")
        if not isinstance(module, dict | None):
            raise wrong(found.model[0], "has no state of a module")
        self.experts = ExpertFiles(found.experts)
        self.module: dict[str, Tensor] = {**(module or {}), **self.experts.named}
        self._check_experts()
        if self.optimizers:
            self._check_ranks()

    @property
    def model(self) -> dict[str, Any]:
        """Return what rank 0 wrote of the model."""
        return self.models[0]

    @property
    def directory(self) -> Path:
        """Return where the files are."""
        return self.files.model[0].parent

    @property
    def is_stage_3(self) -> bool:
        """Return whether each rank has a part of every parameter."""
        return bool(self.optimizers) and "fp32_flat_groups" in self.optimizers[0]

    @property
    def groups(self) -> list[Shapes]:
        """Return name -> shape of the trained parameters, by param group, at stage 3 by sub-group; [] at stage 0, which
        does not write them. Experts are those of rank 0, under its numbers."""
        return [dict(group) for group in self.model.get("param_shapes") or ()]

    @property
    def group_names(self) -> list[list[str]]:
        """Return the names of the trained parameters, by param group. At stage 3 `param_shapes` is by sub-group, of
        which a param group has several, by their numbers in the inner optimizer."""
        names = [list(group) for group in self.groups]
        if not self.is_stage_3:
            return names
        groups = self.base_state(0)[1]
        return [[name for number in group.get("params", ()) for name in names[number]] for group in groups]

    @cached_property
    def tied(self) -> dict[str, str]:
        """Return further names of parameters -> their first ones. Stage 0 does not write them; memory says it."""
        tied, first = plain_dict(self.model.get("shared_params")), dict[int, str]()
        for name, tensor in self.module.items():
            if tensor.numel() and first.setdefault(tensor.data_ptr(), name) != name:
                tied[name] = first[tensor.data_ptr()]
        return tied

    @property
    def buffers(self) -> list[str]:
        """Return the names of the persistent buffers."""
        return list(self.model.get("buffer_names") or ())

    @property
    def parameters(self) -> list[str]:
        """Return the names of the parameters, each tied one once, in the order of the model."""
        skipped = {*self.buffers, *self.tied}
        return [name for name in self.module if name not in skipped]

    def sharers(self, group: int) -> list[tuple[Shapes, list[int]]]:
        """Return (name -> shape of parameters, the data-parallel ranks that share them) of a param group at stages 1
        and 2: all ranks share what they all have, and some of them an expert."""
        ranks, count = sorted(self.optimizers), self.optimizers[0].get("partition_count")
        holders = count[group] if isinstance(count, list | tuple) else len(ranks)
        degree = len(ranks) // holders
        return [
            (self.experts.globally(self.groups[group], rank, degree), ranks[rank::degree])
            for rank in range(degree)
        ]

    def base_state(self, rank: int) -> tuple[States, list[dict[str, Any]]]:
        """Return (number of a rank's flat tensor -> its states, the options of the param groups)."""
        state = self.optimizers[rank]
        base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
        if isinstance(
            base, list
        ):  # "elastic_checkpoint": the states alone, whose groups keep the run's options
            return dict(enumerate(base)), [{} for _ in base]
        if not isinstance(base, dict) or "state" not in base:
            raise wrong(self.files.optimizer[rank], "has no state of the optimizer that launcher knows")
        return dict(base["state"]), list(base["param_groups"])

    def _state(self, path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        state = content.get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise wrong(path, "has no state of an optimizer")
        return state

    def _check_experts(self) -> None:
        """Check that there is a file of each expert, and that it is of a kind that is read."""
        if self.model.get("ds_autoep_layers"):
            raise unread(self.directory, "experts that AutoEP spread")
        for layer, count in enumerate(self.model.get("num_experts") or () if self.files.experts else ()):
            for expert in range(int(count)):
                if (layer, expert) not in self.files.experts:
                    name = f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
                    raise missing(self.directory / name, self.files.model[0])

    def _check_ranks(self) -> None:
        """Check that there is a file of each rank that wrote, and that all are of one save."""
        count = self.optimizers[0].get("partition_count")
        ranks = max(count) if isinstance(count, list | tuple) else int(count or 1)
        for found in (self.files.optimizer, self.files.model if self.is_stage_3 else self.files.optimizer):
            if len(found) < ranks:
                like = found[0]
                raise missing(like.with_name(like.name.replace("rank_0_", f"rank_{ranks - 1}_", 1)), like)
        for rank, state in self.optimizers.items():
            if state.get("partition_count") != count:
                raise wrong(
                    self.files.optimizer[rank], "is of another run: it was written by another number of ranks"
                )
        for rank, model in self.models.items():
            if model.get("global_steps") != self.model.get("global_steps"):
                raise wrong(self.files.model[rank], "is of another save than that of rank 0")
        steps = {rank: step_of(self.base_state(rank)[0].values()) for rank in self.optimizers}
        if other := next((rank for rank, step in steps.items() if step != steps[0]), None):
            what = f"is of another save: it is at step {steps[other]}, and that of rank 0 at step {steps[0]}"
            raise wrong(self.files.optimizer[other], what)


def wrong(path: Path, what: str) -> CheckpointError:
    """Return the error for a file that cannot be used."""
    return CheckpointError(
        f"{path} {what}.", where=str(path), fix="copy the file again, or load another checkpoint (tag)"
    )


def plain_dict(value: Any) -> dict[str, Any]:
    """Return a dict, of pairs too; {} of None."""
    return dict(value) if value else {}


def step_of(states: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the count of steps of a group; DeepSpeed's FusedAdam counts in one of its parameters only."""
    return max((int(state["step"]) for state in states if "step" in state), default=None)
