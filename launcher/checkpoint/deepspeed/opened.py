"""Opens a DeepSpeed checkpoint's files of one model-parallel rank, and checks that they belong together."""

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
    """The content of one model-parallel rank's files. Tensors stay on disk.

    Attributes:
        models: data-parallel rank -> content of its model file.
        optimizers: data-parallel rank -> its part of the optimizer state; {} without ZeRO.
        experts: content of the expert files.
        module: state dict, including the experts; at stage 3 its parameters are empty. The ranks of a
            PipelineModule wrote none: `pipeline.py` assembles it.

    Raises:
        CheckpointError: a file is damaged, missing, or of another run or save.
    """

    def __init__(self, found: RankFiles) -> None:
        self.files = found
        self.models = {rank: load(path) for rank, path in found.model.items()}
        self.optimizers = {rank: self._state(path, load(path)) for rank, path in found.optimizer.items()}
        module = self.model.get("module")
        if not isinstance(module, dict | None):
            raise wrong(found.model[0], "has no module state")
        self.experts = ExpertFiles(found.experts)
        self.module: dict[str, Tensor] = {**(module or {}), **self.experts.named}
        self._check_experts()
        if self.optimizers:
            self._check_ranks()

    @property
    def model(self) -> dict[str, Any]:
        """Return the content of rank 0's model file."""
        return self.models[0]

    @property
    def directory(self) -> Path:
        """Return the directory of the files."""
        return self.files.model[0].parent

    @property
    def is_stage_3(self) -> bool:
        """Return whether each rank has a shard of every parameter."""
        return bool(self.optimizers) and "fp32_flat_groups" in self.optimizers[0]

    @property
    def groups(self) -> list[Shapes]:
        """Return {name: shape} of the trained parameters per param group, or per sub-group at stage 3.

        [] at stage 0, which does not write them. The experts are rank 0's, under its local indices.
        """
        return [dict(group) for group in self.model.get("param_shapes") or ()]

    @property
    def group_names(self) -> list[list[str]]:
        """Return the names of the trained parameters, by param group.

        At stage 3 `param_shapes` is per sub-group; a param group lists the indices of its sub-groups in the
        inner optimizer.
        """
        names = [list(group) for group in self.groups]
        if not self.is_stage_3:
            return names
        groups = self.base_state(0)[1]
        return [[name for number in group.get("params", ()) for name in names[number]] for group in groups]

    @cached_property
    def tied(self) -> dict[str, str]:
        """Return {other name: first name} of tied parameters; at stage 0 only shared memory reveals them."""
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
        """Return the names of the parameters in model order, each tied one once."""
        skipped = {*self.buffers, *self.tied}
        return [name for name in self.module if name not in skipped]

    def sharers(self, group: int) -> list[tuple[Shapes, list[int]]]:
        """Return (shapes of parameters, data-parallel ranks that shard them) of a group at stages 1 and 2.

        All ranks shard the parameters that they all have; only some of them shard an expert.
        """
        ranks, count = sorted(self.optimizers), self.optimizers[0].get("partition_count")
        holders = count[group] if isinstance(count, list | tuple) else len(ranks)
        degree = len(ranks) // holders
        return [
            (self.experts.globally(self.groups[group], rank, degree), ranks[rank::degree])
            for rank in range(degree)
        ]

    def base_state(self, rank: int) -> tuple[States, list[dict[str, Any]]]:
        """Return ({index of a rank's flat tensor: its states}, options of the param groups)."""
        state = self.optimizers[rank]
        base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
        if isinstance(
            base, list
        ):  # "elastic_checkpoint" saves only the states; the param groups keep the run's options
            return dict(enumerate(base)), [{} for _ in base]
        if not isinstance(base, dict) or "state" not in base:
            raise wrong(self.files.optimizer[rank], "has no optimizer state that launcher supports")
        return dict(base["state"]), list(base["param_groups"])

    def _state(self, path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        state = content.get("optimizer_state_dict")
        if not isinstance(state, dict):
            raise wrong(path, "has no optimizer state")
        return state

    def _check_experts(self) -> None:
        """Check that every expert has a file, and that the kind of expert is supported."""
        if self.model.get("ds_autoep_layers"):
            raise unread(self.directory, "experts distributed by AutoEP")
        for layer, count in enumerate(self.model.get("num_experts") or () if self.files.experts else ()):
            for expert in range(int(count)):
                if (layer, expert) not in self.files.experts:
                    name = f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
                    raise missing(self.directory / name, self.files.model[0])

    def _check_ranks(self) -> None:
        """Check that the file of every rank exists, and that all are of the same save."""
        count = self.optimizers[0].get("partition_count")
        ranks = max(count) if isinstance(count, list | tuple) else int(count or 1)
        for found in (self.files.optimizer, self.files.model if self.is_stage_3 else self.files.optimizer):
            if len(found) < ranks:
                like = found[0]
                raise missing(like.with_name(like.name.replace("rank_0_", f"rank_{ranks - 1}_", 1)), like)
        for rank, state in self.optimizers.items():
            if state.get("partition_count") != count:
                raise wrong(
                    self.files.optimizer[rank],
                    "belongs to another run: it was saved with another number of ranks",
                )
        for rank, model in self.models.items():
            if model.get("global_steps") != self.model.get("global_steps"):
                raise wrong(self.files.model[rank], "belongs to another save than the file of rank 0")
        steps = {rank: step_of(self.base_state(rank)[0].values()) for rank in self.optimizers}
        if other := next((rank for rank, step in steps.items() if step != steps[0]), None):
            what = f"belongs to another save: it is at step {steps[other]}, the file of rank 0 at step {steps[0]}"
            raise wrong(self.files.optimizer[other], what)


def wrong(path: Path, what: str) -> CheckpointError:
    """Return the error for a file that cannot be used."""
    return CheckpointError(
        f"{path} {what}.", where=str(path), fix="copy the file again, or load another checkpoint (tag)"
    )


def plain_dict(value: Any) -> dict[str, Any]:
    """Convert a dict, or pairs, to a dict; None to {}."""
    return dict(value) if value else {}


def step_of(states: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the step count of a group; DeepSpeed's FusedAdam stores it in only one of its parameters."""
    return max((int(state["step"]) for state in states if "step" in state), default=None)
