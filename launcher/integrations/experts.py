"""`deepspeed.moe`: names that models import whether they have experts or not. A model with some is not trained here, so
the answers are those of a dense one; a parameter that is marked as an expert's is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from launcher.errors import LauncherError
from launcher.integrations.refused import NotHere, missing


class MoE(nn.Module):
    """Mixture-of-experts layers are not available.

    Raises:
        LauncherError: one is made.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        raise LauncherError(
            "deepspeed.moe.layer.MoE is not available",
            fix='use a Hugging Face model with experts: "expert_parallel": {"size": N} spreads them over ranks; for '
            "DeepSpeed itself write `launch --no_deepspeed_shim ...`",
        )


def is_moe_param(param: Tensor) -> bool:
    """Return whether a parameter belongs to one expert only: none does."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether there is a layer of experts, and of how many: none can be made."""
    return any(isinstance(module, MoE) for module in m.modules()), 0


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Sequence[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return all parameters as shared, and none as experts'."""
    _check(params)
    return list(params), []


def split_params_grads_into_shared_and_expert_params(
    group: Sequence[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients that there are, and none."""
    _check(group)
    return [param.grad for param in group if param.grad is not None], []


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the groups as they are: there is nothing to split off."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    for group in groups:
        _check(group["params"])
    return [{**group, "params": list(group["params"])} for group in groups]


def configure_moe_param_groups(model_parameters: Sequence[Any]) -> list[Any]:
    """Return the parameters, or the groups, as they are."""
    given = list(model_parameters)
    _check([one for one in given if isinstance(one, Tensor)])
    return given


def _check(params: Sequence[Tensor]) -> None:
    if any(is_moe_param(param) for param in params):
        what, how = missing("moe.layer.MoE", "a parameter of an expert (its `allreduce` is False)")
        raise NotHere(what, **how)
