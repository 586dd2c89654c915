"""Experts that a script builds itself: copies of any module, whose parameters lie in one tensor for all experts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from launcher.comm import Axis
from launcher.errors import LauncherError
from launcher.experts.dispatch import Routing, combine, dispatch
from launcher.models.stacked_names import JOINED, apart, names_apart
from launcher.models.units import SPREAD_OVER

_ALONE = Axis("ep")


class StackedExperts(nn.Module):
    """Experts that are computed one after the other, each on the tokens that want it.

    The parameter `a.b` of the expert is `a__b` here, with one dim more, in front: [experts, ...]. A state dict names
    each expert by itself (`models/stacked_names.py`), and is read in both forms.

    Args:
        expert: what each begins as. It is called with [tokens, hidden size]; of a tuple the first counts.
        count: how many there are.
        spread_over: ranks that share them, each with an even part: once an engine has the model. 1: each has all.

    Raises:
        LauncherError: a parameter of the expert has a name that cannot be told apart then.
    """

    _expert: nn.Module

    def __init__(self, expert: nn.Module, count: int, spread_over: int = 1) -> None:
        super().__init__()
        self.num_experts = count
        self._is_expert_parallel = False  # of transformers: such a module has the experts of a layer
        setattr(self, SPREAD_OVER, spread_over)
        self._names = {
            name: name.replace(".", JOINED)
            for name, _ in (*expert.named_parameters(), *expert.named_buffers())
        }
        if any(JOINED in name for name in self._names):
            raise LauncherError(
                f"a parameter of an expert has {JOINED} in its name",
                where="deepspeed.moe.layer.MoE",
                fix="rename it",
            )
        for name, parameter in expert.named_parameters():
            stacked = torch.stack([parameter.detach()] * count)
            made = nn.Parameter(stacked, parameter.requires_grad)
            if parameter.dim() < 2:
                made.use_muon = False  # type: ignore[attr-defined]  # rows of biases are no matrix
            self.register_parameter(self._names[name], made)
        for name, buffer in expert.named_buffers():
            self.register_buffer(self._names[name], torch.stack([buffer] * count))
        # without values, and not as a submodule: it has no parameters of its own
        self.__dict__["_expert"] = copy.deepcopy(expert).to("meta")
        self.register_state_dict_post_hook(_name_apart)
        self.register_load_state_dict_pre_hook(_stack)

    def train(self, mode: bool = True) -> StackedExperts:
        self._expert.train(mode)
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Give all experts the first values of one, where the model was built without values.

        Raises:
            LauncherError: a module of the expert does not say how it begins.
        """
        with torch.no_grad():
            expert = copy.deepcopy(self._expert).to_empty(device=next(self.parameters()).device)
            for module in expert.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
                elif module._parameters or module._buffers:
                    raise LauncherError(
                        f"{type(module).__name__} of an expert has no reset_parameters(), which would give it values",
                        where="deepspeed.moe.layer.MoE under zero.Init()",
                        fix="give it one, or build the layer outside of zero.Init()",
                    )
            values = dict(expert.named_parameters()) | dict(expert.named_buffers())
            for name, key in self._names.items():
                getattr(self, key).copy_(values[name].expand_as(getattr(self, key)))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [T, H] of what its experts make of each token.

        Args:
            hidden: [T, H].
            index: [T, k], the experts of each. A number that is none adds nothing.
            weights: [T, k].
        """
        routing = Routing.of(_ALONE, [self.num_experts], index)
        rows = dispatch(hidden, routing)
        trains = rows.requires_grad or any(parameter.requires_grad for parameter in self.parameters())
        return combine(self._compute(rows, routing.local_experts), weights, rows, routing, trains=trains)

    def _compute(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Return what each row's expert makes of it, [pairs, H] -> [pairs, H]; `experts` are in order."""
        counts = torch.bincount(experts, minlength=self.num_experts).tolist()
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


def _name_apart(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    assert isinstance(module, StackedExperts)
    for key in module._names.values():
        whole = f"{prefix}{key}"
        if whole in state and len(state[whole]) == module.num_experts:  # at ZeRO 3 there may be nothing in it
            state |= apart(whole, state.pop(whole))


def _stack(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    assert isinstance(module, StackedExperts)
    for key in module._names.values():
        names = names_apart(f"{prefix}{key}", module.num_experts)
        if names and all(name in state for name in names):
            state[f"{prefix}{key}"] = torch.stack([state.pop(name) for name in names])
