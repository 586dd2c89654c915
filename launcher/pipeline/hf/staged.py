"""`StagedModel`: the virtual stages of a Hugging Face model that a rank holds, and the forward of each.

They share one model object. Blocks and parts of other ranks are replaced by stand-ins without parameters, so
that names stay those of the whole model. While a virtual stage runs, the modules of this rank's other virtual
stages are hidden behind stand-ins, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from launcher.models.activation import recomputing
from launcher.models.state_names import places_of
from launcher.pipeline.crossing import Signature, TensorShape
from launcher.pipeline.hf.origins import Origin
from launcher.pipeline.hf.parts import ModelParts, around, parts_of
from launcher.pipeline.hf.remote import RemoteBlock, RemotePart
from launcher.pipeline.hf.route import Route, StageInputs, StageOutputs
from launcher.tensor.sequence import SequenceParallel

Swap = tuple[nn.Module, str, nn.Module, nn.Module]  # parent, key, module, stand-in of the module


class StagedModel:
    """A rank's part of a model.

    Args:
        model: the whole model; reduced to this rank's part in place.
        boundaries: over the blocks, [virtual stages + 1].
        rank_of: the pp rank of each virtual stage.
        rank: this rank along pp.
        sequence: slices sequences over tp; None: sequences are not sliced.

    Attributes:
        blocks, shared, elsewhere: see `StagedPart`.
    """

    is_whole = False

    def __init__(
        self,
        model: nn.Module,
        boundaries: Sequence[int],
        rank_of: Sequence[int],
        rank: int,
        sequence: SequenceParallel | None = None,
    ) -> None:
        self.sequence = sequence
        self.model, self.boundaries, self.rank_of, self.rank = model, list(boundaries), list(rank_of), rank
        self._places = places_of(model)
        self.elsewhere = WeakTensorKeyDictionary()
        parts = parts_of(model)
        self.virtual_stages = len(self.rank_of)
        names, first, last = (
            [name for name, _ in part] for part in (parts.blocks, parts.before, parts.after)
        )
        self._names_of = [set(names[start:end]) for start, end in pairwise(self.boundaries)]
        self._names_of[0].update(first)
        self._names_of[-1].update(last)
        self.route = Route(names, lambda: next(model.parameters()))
        self.shared = _shared(model, parts, self.boundaries, self.rank_of)
        self._swaps: dict[str, tuple[set[int], Swap]] = {}  # name -> stages that run it, swap
        self._plan_swaps(parts)
        self.blocks = [(name, m) for name, m in parts.blocks if rank in self._holders(self._swaps[name][0])]
        self._put_stand_ins()
        self._watch(parts)
        self._learned: dict[tuple[int, Signature], StageInputs] = {}

    def names_of(self, stage: int) -> Collection[str]:
        """See `StagedPart`."""
        return self._names_of[stage]

    def places(self) -> Callable[[str], int]:
        """See `StagedPart`."""
        return self._places

    # ---- the cut ----------------------------------------------------------------------------

    def _plan_swaps(self, parts: ModelParts) -> None:
        last = self.virtual_stages - 1
        for k in range(self.virtual_stages):
            for i in range(self.boundaries[k], self.boundaries[k + 1]):
                name, block = parts.blocks[i]
                self._plan_swap(name, {k}, block, RemoteBlock(block, self._where(name, {k}), self.route, i))
        for part, stage in ((parts.before, 0), (parts.after, last)):
            for name, module in part:
                if any(True for _ in module.parameters()):
                    where = self._where(name, {stage})
                    other = RemotePart(module, where, self.route, name, before=stage == 0)
                    self._plan_swap(name, {stage}, module, other)

    def _plan_swap(self, name: str, stages: set[int], module: nn.Module, other: nn.Module) -> None:
        parent, _, key = name.rpartition(".")
        self._swaps[name] = stages, (self.model.get_submodule(parent), key, module, other)

    def _holders(self, stages: set[int]) -> set[int]:
        return {self.rank_of[stage] for stage in stages}

    def _where(self, name: str, stages: set[int]) -> str:
        (rank,) = self._holders(stages)
        return f"{name} is on pipeline stage {rank}"

    def _put_stand_ins(self) -> None:
        """Replace for good the modules that this rank never runs, if they share no parameter with modules
        that it runs. They are not referenced here afterwards, so that their memory can be freed."""
        kept = {
            parameter
            for stages, (_, _, module, _) in self._swaps.values()
            if self.rank in self._holders(stages)
            for parameter in module.parameters()
        }
        for name, (stages, (parent, key, module, other)) in self._swaps.items():
            if self.rank in self._holders(stages):
                continue
            for own, parameter in module.named_parameters():
                if parameter not in kept:
                    self.elsewhere[parameter] = self._where(f"{name}.{own}", stages)
            if not any(parameter in kept for parameter in module.parameters()):
                parent._modules[key] = other
                self._swaps[name] = stages, (parent, key, other, other)
                continue
            for inner in module.modules():  # the module stays, for the names of the parameters that are kept
                inner._buffers.clear()
                for one, shown in inner._parameters.items():
                    if shown not in kept:
                        inner._parameters[one] = None

    @contextmanager
    def _showing(self, stage: int) -> Iterator[None]:
        """Hide the modules that this virtual stage does not run behind stand-ins, inside the context."""
        hidden: list[Swap] = []
        for stages, swap in self._swaps.values():
            parent, key, module, other = swap
            if stage not in stages and parent._modules[key] is module:
                parent._modules[key] = other
                hidden.append(swap)
        try:
            yield
        finally:
            for parent, key, module, _ in hidden:
                parent._modules[key] = module

    # ---- learning ---------------------------------------------------------------------------

    def _watch(self, parts: ModelParts) -> None:
        for index, (name, block) in enumerate(parts.blocks):
            if self.rank in self._holders(self._swaps[name][0]):
                block.register_forward_pre_hook(self._before_block(index), with_kwargs=True, prepend=True)
                block.register_forward_hook(self._after_block)
        if self.rank == self.rank_of[0]:
            for name, module in parts.before:
                module.register_forward_hook(self._after_part(name))

    def _before_block(self, index: int) -> Callable[..., Any]:
        def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return None if recomputing() else self.route.enter_at(index, (args, kwargs))

        return before

    def _after_block(self, block: nn.Module, args: Any, output: Any) -> Any:
        if self.route.origins is None or recomputing():
            return None
        self.route.learned.returns.setdefault(type(block).__qualname__, tree_map(TensorShape.of, output))
        return self.route.marked(output, Origin.HERE)

    def _after_part(self, name: str) -> Callable[..., Any]:
        def after(part: nn.Module, args: Any, output: Any) -> Any:
            if self.route.origins is None or recomputing():
                return None
            self.route.learned.outputs[name] = tree_map(TensorShape.of, output)
            return self.route.marked(output, Origin.HERE)

        return after

    # ---- one forward ------------------------------------------------------------------------

    def learned(self, stage: int, signature: Signature) -> StageInputs | None:
        """See `StagedPart`."""
        return self._learned.get((stage, signature))

    def tell(self, stage: int, signature: Signature, learned: StageInputs) -> None:
        """See `StagedPart`."""
        self._learned[stage, signature] = learned

    def forward(
        self, stage: int, received: tuple[Tensor, ...], signature: Signature, call: Callable[[nn.Module], Any]
    ) -> Any:
        """See `StagedPart`."""
        if stage and self.sequence is not None:
            slicing = self._learned[stage - 1, signature].slicing
            assert slicing is not None
            self.sequence.go_on(slicing)
        route, known = self.route, self.learned(stage, signature)
        before = self._learned[stage - 1, signature] if stage else StageInputs()
        enter, leave = self.boundaries[stage], self.boundaries[stage + 1]
        try:
            with self._showing(stage), route.start(enter, leave, received, before, known):
                output = self._called(call)
            learned = route.learned
            if leave < len(route.names):
                output = route.crossing()
                learned.slicing = self.sequence.pause() if self.sequence is not None else None
            else:
                route.check_output(output)
                learned.slicing = before.slicing
        finally:
            route.end()
        self._learned[stage, signature] = learned
        return output

    def _called(self, call: Callable[[nn.Module], Any]) -> Any:
        """Return the model's output; None if its forward ends early."""
        try:
            return call(self.model)
        except StageOutputs:
            return None
        except Exception:
            # Code between stand-ins may fail on zeros. The stage that needs anything missed reports it.
            if not self.route.looking_ahead:
                raise
            return None

    def before_backward(self, stage: int, signature: Signature) -> None:
        """See `StagedPart`; restores the slicing of sequences of the forward of this signature."""
        slicing = self._learned[stage, signature].slicing
        if self.sequence is not None and slicing is not None:
            self.sequence.recall(slicing)


def _shared(
    model: nn.Module, parts: ModelParts, boundaries: Sequence[int], rank_of: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several ranks hold: first name -> these ranks."""
    holders: dict[nn.Parameter, set[int]] = {}
    places = [(module, rank_of[0]) for _, module in parts.before]
    for k, rank in enumerate(rank_of):
        places += [(module, rank) for _, module in parts.blocks[boundaries[k] : boundaries[k + 1]]]
    places += [(module, rank_of[-1]) for _, module in parts.after]
    for module, rank in places:
        for parameter in module.parameters():
            holders.setdefault(parameter, set()).add(rank)
    holders.update((parameter, set(rank_of)) for _, parameter in around(model, parts))
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: tuple(sorted(ranks)) for p, ranks in holders.items() if len(ranks) > 1}
