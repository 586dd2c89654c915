"""`experts.apply` shards the experts of a model over the ranks of the axis `ep`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm import Axis, Mesh, broadcast
from launcher.comm.plain import gather_plain
from launcher.errors import ConfigError, LauncherError
from launcher.experts import compute
from launcher.experts.adapters import adapters_in, take_rows
from launcher.experts.dispatch import combine, dispatch
from launcher.experts.modules import arguments_of, experts_in, keep, number_of
from launcher.experts.routing import Routing, RowsBy
from launcher.models.units import SPREAD_OVER
from launcher.tensor.adapters import unsupported_parameters
from launcher.tensor.functions import gather_along, slice_along, sliced
from launcher.tensor.parts import even_sizes
from launcher.tensor.split import DimSlice, Split
from launcher.tensor.split_model import SplitModel

KEY = "expert_parallel.size"


def apply(model: nn.Module, axis: Axis, mesh: Mesh, by: RowsBy = "pairs") -> SplitModel:
    """Keep only this rank's experts in every layer, in place. Every rank must call it.

    Parameters on meta stay on meta, with this rank's shape. Others keep this rank's shard of rank 0's values.

    Args:
        axis: ep.
        mesh: ranks of its axis tp have the same tokens, and each sends its share of them; ranks of its axis
            pp may have other layers of the model.
        by: what ranks send each other: see `routing`.

    Raises:
        ConfigError: there are no experts, or fewer experts than ranks; or experts with adapters that tp ranks share.
    """
    found = [
        (name, module) for name, module in experts_in(model) if getattr(module, SPREAD_OVER, axis.degree) > 1
    ]
    pp = mesh.axes["pp"]
    if not any([bool(found)] if pp.group is None else gather_plain(bool(found), pp.group)):
        raise ConfigError(
            f"{type(model).__name__} has no experts that transformers calls through ExpertsInterface, so expert "
            "parallelism is not possible",
            where=KEY,
            fix="remove expert_parallel, or use a mixture-of-experts model such as Mixtral or Qwen3-MoE; "
            "docs/models.md lists the supported types, and `--model default-moe` is a small one",
        )
    spread, local = SplitModel(axis), dict[nn.Parameter, nn.Parameter]()
    adapters = adapters_in(model)
    for number, (name, module) in enumerate(found):
        experts = _dealt(name, module, axis)
        if module in adapters and mesh.axes["tp"].degree > 1:  # each tp rank has gradients of other tokens
            raise unsupported_parameters(name)
        exchange = _Exchange(axis, mesh.axes["tp"], experts, (number, name), adapters.get(module, []), by)
        for adapter in exchange.adapters:
            take_rows(adapter, exchange.mine)
        spread.splits |= _split(name, module, exchange, local)
        exchange.install(module)
    return spread


@dataclass
class _Exchange:
    """The exchange around the call of one layer's experts, as hooks of their module.

    Args:
        axis: ep.
        tp: axis of the ranks that have the same tokens.
        experts: number of experts on each rank.
        layer: index among the expert layers of this rank's model, and name.
        adapters: wrappers of the experts that adapt their parameters.
        by: what ranks send each other.
    """

    axis: Axis
    tp: Axis
    experts: list[int]
    layer: tuple[int, str]
    adapters: list[nn.Module]
    by: RowsBy

    @property
    def mine(self) -> DimSlice:
        start = sum(self.experts[: self.axis.rank])
        return DimSlice(start, start + self.experts[self.axis.rank])

    def install(self, module: nn.Module) -> None:
        self._calls: list[tuple[torch.Size, Tensor, Tensor, Routing, bool]] = []
        keep(module, self.experts[self.axis.rank])
        compute.install(module)
        module.register_state_dict_pre_hook(_refuse_state_dict)
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, always_call=True)

    def before(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Call the experts with their tokens from all ranks, each with one expert of weight 1."""
        hidden, index, weights = arguments_of(module, args, keywords)  # [..., H], [..., k], [..., k]
        rows = self._share(hidden.reshape(-1, hidden.shape[-1]))
        weights = self._share(weights.reshape(-1, weights.shape[-1]))
        picked = sliced(index.reshape(-1, index.shape[-1]), self.tp, 0)
        routing = Routing.of(self.axis, self.experts, picked, self.layer, self.by)
        received, weights = dispatch(rows, weights, routing)
        trained = (p.requires_grad for part in (module, *self.adapters) for p in part.parameters())
        trains = rows.requires_grad or any(trained)
        self._calls.append((hidden.shape, weights, received, routing, trains))
        return (received, routing.local_experts[:, None], weights.new_ones(len(received), 1)), {}

    def after(self, module: nn.Module, args: Any, output: Tensor | None) -> Tensor | None:
        """Send the experts' outputs back to the ranks of their tokens."""
        if not self._calls:  # `before` has failed
            return None
        shape, weights, received, routing, trains = self._calls.pop()
        if output is None:
            return None
        mine = combine(output, weights, received, routing, trains=trains)
        sizes = even_sizes(shape[:-1].numel(), self.tp.degree)
        return gather_along(mine, self.tp, 0, "experts", sizes).view(shape)

    def _share(self, x: Tensor) -> Tensor:
        """Return this rank's rows of [T, ...], which all tp ranks have; backward gathers their gradients."""
        return slice_along(x, self.tp, 0, "experts")


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise an error rather than let a script save the experts of one rank as the model."""
    raise LauncherError(
        f"{prefix.removesuffix('.')} has {module.num_experts} of its {number_of(module)} experts on this rank; "
        "state_dict() would omit the rest",
        where="state_dict(), which save_pretrained() calls",
        fix="call engine.save_16bit_model(DIRECTORY) on every rank: it writes all experts, for from_pretrained() or "
        "load_state_dict()",
    )


def _dealt(name: str, module: nn.Module, axis: Axis) -> list[int]:
    """Return the number of a layer's experts on each rank."""
    count = number_of(module)
    if count < axis.degree:
        raise ConfigError(
            f"{KEY} {axis.degree} exceeds the {count} experts of {name}; some ranks would have none",
            where=KEY,
            fix=f"use a size of at most {max(1, count)}",
        )
    return even_sizes(count, axis.degree)


