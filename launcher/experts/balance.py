"""Losses of routers: the balance of experts over the global batch instead of each microbatch by itself (Qiu et al.
2025, arXiv:2501.11873), and the z-loss (Zoph et al. 2022, arXiv:2202.08906).

Models of transformers call a function of their file, `load_balancing_loss_func`. While the model runs, another one
stands in its place.

[Note: What ranks tell each other]
The loss is experts x the sum over experts of (their share of all tokens) x (their mean probability). Only probabilities
have gradients. So ranks sum up the tokens of each expert, and each keeps its own probabilities: the mean over ranks, as
gradients are taken, is the loss of the global batch. Microbatches of a step come one after the other; each sees the
tokens of those before it, too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm import Axis, all_reduce
from launcher.errors import ConfigError

WEIGHT = "router_aux_loss_coef"
FUNCTION = "load_balancing_loss_func"
ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
Loss = Callable[..., Any]


class RouterLoss:
    """Stands for the balance loss of a model while this is trained.

    Args:
        model: its losses of routers are on.
        over: ranks with batches of their own, all of which count; None: each microbatch by itself.
        z_loss: what the mean square of the routers' log-sum-exp is multiplied with.

    Raises:
        ConfigError: the model has no such loss, or does not compute it.
    """

    def __init__(self, model: nn.Module, over: Axis | None, z_loss: float) -> None:
        self._model, self._over = model, over
        self._files = [
            file
            for name in dict.fromkeys(type(module).__module__ for module in model.modules())
            if _takes(getattr(file := sys.modules[name], FUNCTION, None))
        ]
        key = "global_balance_loss" if over is not None else "router_z_loss_coef"
        weight = _weight(model, bool(self._files), f"expert_parallel.{key}")
        self._z_loss = z_loss / weight  # the model multiplies what it is given with its weight
        self._theirs: list[Loss] = []
        self._before: Tensor | None = None  # of the step's microbatches so far, on all ranks: see _seen
        model.register_forward_pre_hook(lambda *_: self._enter())
        model.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def next_step(self) -> None:
        """Forget the tokens of the microbatches of a step."""
        self._before = None

    def _enter(self) -> None:
        if self._model.training and torch.is_grad_enabled():
            self._theirs = [getattr(file, FUNCTION) for file in self._files]
            for file in self._files:
                setattr(file, FUNCTION, self._loss)

    def _leave(self) -> None:
        for file, loss in zip(self._files, self._theirs, strict=False):
            setattr(file, FUNCTION, loss)
        self._theirs = []

    def _loss(
        self,
        gate_logits: tuple[Tensor, ...] | None,
        num_experts: int,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        """Return the loss of a microbatch.

        Args:
            gate_logits: of each layer [tokens, experts].
            attention_mask: [rows, length], 0 for tokens that do not count.
        """
        if not isinstance(gate_logits, tuple):
            return 0
        counts = gate_logits[0].new_zeros(num_experts, dtype=torch.float64)
        shares, rows = counts.float(), counts.new_zeros(())
        squares = shares.new_zeros(())
        of_token = None if attention_mask is None else attention_mask.reshape(-1).to(counts)
        for logits in gate_logits:
            weight = logits.new_ones(len(logits), dtype=torch.float64) if of_token is None else of_token
            each = logits.softmax(-1)
            picked = each.topk(top_k, dim=-1).indices
            counts = counts.index_add(0, picked.flatten(), weight.repeat_interleave(top_k))
            shares = shares + (each.float() * weight.float()[:, None]).sum(0)
            if self._z_loss:
                squares = squares + (logits.float().logsumexp(-1).square() * weight.float()).sum()
            rows = rows + weight.sum()
        fraction, scale = self._seen(torch.cat([counts, rows[None]]))
        return num_experts * (fraction.float() * shares * scale).sum() + self._z_loss * squares * scale

    def _seen(self, told: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the part of tokens that each expert has had in the step, ranks / tokens of all of them now).

        Args:
            told: [experts + 1], the microbatch's tokens of each expert on this rank, and of all.
        """
        if self._over is None:
            return told[:-1] / told[-1].clamp(min=1), 1 / told[-1].clamp(min=1)
        all_reduce(told, self._over, "experts/balance").wait()
        self._before = told if self._before is None else told + self._before
        seen = self._before
        return seen[:-1] / seen[-1].clamp(min=1), self._over.degree / told[-1].clamp(min=1)


def _takes(loss: Loss | None) -> bool:
    return loss is not None and list(inspect.signature(loss).parameters) == ARGUMENTS


def _weight(model: nn.Module, known: bool, key: str) -> float:
    """Return what the model multiplies its loss of routers with."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    # the model's own number, which it has taken from its config, counts
    weight = float(getattr(model, WEIGHT, getattr(text, WEIGHT, 0.0)) or 0.0)
    what = fix = ""
    if not known:
        what, fix = (
            "has no load-balancing loss",
            "take a model that has one, such as Mixtral or Qwen3-MoE",
        )
    elif not getattr(text, "output_router_logits", False):
        what, fix = (
            "does not compute its router loss",
            'write "output_router_logits": true into its config.json',
        )
    elif not weight:
        what, fix = (
            "multiplies its router loss by 0",
            "write a router_aux_loss_coef into its config.json",
        )
    if what:
        raise ConfigError(f"{type(model).__name__} {what}", where=key, fix=f"{fix}, or leave the key out")
    return weight
