"""`deepspeed.moe`: MoE layers for models that scripts build themselves, and helpers for expert parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.errors import ArgumentsError
from launcher.experts import gates
from launcher.experts.stacked import StackedExperts
from launcher.zero import GatheredParameters, is_partitioned

NOISES = (None, "None", "Jitter", "RSample")
JITTER = 1e-2


class _Gate(nn.Module):
    """A linear router that selects k experts per token (`launcher/experts/gates.py`).

    Args: the same as those of `MoE`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        k: int,
        capacity_factor: float,
        eval_capacity_factor: float,
        min_capacity: int,
        noisy_gate_policy: str | None,
        drop_tokens: bool,
        use_rts: bool,
        top2_2nd_expert_sampling: bool,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(hidden_size, num_experts, bias=False)
        self.k, self.min_capacity, self.noisy_gate_policy = k, min_capacity, noisy_gate_policy
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> gates.Gating:
        """Return the gating decision for tokens [T, hidden], computed in fp32."""
        tokens = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            tokens = tokens * _jitter(tokens)
        logits = F.linear(tokens, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        if self.k == 1:
            noise = self.noisy_gate_policy == "RSample" and self.training
            return gates.top1(
                logits, factor, self.min_capacity,
                used=used_token, noise=noise, drop=self.drop_tokens, random=self.use_rts,
            )  # fmt: skip
        if self.k == 2:
            sample = self.top2_2nd_expert_sampling
            return gates.top2(logits, factor, self.min_capacity, drop=self.drop_tokens, sample=sample)
        return gates.topk(logits, self.k, factor, self.min_capacity, drop=self.drop_tokens)


def _jitter(tokens: Tensor) -> Tensor:
    low, high = tokens.new_tensor(1 - JITTER), tokens.new_tensor(1 + JITTER)
    drawn: Tensor = torch.distributions.Uniform(low, high).rsample(tokens.shape)
    return drawn


class _Layer(nn.Module):
    """The gate and the experts, under DeepSpeed's attribute names.

    Attributes:
        l_aux, exp_counts: load-balancing loss and per-expert token counts of the last forward.
    """

    def __init__(self, gate: _Gate, experts: StackedExperts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None

    def forward(self, hidden: Tensor, used_token: Tensor | None) -> Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        found = self.gate(tokens, used_token)
        self.l_aux, self.exp_counts = found.loss, found.counts
        result: Tensor = self.experts(tokens, found.experts, found.weights)
        return result.view_as(hidden)


class MoE(nn.Module):
    """An MoE layer with a gate, for models that scripts build themselves.

    The experts are copies of one module. With `ep_size` N, initialize() shards them over N neighbouring
    ranks, the same as "expert_parallel": {"size": N}. They work at every ZeRO stage and need no separate
    optimizer param groups.

    Args:
        hidden_size: width of inputs and outputs.
        expert: the module that every expert starts as a copy of. It is called with [tokens, hidden_size].
        num_experts: total number of experts, over all ranks.
        ep_size: expert-parallel degree; must divide num_experts.
        k: experts per token.
        capacity_factor, eval_capacity_factor: the capacity of an expert as a multiple of an even share of a
            rank's tokens, in training and in evaluation.
        min_capacity: lower bound of the capacity, in tokens.
        use_residual: add the weighted output of one more expert that processes all tokens (Rajbhandari et al.
            2022, arXiv:2201.05596).
        noisy_gate_policy: "Jitter", or for k = 1 "RSample".
        drop_tokens: enforce the capacity. The output of tokens that no expert takes is 0.
        use_rts: for k = 1, a full expert keeps random tokens instead of the first ones.
        use_tutel: has no effect: Tutel is not needed.
        enable_expert_tensor_parallelism: must be False; experts are not tensor-parallel.
        top2_2nd_expert_sampling: for k = 2, choose the second expert at random.

    Raises:
        ArgumentsError: arguments contradict each other.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        numbers = {
            "hidden_size": hidden_size, "num_experts": num_experts, "ep_size": ep_size, "k": k,
            "min_capacity": min_capacity, "capacity_factor": capacity_factor,
            "eval_capacity_factor": eval_capacity_factor,
        }  # fmt: skip
        _check(expert, numbers, noisy_gate_policy, enable_expert_tensor_parallelism)
        self.ep_size, self.num_experts, self.num_local_experts = ep_size, num_experts, num_experts // ep_size
        self.use_residual, self.expert_group_name = use_residual, f"ep_size_{ep_size}"
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        with _values_of(expert):
            experts = StackedExperts(expert, num_experts, ep_size)
        for parameter in experts.parameters():
            vars(parameter).update(allreduce=False, group_name=self.expert_group_name)
        gate = _Gate(
            hidden_size, num_experts, k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy,
            drop_tokens, use_rts, top2_2nd_expert_sampling,
        )  # fmt: skip
        self.deepspeed_moe = _Layer(gate, experts)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: initialize() creates the process groups."""

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (output, load-balancing loss, tokens routed to each expert before any is dropped).

        Args:
            hidden_states: [..., hidden_size].
            used_token: [tokens], 0 for tokens that are not routed to any expert; only for k = 1.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            made = self.mlp(hidden_states)
            whole = made[0] if isinstance(made, tuple) else made
            shares = self.coefficient(hidden_states).softmax(-1)
            output = output * shares[..., :1] + whole * shares[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def _values_of(expert: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which parameters sharded by zero.Init() are gathered."""
    sharded = [parameter for parameter in expert.parameters() if is_partitioned(parameter)]
    return GatheredParameters(sharded) if sharded else nullcontext()


def _check(expert: object, numbers: Mapping[str, Any], noise: str | None, split: bool) -> None:
    """Raise ArgumentsError for invalid arguments."""
    num_experts, ep_size, k = (numbers[name] for name in ("num_experts", "ep_size", "k"))
    found = _wrong_number(numbers)
    if not isinstance(expert, nn.Module):
        found = (
            f"expert is a {type(expert).__name__}, not a module",
            "pass the module that is copied for each expert",
        )
    elif found is not None:
        pass
    elif num_experts % ep_size:
        found = (
            f"num_experts ({num_experts}) is not divisible by ep_size ({ep_size})",
            f"use {-(-num_experts // ep_size) * ep_size} experts",
        )
    elif k > num_experts:
        found = f"k is {k}, but there are {num_experts} experts", f"use 1 to {num_experts}"
    elif noise not in NOISES:
        found = f"unknown noisy_gate_policy {noise!r}", "use None, 'Jitter' or 'RSample'"
    elif split:
        found = "tensor parallelism of experts is not supported", "remove enable_expert_tensor_parallelism"
    if found is not None:
        raise ArgumentsError(found[0], where="deepspeed.moe.layer.MoE", fix=found[1])


def _wrong_number(numbers: Mapping[str, Any]) -> tuple[str, str] | None:
    for name, number in numbers.items():
        whole, least = "factor" not in name, int("capacity" not in name)
        right = isinstance(number, int if whole else int | float) and not isinstance(number, bool)
        if not (right and least <= number < math.inf):
            kind = "whole number" if whole else "number"
            return f"{name} is {number!r}", f"use a {kind} of at least {least}"
    return None


def is_moe_param(param: Tensor) -> bool:
    """Return whether a parameter belongs to the experts of an `MoE`."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether the model contains an `MoE`, and the number of experts of the first one (0 without)."""
    found = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return found is not None, 0 if found is None else found.num_experts


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Sequence[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (shared parameters, expert parameters)."""
    shared = [param for param in params if not is_moe_param(param)]
    return shared, [param for param in params if is_moe_param(param)]


def split_params_grads_into_shared_and_expert_params(
    group: Sequence[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the existing gradients as (shared, expert) lists."""
    shared, experts = split_params_into_shared_and_expert_params([p for p in group if p.grad is not None])
    return [p.grad.to(p.dtype) for p in shared], [p.grad.to(p.dtype) for p in experts]  # type: ignore[union-attr]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Return the groups without expert parameters, followed by separate groups of the expert parameters.

    Expert parameters are grouped by the name of their process group. The engine's optimizers do not need
    this.

    Args:
        param_groups: groups with "name" and "params".
        max_group_size: maximum number of elements in a group of expert parameters; None: unlimited.
    """
    given = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    groups, of_experts = [], []
    for group in given:
        shared, experts = split_params_into_shared_and_expert_params(list(group["params"]))
        groups.append({**group, "params": shared})
        for name in dict.fromkeys(getattr(param, "group_name", "") for param in experts):
            same = [param for param in experts if getattr(param, "group_name", "") == name]
            of_experts += [
                {**group, "name": name, "moe": True, "params": part} for part in _parts(same, max_group_size)
            ]
    return groups + of_experts


def _parts(params: list[nn.Parameter], most: float | None) -> Iterator[list[nn.Parameter]]:
    part: list[nn.Parameter] = []
    for param in params:
        if part and most is not None and sum(p.numel() for p in part) + param.numel() > most:
            yield part
            part = []
        part.append(param)
    yield part


def configure_moe_param_groups(model_parameters: Sequence[Any]) -> list[Any]:
    """Return param groups with expert parameters in separate groups, given parameters or param groups.

    Groups that are already split are returned unchanged.
    """
    given = list(model_parameters)
    if given and isinstance(given[0], Tensor):
        return split_params_into_different_moe_groups_for_optimizer({"params": given, "name": "dense-params"})
    if any("moe" in group for group in given):
        return given
    return split_params_into_different_moe_groups_for_optimizer(given)
