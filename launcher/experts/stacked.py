"""Experts that a script builds itself: copies of any module, with their parameters stacked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from launcher.comm import Axis
from launcher.errors import LauncherError, ShardedParameterError
from launcher.experts.counts import counts_of
from launcher.experts.dispatch import combine, dispatch
from launcher.experts.routing import Routing
from launcher.models.stacked_names import JOINED, apart, names_apart
from launcher.models.state_names import persistent_buffers
from launcher.models.units import SPREAD, SPREAD_OVER

_ALONE = Axis("ep")


class StackedExperts(nn.Module):
    """Experts that are computed one after the other, each on the tokens routed to it.

    The parameter `a.b` of the expert becomes `a__b`, with an additional leading dim: [experts, ...]. A state
    dict has separate entries for each expert (`models/stacked_names.py`); both forms can be loaded.

    Args:
        expert: the module that all experts start as copies of. It is called with [tokens, hidden size]; if it
            returns a tuple, the first element is used.
        count: number of experts.
        spread_over: number of ranks over which an engine shards the experts evenly; 1: no sharding.

    Raises:
        LauncherError: the name of a parameter of the expert contains `__`, and would be ambiguous.
    """

    _expert: nn.Module

    def __init__(self, expert: nn.Module, count: int, spread_over: int = 1) -> None:
        super().__init__()
        self.num_experts = count
        self.is_transposed = self.has_bias = False  # as the experts of transformers: `holds_experts`
        setattr(self, SPREAD_OVER, spread_over)
        self._names: dict[str, str] = {}  # name in the expert (all names of a tied tensor) -> here
        self._stack(expert, count)
        # on meta, and not registered as a submodule: it must not add parameters
        self.__dict__["_expert"] = _without_values(expert)
        self.register_state_dict_post_hook(_name_apart)
        self.register_load_state_dict_pre_hook(_read)

    def _stack(self, expert: nn.Module, count: int) -> None:
        keys: dict[Tensor, str] = {}
        kept = {name for name, _ in persistent_buffers(expert)}
        tensors = [*expert.named_parameters(remove_duplicate=False), *expert.named_buffers()]
        for name, tensor in tensors:
            if JOINED in name:
                raise LauncherError(
                    f"expert parameter {name} contains {JOINED!r}, which is reserved as a separator",
                    where="deepspeed.moe.layer.MoE",
                    fix="rename the parameter",
                )
            key = keys.setdefault(tensor, name.replace(".", JOINED))
            self._names[name] = key
            if key in self._parameters or key in self._buffers:
                continue
            stacked = torch.stack([tensor.detach()] * count)
            if not isinstance(tensor, nn.Parameter):
                self.register_buffer(key, stacked, persistent=name in kept)
                continue
            made = nn.Parameter(stacked, tensor.requires_grad)
            if tensor.dim() < 2:
                made.use_muon = False  # type: ignore[attr-defined]  # stacked biases are not a matrix
            self.register_parameter(key, made)

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Call `fn`, which may change values, on each expert's modules as if they belonged to the model."""
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        if not any(tensor.is_meta for tensor in tensors.values()):
            with (
                torch.no_grad(),
                suppress(ShardedParameterError),
            ):  # sharded parameters have no values to change
                for number in range(self.num_experts):
                    self._apply_to(number, tensors, fn)
        return super().apply(fn)

    def _apply_to(self, number: int, tensors: Mapping[str, Tensor], fn: Callable[[nn.Module], Any]) -> None:
        one = copy.deepcopy(self._expert)
        for name, key in self._names.items():
            _put(one, name, tensors[key][number])
        one.apply(fn)
        values = dict(one.named_parameters(remove_duplicate=False)) | dict(one.named_buffers())
        for name, key in self._names.items():  # `fn` may have replaced the tensor
            tensors[key][number].copy_(values[name])

    def train(self, mode: bool = True) -> StackedExperts:
        self._expert.train(mode)
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Initialise all experts with the values of one, for a model that was built without values.

        Raises:
            LauncherError: a module of the expert has no reset_parameters().
        """
        with torch.no_grad():
            expert = copy.deepcopy(self._expert).to_empty(device=next(self.parameters()).device)
            for module in expert.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
                elif module._parameters or module._buffers:
                    raise LauncherError(
                        f"{type(module).__name__} in an expert has no reset_parameters() to initialise it",
                        where="deepspeed.moe.layer.MoE under zero.Init()",
                        fix="add one, or build the layer outside of zero.Init()",
                    )
            values = dict(expert.named_parameters()) | dict(expert.named_buffers())
            for name, key in self._names.items():
                getattr(self, key).copy_(values[name].expand_as(getattr(self, key)))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [T, H] of the outputs of each token's experts.

        Args:
            hidden: [T, H].
            index: [T, k], the experts of each token. Invalid numbers contribute nothing.
            weights: [T, k].
        """
        routing = Routing.of(_ALONE, [self.num_experts], index)
        rows, weights = dispatch(hidden, weights, routing)
        trains = rows.requires_grad or any(parameter.requires_grad for parameter in self.parameters())
        return combine(self._compute(rows, routing.local_experts), weights, rows, routing, trains=trains)

    def _compute(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Apply its expert to each row: [pairs, H] -> [pairs, H]; `experts` are sorted."""
        counts = counts_of(experts, self.num_experts).tolist()
        values = {name: getattr(self, key).unbind(0) for name, key in self._names.items()}
        made = [
            _first(functional_call(self._expert, {name: of[expert] for name, of in values.items()}, (part,)))
            for expert, part in enumerate(rows.split(counts))
            if len(part)
        ]
        return torch.cat(made) if made else torch.zeros_like(rows)


def _first(made: Any) -> Tensor:
    result: Tensor = made[0] if isinstance(made, tuple) else made
    return result


def _without_values(expert: nn.Module) -> nn.Module:
    """Return a copy whose tensors are on meta."""
    copied = copy.deepcopy(expert)
    for module in copied.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = nn.Parameter(_shape(parameter), requires_grad=False)
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else _shape(buffer)
    return copied


def _shape(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    target = module.get_submodule(owner)
    if attribute in target._parameters:
        target._parameters[attribute] = nn.Parameter(value, requires_grad=False)
    else:
        target._buffers[attribute] = value


def _name_apart(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    assert isinstance(module, StackedExperts)
    for whole in {f"{prefix}{key}" for key in module._names.values()} & state.keys():
        with suppress(ShardedParameterError):  # with ZeRO 3, it has no values, like other parameters
            parts = apart(whole, state[whole])
            del state[whole]
            state |= parts


def _read(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    assert isinstance(module, StackedExperts)
    for whole in dict.fromkeys(f"{prefix}{key}" for key in module._names.values()):
        names = names_apart(whole, module.num_experts)
        if hasattr(module, SPREAD) and ({whole, *names} & state.keys()):
            raise LauncherError(
                f"{prefix.removesuffix('.')} has only some of its experts on this rank, and a state dict does "
                "not identify them",
                where="load_state_dict()",
                fix="load values before initialize(), or call engine.load_checkpoint()",
            )
        if names and all(name in state for name in names):
            state[whole] = torch.stack([state.pop(name) for name in names])
