"""`StagedModel`: the virtual stages of a Hugging Face model that a rank holds, and the forward of each.

All of them share one model object. Blocks and parts of other ranks are stand-ins without parameters: names stay those
of the whole model. While a virtual stage runs, what this rank holds for its other ones is hidden behind stand-ins, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from launcher.models.names import places_of
from launcher.pipeline.crossing import Shape, Signature
from launcher.pipeline.parts import Parts, parts_of
from launcher.pipeline.route import BlockElsewhere, Learned, Left, PartElsewhere, Route
from launcher.tensor.sequence import SequenceParallel

Swap = tuple[nn.Module, str, nn.Module, nn.Module]  # parent, key, what it holds, its stand-in


class StagedModel:
    """A rank's part of a model.

    Args:
        model: the whole model; becomes this rank's part of it, in place.
        boundaries: over the blocks, [virtual stages + 1].
        rank_of: the pp rank of each virtual stage.
        rank: this one.
        sequence: what slices sequences over tp; None: nothing does.

    Attributes:
        blocks: (name, module) of this rank.
        shared: names of parameters that other ranks hold as well -> pp ranks that hold them, in order.
        elsewhere: parameters that only other ranks hold -> where they are, in words.
    """

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
        self.route = Route()
        self.place = places_of(model)
        self.elsewhere = WeakTensorKeyDictionary()
        parts = parts_of(model)
        self.virtual_stages = len(self.rank_of)
        self._names = [name for name, _ in parts.blocks]
        self.shared = _shared(parts, self.boundaries, self.rank_of)
        self._swaps: dict[str, tuple[set[int], Swap]] = {}  # by name: virtual stages that run it
        self._plan_swaps(parts)
        self.blocks = [(name, m) for name, m in parts.blocks if rank in self._holders(self._swaps[name][0])]
        self._put_stand_ins()
        self._watch(parts)
        self._learned: dict[tuple[int, Signature], Learned] = {}

    # ---- the cut ----------------------------------------------------------------------------

    def _plan_swaps(self, parts: Parts) -> None:
        last = self.virtual_stages - 1
        for k in range(self.virtual_stages):
            for i in range(self.boundaries[k], self.boundaries[k + 1]):
                name, block = parts.blocks[i]
                self._plan_swap(
                    name, {k}, block, BlockElsewhere(block, self._where(name, {k}), self.route, i)
                )
        for part, stage in ((parts.before, 0), (parts.after, last)):
            for name, module in part:
                if any(True for _ in module.parameters()):
                    where = self._where(name, {stage})
                    other = PartElsewhere(module, where, self.route, name, before=stage == 0)
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
        """For good, where this rank never runs a module and no parameter of it is in one that runs here. Nothing here
        keeps the module then, nor its memory."""
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
            for inner in module.modules():  # it stays for the names of those that are kept
                inner._buffers.clear()
                for one, shown in inner._parameters.items():
                    if shown not in kept:
                        inner._parameters[one] = None

    @contextmanager
    def _showing(self, stage: int) -> Iterator[None]:
        """Only what this virtual stage runs, and stand-ins for the rest."""
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

    def _watch(self, parts: Parts) -> None:
        for index, (name, block) in enumerate(parts.blocks):
            if self.rank in self._holders(self._swaps[name][0]):
                if index in self.boundaries and index > 0:
                    block.register_forward_pre_hook(
                        self._before_block(index, name), with_kwargs=True, prepend=True
                    )
                block.register_forward_hook(self._after_block)
        if self.rank == self.rank_of[0]:
            for name, module in parts.before:
                module.register_forward_hook(self._after_part(name))

    def _before_block(self, index: int, name: str) -> Callable[..., Any]:
        def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch._C._current_graph_task_id() != -1 or index != self.route.enter:
                return None
            return self.route.entered(name, args, kwargs)

        return before

    def _after_block(self, block: nn.Module, args: Any, output: Any) -> None:
        kind = type(block).__qualname__
        if self.route.first_time and kind not in self.route.learned.returns:
            self.route.learned.returns[kind] = tree_map(Shape.of, output)

    def _after_part(self, name: str) -> Callable[..., Any]:
        def after(part: nn.Module, args: Any, output: Any) -> Any:
            if not self.route.first_time or torch._C._current_graph_task_id() != -1:
                return None
            self.route.learned.outputs[name] = tree_map(Shape.of, output)
            return tree_map(_depends, output)

        return after

    # ---- one forward ------------------------------------------------------------------------

    def learned(self, stage: int, signature: Signature) -> Learned | None:
        """What virtual stage `stage` leaves with; None before its first batch of this signature."""
        return self._learned.get((stage, signature))

    def tell(self, stage: int, signature: Signature, learned: Learned) -> None:
        """What virtual stage `stage` left with, elsewhere."""
        self._learned[stage, signature] = learned

    def forward(
        self, stage: int, received: tuple[Tensor, ...], signature: Signature, call: Callable[[nn.Module], Any]
    ) -> Any:
        """Run a virtual stage.

        Args:
            received: what the virtual stage before it returned; the first one takes nothing.
            signature: of the batch.
            call: calls the model with the batch.

        Returns:
            What the next one needs; of the last one what the model returns.
        """
        if stage and self.sequence is not None:
            slicing = self._learned[stage - 1, signature].slicing
            assert slicing is not None
            self.sequence.go_on(slicing)
        known = self.learned(stage, signature)
        before = self._learned[stage - 1, signature] if stage else Learned()
        learned = known or Learned(dict(before.returns), dict(before.outputs))
        route, leave = self.route, self.boundaries[stage + 1]
        route.enter, route.leave, route.received = self.boundaries[stage], leave, received
        route.arriving, route.learned, route.first_time = before, learned, known is None
        last = stage == self.virtual_stages - 1
        probing = torch.enable_grad() if known is None and not last else nullcontext()
        try:
            with self._showing(stage), probing:
                output = call(self.model)
        except Left as left:
            crossing = self.route.crossing(self._names[leave], left.call)
            learned.slicing = self.sequence.pause() if self.sequence is not None else None
            self._learned[stage, signature] = learned
            return crossing
        finally:
            route.received = ()  # nothing here keeps it from being freed
        if self.sequence is not None and stage:
            learned.slicing = before.slicing
        self._learned[stage, signature] = learned
        return output

    def before_backward(self, stage: int, signature: Signature) -> None:
        """Blocks may be recomputed: as they were in the forward of this signature."""
        slicing = self._learned[stage, signature].slicing
        if self.sequence is not None and slicing is not None:
            self.sequence.recall(slicing)


def _depends(value: Any) -> Any:
    """A tensor that autograd takes for the start of everything."""
    if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
        return value.detach().requires_grad_()
    return value


def _shared(parts: Parts, boundaries: Sequence[int], rank_of: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Parameters that several ranks hold, by their first name, and these ranks."""
    holders: dict[nn.Parameter, set[int]] = {}
    names: dict[nn.Parameter, str] = {}
    places = [(name, module, rank_of[0]) for name, module in parts.before]
    for k, rank in enumerate(rank_of):
        places += [(name, module, rank) for name, module in parts.blocks[boundaries[k] : boundaries[k + 1]]]
    places += [(name, module, rank_of[-1]) for name, module in parts.after]
    for name, module, rank in places:
        for inner, parameter in module.named_parameters(remove_duplicate=False):
            holders.setdefault(parameter, set()).add(rank)
            names.setdefault(parameter, f"{name}.{inner}")
    return {names[p]: tuple(sorted(ranks)) for p, ranks in holders.items() if len(ranks) > 1}