def _split(
    name: str, module: nn.Module, exchange: _Exchange, local: dict[nn.Parameter, nn.Parameter]
) -> dict[str, Split]:
    """Replace every parameter that has a row for each expert with this rank's shard, and return the splits.
    Others (a norm that all experts share) stay unsharded; their gradients are summed over ranks as usual.

    Args:
        local: parameter of the model -> its replacement; layers may share a parameter.
    """
    splits, all_experts, mine = {}, sum(exchange.experts), exchange.mine
    stacked = hasattr(module, SPREAD_OVER)  # all of its tensors have a row for each expert
    if stacked and module._buffers:
        raise ConfigError(
            f"the experts of {name} have buffers ({', '.join(module._buffers)}), which cannot be sharded over ranks",
            where="ep_size",
            fix="set ep_size to 1, or use experts without buffers, for example with LayerNorm instead of BatchNorm",
        )
    for key, parameter in list(module._parameters.items()):
        if parameter is None or not parameter.dim() or parameter.shape[0] != all_experts:
            continue
        if parameter.dim() == 1 and not stacked:
            continue
        longest = max(exchange.experts) * prod(parameter.shape[1:])
        split = Split(parameter.shape, (mine,), padded_numel=longest)
        if parameter not in local:
            local[parameter] = _local(parameter, split, exchange.axis)
        module._parameters[key] = local[parameter]
        splits[f"{name}.{key}"] = split
    if not splits:
        raise ConfigError(
            f"{name} has no parameters with a row for each expert", where=KEY, fix="remove the key"
        )
    return splits


def _local(parameter: nn.Parameter, split: Split, axis: Axis) -> nn.Parameter:
    """Return this rank's shard of a parameter; on meta if the parameter is."""
    data = torch.empty(split.local_shape, dtype=parameter.dtype, device="meta")
    if not parameter.is_meta:
        data = split.take(_of_first(parameter, axis)).clone()
    local = nn.Parameter(data, requires_grad=parameter.requires_grad)
    local.__dict__.update(parameter.__dict__)
    return local


def _of_first(parameter: nn.Parameter, axis: Axis) -> Tensor:
    """Broadcast the values of the first rank, because each rank may have built its own model."""
    data = parameter.data.contiguous()
    broadcast(data.view(-1), axis, "experts/split").wait()
    return data
