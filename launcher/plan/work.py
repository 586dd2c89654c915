"""The work that a model makes for a device, from the model itself on meta: operations, bytes of memory, parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from launcher.experts.modules import experts_in, number_of
from launcher.models.build import build_on_meta
from launcher.pipeline.hf.costs import LayerCosts, model_costs
from launcher.pipeline.hf.parts import parts_of
from launcher.pipeline.partition.costs import elements

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear", "matmul", "convolution"}


@dataclass(frozen=True)
class ModelWork:
    """The work of a causal LM, for one sequence.

    Args:
        layers: blocks of the model.
        hidden: numbers that a token is between two blocks.
        heads: what tensor parallelism has to divide.
        sequence: tokens.
        groups: key-value heads, fewer than `heads` where several of these read the same one.
        parameters: of the whole model; a tied one counts once.
        flops: of the forward, all blocks and the head.
        traffic: bytes that operations other than products read and write in the forward of all blocks.
        itemsize: bytes of a number that is computed with, and sent: 2, or 4 for fp32.
        experts: of the layer that has fewest, where tokens can be sent to them; 0: none.
        expert_parameters: those of all experts, of `parameters`.
        expert_layers: how many layers have experts.
        picked: experts of a token.
        in_one_piece: layers and sequences cannot be cut: the model has a loss of all its routers and tokens.
        expert_load: tokens that the experts of the busiest rank get, compared with an even share, where ranks share
            them: the others wait for it.
        costs: of the blocks and the ends, by which stages are cut; None: blocks are alike, and the ends cost nothing.
        weight_flops: of `flops`, those of products with weights; the others are attention.
        adapters: parameters of the LoRA adapters, where only these are trained; 0: all parameters are trained.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    parameters: int
    flops: float
    traffic: float
    itemsize: int = 2
    groups: int = 0  # 0: as many as heads
    experts: int = 0
    expert_parameters: int = 0
    expert_layers: int = 0
    picked: int = 0
    in_one_piece: bool = False
    expert_load: float = 1.0
    costs: LayerCosts | None = None
    weight_flops: float = 0.0
    adapters: int = 0

    @property
    def unstaged(self) -> bool:
        """Return whether layouts with pipeline stages are left out: the estimate does not know adapters in stages."""
        return self.in_one_piece or self.adapters > 0

    @property
    def trained(self) -> int:
        """Return the number of parameters with a gradient."""
        return self.adapters or self.parameters

    @property
    def weight_share(self) -> float:
        """Return the FLOPs of weight gradients, and of half of attention's backward, as a share of the forward's: less
        than 1 where weights are frozen."""
        frozen = self.weight_flops - 2 * self.sequence * self.adapters if self.adapters else 0.0
        return 1 - frozen / self.flops

    @property
    def expert_flops(self) -> float:
        """Return those of the forward that experts compute: each token goes through a part of their parameters."""
        used = self.picked / self.experts if self.experts else 0.0
        return 2 * self.sequence * self.expert_parameters * used

    @property
    def end_flops(self) -> float:
        """Return those of the forward that the ends compute, which are never recomputed."""
        if self.costs is None:
            return 0.0
        ends = self.costs.before + self.costs.after
        return self.flops * ends / (ends + sum(self.costs.blocks))

    @property
    def key_width(self) -> float:
        """Return the numbers that the keys of a token are in a block, and its values."""
        return self.hidden * (self.groups or self.heads) / self.heads


def work_of(
    config: PretrainedConfig, sequence: int, dtype: torch.dtype = torch.bfloat16, *, adapters: int = 0
) -> ModelWork:
    """Look at one block at work, and count the others like it.

    Args:
        adapters: parameters of LoRA adapters, where only these are trained.

    Raises:
        ConfigError: it is no causal LM with blocks.
    """
    router_loss = bool(getattr(config, "output_router_logits", False))
    if router_loss:  # it costs next to nothing
        config = copy.deepcopy(config)
        config.output_router_logits = False
    model = build_on_meta(config, dtype)
    text: Any = config.get_text_config()
    blocks = parts_of(model).blocks
    costs = model_costs(model, "best", sequence=sequence)
    weights = model_costs(model, "best", sequence=1)  # a single token has no attention to speak of
    of_adapters = 2 * sequence * adapters
    experts = [module for _, module in experts_in(model)]
    return ModelWork(
        layers=len(blocks),
        hidden=text.hidden_size,
        heads=getattr(text, "num_attention_heads", 1),
        sequence=sequence,
        parameters=elements([model]) + adapters,
        flops=_total(costs) + of_adapters,
        traffic=len(blocks) * _traffic_of(model, blocks[0][1], sequence),
        itemsize=dtype.itemsize,
        groups=getattr(text, "num_key_value_heads", 0) or 0,
        experts=min(map(number_of, experts), default=0),
        expert_parameters=elements(experts),
        expert_layers=len(experts),
        picked=getattr(text, "num_experts_per_tok", 0) or getattr(text, "top_k", 0) or 1,
        in_one_piece=router_loss,
        costs=costs,
        weight_flops=sequence * _total(weights) + of_adapters,
        adapters=adapters,
    )


def _total(costs: LayerCosts) -> float:
    return costs.before + sum(costs.blocks) + costs.after


def _traffic_of(model: nn.Module, block: nn.Module, sequence: int) -> float:
    """Return the bytes of the forward of one block; the model's own forward leads to it and ends behind it."""
    traffic = _Traffic()

    def before(module: nn.Module, args: Any) -> None:
        traffic.nbytes = 0.0

    def after(module: nn.Module, args: Any, output: Any) -> None:
        raise _SeenError

    handles = [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
    try:
        with suppress(_SeenError), torch.no_grad(), _OneAttention(), traffic:
            model(input_ids=torch.zeros(1, sequence, dtype=torch.long, device="meta"))
    finally:
        for handle in handles:
            handle.remove()
    return traffic.nbytes


class _SeenError(Exception):
    """The block has been seen."""


class _Traffic(TorchDispatchMode):
    """Adds up what operations read and write, but for views and products: those are bound by arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._opname == "_local_scalar_dense":
            return 1  # of a question to all tokens: whether they are of one sequence, and none is padding
        made = (
            _grouped(func, args, kwargs or {})
            if func._opname == "_grouped_mm"
            else func(*args, **(kwargs or {}))
        )
        if not func.is_view and func._opname not in _PRODUCTS:
            self.nbytes += sum(
                leaf.nbytes for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, Tensor)
            )
        return made


def _grouped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the product on meta, whose kernel refuses fp32, which those of devices take."""
    narrow = [a.bfloat16() if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in args]
    made: Tensor = func(*narrow, **kwargs)
    return made.to(args[0].dtype)


class _OneAttention(TorchFunctionMode):
    """Attention is one kernel on devices, whatever it is made of on meta."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            query, value = args[0], args[2]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **(kwargs or {}))
