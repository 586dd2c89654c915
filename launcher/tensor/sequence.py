"""Sequence parallelism (Megatron; Korthikanti et al. 2022): between split layers each rank of the tp axis
works on its slice of the sequence, so norms, residuals and dropout are neither computed nor stored
redundantly.

```
embedding -> slice -> [norm -> gather | region | reduce-scatter -> residual -> ...] -> gather -> norm, head
```

A region needs whole sequences: any child of a block except norms and dropout (mostly attention and MLP). Its
input is gathered along the sequence, once for all readers. If the region ends in one row-parallel layer, its
output, a partial sum, is reduce-scattered; any other region computes whole sequences, of which each rank
takes its slice. Parameters of a block outside of its regions are applied to a slice, so their gradients are
partial. A module that makes split features for the next one (BERT's intermediate) takes and returns whole
sequences.

Hooks on blocks run in the forward only. Hooks on regions run again when a block is recomputed in backward, so
the slicing of a forward is kept until the next forward that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm import Axis
from launcher.errors import ConfigError
from launcher.tensor.dropout import RandomStreams
from launcher.tensor.functions import enter_gathered, gather_along, slice_along
from launcher.tensor.layers import (
    ColumnParallel,
    PartialExperts,
    RowParallel,
    SequenceState,
    SplitModule,
    SummedOutput,
)

WHERE = "tensor_parallel.sequence_parallel"
_ELEMENTWISE = ("norm", "dropout", "identity", "activation", "gelu", "silu", "relu")  # in class names
_REDUCING = (RowParallel, PartialExperts, SummedOutput)
_LISTS = (nn.ModuleList, nn.ModuleDict)
_STATES = ("hidden_states", "x", "hidden_state", "inputs")  # keywords of a block's input activations

ForwardArguments = tuple[tuple[Any, ...], dict[str, Any]]
Slicing = tuple[bool, int]  # whether sequences are sliced, and their whole length


class SequenceParallel:
    """Slices sequences between the blocks of a model whose layers are split.

    Args:
        blocks: in forward order; a block takes and returns [batch, sequence, ...].
        streams: random numbers for dropout; inside of blocks each rank draws its own, because it works on a
            slice.
        summed: parameters that are split, or whose gradients the plan sums over the ranks.
        overlaps: as in `enter`.
    """

    def __init__(
        self,
        axis: Axis,
        blocks: list[tuple[str, nn.Module]],
        streams: RandomStreams,
        summed: set[nn.Parameter],
        *,
        overlaps: bool,
    ) -> None:
        self.axis, self.blocks, self.streams, self.overlaps = axis, blocks, streams, overlaps
        self.summed = summed
        # of the current forward; afterwards, for recomputation, of the last forward that is trained
        self.state = SequenceState()
        self._trained = False, 0
        self._begun = False
        self.partial: set[nn.Parameter] = set()

    def install(self) -> None:
        """Register hooks on the blocks and their regions, and collect the parameters with partial
        gradients."""
        for place, (name, block) in enumerate(self.blocks):
            first, last = place == 0, place == len(self.blocks) - 1
            block.register_forward_pre_hook(self._before_block(name, first=first), with_kwargs=True)
            regions = set()
            for region_name, region in _regions(name, block):
                regions |= set(region.modules())
                self._install_region(region_name, region)
            block.register_forward_hook(self._after_block(name, last=last), always_call=True)
            outside = [module for module in block.modules() if module not in regions]
            self.partial |= {p for module in outside for p in module._parameters.values() if p is not None}

    def _install_region(self, name: str, region: nn.Module) -> None:
        for module in region.modules():
            if isinstance(module, SplitModule):
                module.split.sequence = self.state
        if isinstance(region, RowParallel) and not region.split.slices:
            region.split.scatters = 2
            self._sees_a_slice(region)
            return
        region.register_forward_pre_hook(self._before_region(name), with_kwargs=True)
        reducing = [m for m in region.modules() if isinstance(m, _REDUCING)]
        if not reducing and _splits_features(region):  # its output, of whole sequences, is for another region
            return
        if (
            len(reducing) == 1
            and isinstance(reducing[0], RowParallel)
            and self._all_know(region, reducing[0])
        ):
            reducing[0].split.scatters = 3
            self._sees_a_slice(reducing[0])
        elif self.streams.on and any(isinstance(m, nn.Dropout) and m.p > 0 for m in region.modules()):
            raise ConfigError(
                f"{name} applies dropout after an all-reduce, which sequence parallelism does not support",
                where=WHERE,
                fix="set it to false, or set the model's dropout (and lora_dropout) to 0",
            )
        region.register_forward_hook(self._after_region(name))

    def _all_know(self, region: nn.Module, row: RowParallel) -> bool:
        """Return whether `summed` has all parameters of unsplit modules in the region. One that is missing,
        and applied to a slice after the reduce-scatter, would have a partial gradient that is not summed."""
        inner = row._modules.get(row.split.inner)  # a layer with adapters; `_sees_a_slice` adds its bias
        plain = [m for m in region.modules() if not isinstance(m, SplitModule) and m is not inner]
        return self.summed.issuperset(
            p for module in plain for p in module._parameters.values() if p is not None
        )

    def _sees_a_slice(self, row: SplitModule) -> None:
        """Mark the bias as partial: it is added to this rank's slice."""
        self.partial |= {p for key, p in row.own_parameters().items() if key == "bias" and p is not None}

    # ---- pipeline stages --------------------------------------------------------------------

    def pause(self) -> Slicing:
        """Suspend a forward that leaves this stage between two blocks; return its slicing for the next
        stage."""
        found = self.state.active, self.state.length
        self._begun = False
        self.recall(self._trained)
        return found

    def go_on(self, slicing: Slicing) -> None:
        """Resume a forward that enters this stage between two blocks."""
        self.recall(slicing)
        self._begun = True
        if torch.is_grad_enabled():
            self._trained = slicing

    def recall(self, slicing: Slicing) -> None:
        """Restore the slicing of a forward, whose blocks are recomputed next."""
        self.state.active, self.state.length = slicing

    # ---- blocks -----------------------------------------------------------------------------

    def _before_block(self, name: str, *, first: bool) -> Callable[..., ForwardArguments]:
        def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardArguments:
            if first:
                self._begin(_states_of(args, kwargs)[1])
            elif not self._begun:
                raise ConfigError(
                    f"{name} runs before {self.blocks[0][0]}, where the sequences are split",
                    where=WHERE,
                    fix="set it to false, or set the model's layerdrop to 0 if it skips layers randomly",
                )
            if not self.state.active:
                return args, kwargs
            self.streams.begin_split(block.training)
            if first:
                return _mapped(args, kwargs, lambda x: slice_along(x, self.axis, 1, f"{name}.sequence"))
            return args, kwargs

        return before

    def _after_block(self, name: str, *, last: bool) -> Callable[..., Any]:
        def after(block: nn.Module, args: Any, output: Any) -> Any:
            self.streams.end_split()
            if not last:
                return None
            active, self._begun = self.state.active, False
            self.recall(self._trained)
            if not active:
                return None
            return _first(output, lambda x: gather_along(x, self.axis, 1, f"{name}.sequence"))

        return after

    def _begin(self, states: Tensor) -> None:
        self.state.active, self.state.length = self._divides(states), states.shape[1]
        self._begun = True
        if torch.is_grad_enabled():
            self._trained = self.state.active, self.state.length

    def _divides(self, states: Tensor) -> bool:
        length = states.shape[1]
        if length % self.axis.degree == 0:
            return True
        if not torch.is_grad_enabled():  # token-by-token generation: no activations are saved
            return False
        raise ConfigError(
            f"a sequence of {length} tokens cannot be split evenly over {self.axis.degree} "
            "tensor-parallel ranks",
            where=WHERE,
            fix=f"pad batches to a multiple of {self.axis.degree} tokens (pad_to_multiple_of of the data collator)",
        )

    # ---- regions ----------------------------------------------------------------------------

    def _before_region(self, name: str) -> Callable[..., ForwardArguments]:
        def before(region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardArguments:
            if not self.state.active:
                return args, kwargs
            return _mapped(args, kwargs, lambda x: enter_gathered(x, self.axis, name, overlaps=self.overlaps))

        return before

    def _after_region(self, name: str) -> Callable[..., Any]:
        def after(region: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return _first(output, lambda x: self._sliced(x, name)) if self.state.active else None

        return after

    def _sliced(self, x: Tensor, name: str) -> Tensor:
        """Slice whole sequences [batch, sequence, ...] or [batch x sequence, hidden]; return others as is."""
        length = self.state.length
        if x.dim() == 2 and x.shape[0] % length == 0:
            return slice_along(x.view(-1, length, x.shape[1]), self.axis, 1, name).flatten(0, 1)
        return slice_along(x, self.axis, 1, name) if x.dim() > 2 and x.shape[1] == length else x


def _regions(name: str, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a block that need whole sequences."""
    for key, child in block.named_children():
        elementwise = any(word in type(child).__name__.lower() for word in _ELEMENTWISE)
        splits = [m for m in child.modules() if isinstance(m, SplitModule)]
        # BERT has row-parallel layer, residual and norm in one module; DBRX norm, attention and norm.
        ends = any(isinstance(m, RowParallel) and not m.split.slices for m in splits)
        inner = (elementwise and splits) or (ends and not _splits_features(child))
        if isinstance(child, _LISTS) or (inner and child not in splits):
            yield from _regions(f"{name}.{key}", child)
        elif not elementwise or child in splits:
            yield f"{name}.{key}", child


def _splits_features(module: nn.Module) -> bool:
    return any(isinstance(m, ColumnParallel) and m.split.gathers is None for m in module.modules())


def _mapped(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> ForwardArguments:
    """Return the arguments with `change` applied to the activations."""
    key, states = _states_of(args, kwargs)
    changed = change(states)
    if key is not None:
        return args, {**kwargs, key: changed}
    # Some attention modules take the activations three times, as query, key and value.
    return tuple(changed if arg is states else arg for arg in args), kwargs


def _states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, Tensor]:
    """Return the keyword of the activations (None: the first positional argument), and the activations."""
    if args and isinstance(args[0], Tensor):
        return None, args[0]
    for key in _STATES:
        if isinstance(kwargs.get(key), Tensor):
            return key, kwargs[key]
    raise ConfigError(
        f"cannot identify the activations among the arguments of a block or a part of it: {list(kwargs)}",
        where=WHERE,
        fix="set it to false for this model",
    )


def _first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with `change` applied to its activations: the tensor, or the first item of a tuple."""
    if isinstance(output, Tensor):
        return change(output)
    return type(output)((change(output[0]), *output[1:]))
