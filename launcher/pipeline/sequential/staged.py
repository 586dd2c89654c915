"""`SequentialPipeline`: the virtual stages of a `PipelineModule` that a rank holds, and the forward of each.

Layers may pass any nest of tensors: a tensor, a tuple of tensors, a dict. Batches are (inputs, labels), as in
DeepSpeed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from launcher.errors import ConfigError, LauncherError
from launcher.pipeline.crossing import Signature, StageBoundary, TensorShape
from launcher.pipeline.plain import travels
from launcher.pipeline.sequential.layers import PipelineModule
from launcher.pipeline.sequential.stage import PipelineStage


@travels
@dataclass
class BoundaryValues(StageBoundary):
    """Describes the values that leave a stage.

    Attributes:
        structure: the nest, with a `TensorShape` in place of each tensor.
    """

    structure: Any = None

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the nest with these tensors."""
        leaves, spec = tree_flatten(self.structure)
        arriving = iter(tensors)
        return tree_unflatten(
            [next(arriving) if isinstance(leaf, TensorShape) else leaf for leaf in leaves], spec
        )


class SequentialPart(nn.Module):
    """The layers of a `PipelineModule` that a rank holds, under their names in it.

    Args:
        modules: name -> module.
        stages: virtual stage -> its layers, which use these modules.
        last: the index of the last virtual stage, whose output is passed to `loss_fn`.

    Attributes:
        stage, received: the virtual stage that the next forward runs, and its input from the previous stage.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        stages: Mapping[int, PipelineStage],
        last: int,
        loss_fn: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        # In plain containers: registered as submodules, the layers would have a second name.
        self.stages, self._loss, self.last = dict(stages), (loss_fn,), last
        self.stage, self.received = 0, None

    def forward(self, *batch: Any, **named: Any) -> Any:
        """Run the current virtual stage. The last one returns {"loss": ..., "logits": output of the last
        layer}, without "loss" if there is none."""
        if named or not 1 <= len(batch) <= 2:
            shown = f"a dict of {', '.join(named)}" if named else f"{len(batch)} parts"
            raise ConfigError(
                f"the batch is {shown}, but PipelineModule needs (inputs, labels)",
                where="engine.train_batch()",
                fix="pass pairs, with a tuple of tensors for several inputs, or call "
                "engine.set_batch_fn() with a function that converts batches to pairs",
            )
        output = self.stages[self.stage](batch[0] if self.stage == 0 else self.received)
        return output if self.stage < self.last else self._ended(output, batch[1:])

    def _ended(self, output: Any, labels: tuple[Any, ...]) -> dict[str, Any]:
        (loss_fn,) = self._loss
        if loss_fn is not None:
            return {"loss": loss_fn(output, *labels), "logits": output} if labels else {"logits": output}
        loss = output[0] if isinstance(output, tuple | list) and output else output
        one = isinstance(loss, Tensor) and loss.numel() == 1
        return {"loss": loss, "logits": output} if one else {"logits": output}


class SequentialPipeline:
    """A rank's part of a `PipelineModule`.

    Args:
        row: the whole `PipelineModule`, from which the layers are built.
        boundaries: over the layers, [virtual stages + 1].
        rank_of: the pp rank of each virtual stage.
        rank: this rank along pp.

    Attributes:
        boundaries: as passed.
        part: the layers of this rank.
        blocks: (name, module) of the modules with parameters whose own forward runs exactly once; other
            modules belong to the root unit.
        shared, elsewhere: see `StagedPart`.
    """

    is_whole = False  # even with one stage: the engine calls the part with a batch of (inputs, labels)

    def __init__(
        self, row: PipelineModule, boundaries: Sequence[int], rank_of: Sequence[int], rank: int
    ) -> None:
        self.rank_of, self.virtual_stages = list(rank_of), len(rank_of)
        self.boundaries = list(boundaries)
        made = dict(row.made)
        spans = list(pairwise(boundaries))
        stages = {
            k: row.build(first, last, made=made)
            for k, (first, last) in enumerate(spans)
            if self.rank_of[k] == rank
        }
        own = {row.home_of(index) for k in stages for index in range(*spans[k])}
        modules = {row.name_of(home): made[home] for home in sorted(own & set(made))}
        self.part = SequentialPart(modules, stages, self.virtual_stages - 1, row.loss_fn)
        self.blocks = _blocks(modules, stages.values())
        self.shared = _shared(row, spans, self.rank_of)
        self.elsewhere: dict[Tensor, str] = {}  # layers of other ranks are never built on this rank
        self._in_place = {k for k, layers in stages.items() if k and _works_in_place(layers)}
        self._last_layer = [last - 1 for _, last in spans]
        self._learned: dict[tuple[int, Signature], BoundaryValues] = {}

    def names_of(self, stage: int) -> Collection[str]:
        """See `StagedPart`."""
        return {call.module for call in self.part.stages[stage].calls if call.module is not None}

    def places(self) -> Callable[[str], int]:
        """See `StagedPart`."""
        return lambda name: int(name.partition(".")[0])

    def before_backward(self, stage: int, signature: Signature) -> None:
        """See `StagedPart`."""

    def learned(self, stage: int, signature: Signature) -> BoundaryValues | None:
        """See `StagedPart`."""
        return self._learned.get((stage, signature))

    def tell(self, stage: int, signature: Signature, learned: BoundaryValues) -> None:
        """See `StagedPart`."""
        self._learned[stage, signature] = learned

    def forward(
        self, stage: int, received: tuple[Tensor, ...], signature: Signature, call: Callable[[nn.Module], Any]
    ) -> Any:
        """See `StagedPart`."""
        part = self.part
        if stage in self._in_place:
            received = tuple(tensor.clone() for tensor in received)  # autograd needs the originals unmodified
        part.stage = stage
        part.received = self._learned[stage - 1, signature].filled(received) if stage else None
        try:
            output = call(part)
        finally:
            part.received = None
        return output if stage == part.last else self._leave(stage, signature, output)

    def _leave(self, stage: int, signature: Signature, output: Any) -> tuple[Tensor, ...]:
        leaves, structure = tree_flatten(output)[0], tree_map(TensorShape.of, output)
        where = f"layer {self._last_layer[stage]}"
        strange = next((leaf for leaf in leaves if leaf is not None and TensorShape.of(leaf) is None), None)
        if strange is not None:
            raise _cannot_cross(
                f"{where} returns a {type(strange).__name__}",
                "return tensors, or tuples, lists or dicts of them",
            )
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        if not tensors:
            raise _cannot_cross(f"{where} returns no tensor", "return what the next layer needs")
        known = self.learned(stage, signature)
        if known is None:
            self._learned[stage, signature] = BoundaryValues(
                structure, shapes=tuple(map(TensorShape.of, tensors))
            )
        elif known.structure != structure:
            raise _cannot_cross(
                f"{where} returned {known.structure} for the first batch of these shapes, but now "
                f"{structure}",
                "return the same shapes between layers for batches of the same shape, and return "
                "changing numbers as tensors",
            )
        return tensors


def _blocks(modules: Mapping[str, nn.Module], stages: Any) -> list[tuple[str, nn.Module]]:
    """Return the modules with parameters whose own forward is called exactly once; modules used by a
    forward_fn are left out, since it may use them in any way."""
    calls = [call for stage in stages for call in stage.calls]
    uses = Counter(call.module for call in calls)
    hidden = {call.module for call in calls if call.function is not None}
    return [
        (name, module)
        for name, module in modules.items()
        if uses[name] == 1 and name not in hidden and any(True for _ in module.parameters())
    ]


def _shared(
    row: PipelineModule, spans: Sequence[tuple[int, int]], rank_of: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    holders: dict[str, set[int]] = {}
    for rank, (first, last) in zip(rank_of, spans, strict=True):
        for index in range(first, last):
            holders.setdefault(row.name_of(index), set()).add(rank)
    whole = dict(row.whole().named_children())
    return {
        f"{name}.{parameter}": tuple(sorted(ranks))
        for name, ranks in holders.items()
        if len(ranks) > 1
        for parameter, _ in whole[name].named_parameters()
    }


def _works_in_place(layers: PipelineStage) -> bool:
    """Return whether a layer is declared to modify its input, as nn.ReLU(inplace=True) is."""
    return any(getattr(module, "inplace", False) for module in layers.modules())


def _cannot_cross(what: str, fix: str) -> LauncherError:
    return LauncherError(f"{what}, which cannot be sent to the next stage", where="PipelineModule", fix=fix)
