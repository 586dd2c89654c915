"""A capacity for experts whose router has none: excess tokens are dropped, to limit waiting."""

from __future__ import annotations

from typing import Any

from torch import nn

from launcher.errors import ConfigError
from launcher.experts.gates import DROPPED, capacity_of, keep_heaviest
from launcher.experts.modules import arguments_of, experts_in, number_of
from launcher.models.units import SPREAD, SPREAD_OVER

KEY = "expert_parallel.capacity_factor"


def limit(model: nn.Module, factor: float, *, whole: bool) -> None:
    """In training, drop the (token, expert) pairs that exceed an expert's capacity: those with the smallest
    weights. The other weights are not changed.

    Args:
        factor: the capacity of an expert, as a multiple of an even share of the pairs of a call on this rank.
        whole: this rank has all layers of the model.

    Raises:
        ConfigError: the model has no such experts.
    """
    found = [module for _, module in experts_in(model) if not hasattr(module, SPREAD_OVER)]
    if not found and whole:
        raise ConfigError(
            f"{type(model).__name__} has no experts to which a capacity could apply",
            where=KEY,
            fix="remove the key, or use a mixture-of-experts model such as Mixtral or Qwen3-MoE",
        )

    def keep(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if not module.training:
            return None
        hidden, index, weights = arguments_of(module, args, keywords)
        pairs = index.shape[-1] * index[..., 0].numel()
        count = number_of(module)
        picked, shares = index.reshape(-1, index.shape[-1]), weights.reshape(-1, index.shape[-1])
        kept = keep_heaviest(picked, shares.detach(), count, capacity_of(pairs, count, factor))
        dropped = (kept == DROPPED).view_as(index)
        if hasattr(module, SPREAD):  # dropped pairs are neither sent nor computed
            index = index.masked_fill(dropped, DROPPED)
        return (hidden, index, weights.masked_fill(dropped, 0.0)), {}

    for module in found:  # prepended, to run before tokens are sent
        module.register_forward_pre_hook(keep, prepend=True, with_kwargs=True)
