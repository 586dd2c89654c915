"""The work of a model: FLOPs, memory traffic and parameters, determined from the model itself on meta."""

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
        layers: number of blocks.
        hidden: hidden size.
        heads: attention heads, which tp must divide.
        sequence: sequence length in tokens.
        groups: key-value heads; fewer than `heads` with grouped-query attention.
        parameters: parameters of the model; tied ones count once.
        flops: FLOPs of the forward, for all blocks and the head.
        traffic: bytes that operations other than products read and write in the forward of all blocks.
        itemsize: bytes per element in computation and communication: 2, or 4 for fp32.
        experts: experts of the layer with the fewest, if expert parallelism is possible; 0 without experts.
        expert_parameters: the part of `parameters` in experts.
        expert_layers: number of layers with experts.
        picked: experts per token.
        in_one_piece: layers and sequences cannot be split, because the loss includes all routers and tokens.
        expert_load: tokens routed to the experts of the busiest rank, relative to an even share. With expert
            parallelism, the other ranks wait for it.
        costs: costs of the blocks and the ends, by which stages are cut; None for equal blocks and free ends.
        weight_flops: the part of `flops` in products with weights; the rest is attention.
        adapters: parameters of LoRA adapters if only these are trained; 0 if all parameters are trained.
        packed: the frozen weights are packed bytes, which tensor parallelism cannot split.
        operations: operations that the forward of all blocks launches, views included.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    parameters: int
    flops: float
    traffic: float
    itemsize: int = 2
    groups: int = 0  # 0: equal to `heads`
    experts: int = 0
    expert_parameters: int = 0
    expert_layers: int = 0
    picked: int = 0
    in_one_piece: bool = False
    expert_load: float = 1.0
    costs: LayerCosts | None = None
    weight_flops: float = 0.0
    adapters: int = 0
    packed: bool = False
    operations: int = 0

    @property
    def trained(self) -> int:
        """Return the number of trainable parameters."""
        return self.adapters or self.parameters

    @property
    def trained_experts(self) -> int:
        """Return the trainable parameters in experts; adapters are on other layers."""
        return 0 if self.adapters else self.expert_parameters

    @property
    def weight_share(self) -> float:
        """Return the FLOPs of weight gradients and half of attention's backward, relative to the forward.

        The share is below 1 if weights are frozen.
        """
        frozen = self.weight_flops - 2 * self.sequence * self.adapters if self.adapters else 0.0
        return 1 - frozen / self.flops

    @property
    def expert_flops(self) -> float:
        """Return the forward FLOPs of experts; each token uses only its chosen experts."""
        used = self.picked / self.experts if self.experts else 0.0
        return 2 * self.sequence * self.expert_parameters * used

    @property
    def end_flops(self) -> float:
        """Return the forward FLOPs of the ends, which are never recomputed."""
        if self.costs is None:
            return 0.0
        ends = self.costs.before + self.costs.after
        return self.flops * ends / (ends + sum(self.costs.blocks))

    @property
    def key_width(self) -> float:
        """Return the total dimension of a token's keys in a block, which is also that of its values."""
        return self.hidden * (self.groups or self.heads) / self.heads


def work_of(
    given: PretrainedConfig | nn.Module, sequence: int, dtype: torch.dtype = torch.bfloat16
) -> ModelWork:
    """Return the work of a model; the first block's memory traffic and operations are scaled to all blocks.

    Args:
        given: the config of a causal LM; or one with LoRA adapters on meta (`models.adapters.with_adapters`).

    Raises:
        ConfigError: the model is not a causal LM with blocks.
    """
    adapters = 0
    if isinstance(given, nn.Module):
        adapters = sum(each.numel() for each in given.parameters() if each.requires_grad)
    config: Any = given.config if isinstance(given, nn.Module) else given
    router_loss = bool(getattr(config, "output_router_logits", False))
    if router_loss:  # the cost of the router loss is negligible
        config = copy.deepcopy(config)
        config.output_router_logits = False
    model = _on_meta(given, config, dtype)
    text: Any = config.get_text_config()
    blocks = parts_of(model).blocks
    costs = model_costs(model, "best", sequence=sequence)
    weights = model_costs(model, "best", sequence=1)  # attention is negligible for a single token
    experts = [module for _, module in experts_in(model)]
    others = _operations_of(model, blocks[0][1], sequence)
    return ModelWork(
        layers=len(blocks),
        hidden=text.hidden_size,
        heads=getattr(text, "num_attention_heads", 1),
        sequence=sequence,
        parameters=elements([model]),
        flops=_total(costs),
        traffic=len(blocks) * others.nbytes,
        itemsize=dtype.itemsize,
        groups=getattr(text, "num_key_value_heads", 0) or 0,
        experts=min(map(number_of, experts), default=0),
        expert_parameters=elements(experts),
        expert_layers=len(experts),
        picked=getattr(text, "num_experts_per_tok", 0) or getattr(text, "top_k", 0) or 1,
        in_one_piece=router_loss,
        costs=costs,
        weight_flops=sequence * _total(weights),
        adapters=adapters,
        operations=len(blocks) * others.number,
    )


def _on_meta(given: PretrainedConfig | nn.Module, config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """Return the model with all parameters in `dtype`, as in a run; a given one is not modified."""
    if not isinstance(given, nn.Module):
        return build_on_meta(config, dtype)
    model: Any = copy.deepcopy(given).to(dtype)
    model.config.output_router_logits = getattr(config, "output_router_logits", False)
    base: nn.Module = model.get_base_model()
    return base


def _total(costs: LayerCosts) -> float:
    return costs.before + sum(costs.blocks) + costs.after


def _operations_of(model: nn.Module, block: nn.Module, sequence: int) -> _Operations:
    """Return the operations of one block's forward; the model's forward is aborted after the block."""
    seen = _Operations()

    def before(module: nn.Module, args: Any) -> None:
        seen.nbytes, seen.number = 0.0, 0

    def after(module: nn.Module, args: Any, output: Any) -> None:
        raise _SeenError

    handles = [block.register_forward_pre_hook(before), block.register_forward_hook(after)]
    try:
        with suppress(_SeenError), torch.no_grad(), _OneAttention(), seen:
            model(input_ids=torch.zeros(1, sequence, dtype=torch.long, device="meta"))
    finally:
        for handle in handles:
            handle.remove()
    return seen


class _SeenError(Exception):
    """Raised to abort the forward after the block."""


class _Operations(TorchDispatchMode):
    """Counts operations, and adds up the bytes that they read and write, except views and compute-bound products."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.number = 0.0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._opname == "_local_scalar_dense":
            return 1  # checks over all tokens are true: one sequence, no padding
        self.number += 1
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
    """Return the grouped product on meta; the meta kernel rejects fp32, which the device kernels support."""
    narrow = [a.bfloat16() if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in args]
    made: Tensor = func(*narrow, **kwargs)
    return made.to(args[0].dtype)


class _OneAttention(TorchFunctionMode):
    """Replaces attention by one operation: on devices it is one fused kernel, on meta it is decomposed."""

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
