"""Reads the weights of a PipelineModule: DeepSpeed writes them per layer, and the optimizer state per stage.

DeepSpeed names a tied module `tied_modules.KEY`; launcher names it after its first layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from launcher.checkpoint.deepspeed.layout import Place, StoredTensor
from launcher.checkpoint.deepspeed.opened import OpenedFiles, plain_dict, wrong
from launcher.checkpoint.deepspeed.unpickle import load
from launcher.errors import CheckpointError

TIED = "tied_modules."


class Layers:
    """The content of the layer files.

    Args:
        files: (layer, tensor-parallel rank) -> file.
    """

    def __init__(self, files: Mapping[tuple[int, int], Path]) -> None:
        self.files = files
        self._named: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for (layer, rank), path in sorted(files.items()):
            named = self._named[rank]
            named |= {f"{layer}.{name}": tensor for name, tensor in load(path).items()}

    def module_of(self, opened: OpenedFiles, rank: int) -> dict[str, Tensor]:
        """Return the state dict of a stage; call it for the stages in order.

        Args:
            rank: tensor-parallel rank.

        Raises:
            CheckpointError: the layers do not match the stage.
        """
        named = self._named[rank]
        if not opened.groups:
            return self._next(opened, named)
        wanted = [name for group in opened.groups for name in group]
        wanted += [*plain_dict(opened.model.get("frozen_param_shapes")), *opened.buffers]
        return {name: named[name] for name in wanted if name in named}

    def rename_ties(self, stored: Place, rank: int) -> None:
        """Rename the tied tensors of a stage after their first layers, which are identified by equal values.

        Args:
            rank: tensor-parallel rank.

        Raises:
            CheckpointError: no layer has the same values.
        """
        tied: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        for name in [name for name in stored if name.startswith(f"model/{TIED}")]:
            key, _, inner = name.removeprefix(f"model/{TIED}").partition(".")
            tied[key][inner] = stored[name]
        for key, entries in tied.items():
            layer = self._layer_like(entries, rank)
            if layer is None:
                raise CheckpointError(
                    f"No layer file has the weights of the tied module {key!r}.",
                    fix="load the directory that DeepSpeed saved, with its layer files, not its copy in the universal "
                    "layout; if this is the original, its files belong to several saves: copy all of them again",
                )
            for name in [name for name in stored if f"/{TIED}{key}." in name]:
                stored[name.replace(f"/{TIED}{key}.", f"/{layer}.")] = stored.pop(name)

    def _layer_like(self, entries: Mapping[str, StoredTensor], rank: int) -> str | None:
        named = self._named[rank]
        for layer in dict.fromkeys(name.partition(".")[0] for name in named):
            if all(
                f"{layer}.{inner}" in named and entry.looks_like(named[f"{layer}.{inner}"])
                for inner, entry in entries.items()
            ):
                return layer
        return None

    def _next(self, opened: OpenedFiles, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take as many layers as the stage's optimizer has states for: ZeRO stage 0 has no other record."""
        state = plain_dict(opened.model.get("optimizer"))
        base = state.get("optimizer_state_dict", state)
        flats, buffers = state.get("fp32_groups_flat"), set(opened.buffers)
        wanted = (
            sum(flat.numel() for flat in flats)
            if flats
            else sum(len(group["params"]) for group in base.get("param_groups", ()))
        )
        taken: dict[str, Tensor] = {}
        for name in list(named):
            if wanted <= 0:
                break
            taken[name] = named.pop(name)
            wanted -= 0 if name in buffers else taken[name].numel() if flats else 1
        if wanted or _has_twins(taken | named):
            raise CheckpointError(
                f"{opened.files.model[0]} was saved at ZeRO stage 0, and its optimizer states do not match the layer "
                "files next to it: DeepSpeed does not record which parameters are tied or frozen at stage 0.",
                where=str(opened.directory),
                fix="save the run at stage 1 in DeepSpeed first, or start from its weights",
            )
        return taken


def _has_twins(named: Mapping[str, Tensor]) -> bool:
    """Return whether two layers have equal weights: if so, they are tied, and the state order is unknown."""
    matrices = [tensor for tensor in named.values() if tensor.dim() > 1]
    return any(
        one.shape == other.shape and one.equal(other)
        for number, one in enumerate(matrices)
        for other in matrices[:number]
    )


def stages_and_splits(ranks: Sequence[OpenedFiles], files: Mapping[tuple[int, int], Path]) -> tuple[int, int]:
    """Return (pipeline stages, tensor-parallel ranks); model-parallel rank = stage x tensor-parallel ranks + rank.

    Raises:
        CheckpointError: the number of ranks does not match.
    """
    said = plain_dict(ranks[0].model.get("checkpoint_parallel_dimensions"))
    splits = said.get("tp_degree") or (1 + max(rank for _, rank in files) if files else len(ranks))
    stages = said.get("pp_degree") or len(ranks) // splits
    if stages * splits != len(ranks):
        what = f"is from a run with {stages} pipeline stages of {splits} tensor-parallel ranks, but the files are of "
        raise wrong(ranks[0].files.model[0], f"{what}{len(ranks)} model-parallel ranks")
    return stages, splits
