"""Router losses: load balancing over the global batch, and the router z-loss.

The experts are balanced over the global batch instead of each microbatch (Qiu et al. 2025, arXiv:2501.11873).
The z-loss is that of Zoph et al. 2022, arXiv:2202.08906.

Models of transformers call a function of their file, `load_balancing_loss_func`, which is replaced during a
forward.

[Note: What ranks tell each other]
The loss is the number of experts x the sum over experts of (share of all tokens) x (mean probability). Only
the probabilities have gradients. So the token counts of each expert are summed over ranks, but each rank uses
its own probabilities: averaged over ranks, as gradients are, this is the loss of the global batch.
Microbatches of a step are computed one after the other; each includes the token counts of the previous ones.
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
    """Replaces the load-balancing loss of a model in training.

    Args:
        model: a model whose router losses are enabled.
        over: the ranks with batches of their own, to balance experts over; None: balance each microbatch.
        z_loss: coefficient of the mean squared log-sum-exp of the router logits.

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
        self._z_loss = z_loss / weight  # the model multiplies the returned loss by its weight
        self._theirs: list[Loss] = []
        self._before: Tensor | None = None  # of the step's microbatches so far, on all ranks: see _seen
        model.register_forward_pre_hook(lambda *_: self._enter())
        model.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def next_step(self) -> None:
        """Reset the token counts at the end of a step."""
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
            gate_logits: for each layer, [tokens, experts].
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
        """Return (each expert's share of the step's tokens so far, ranks / tokens of all ranks now).

        Args:
            told: [experts + 1], tokens of each expert in this rank's microbatch, followed by all its tokens.
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
    """Return the weight by which the model multiplies its router loss."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    # the attribute of the model, copied from its config, takes precedence
    weight = float(getattr(model, WEIGHT, getattr(text, WEIGHT, 0.0)) or 0.0)
    what = fix = ""
    if not known:
        what, fix = (
            "has no load-balancing loss",
            "use a model that has one, such as Mixtral or Qwen3-MoE",
        )
    elif not getattr(text, "output_router_logits", False):
        what, fix = (
            "does not compute its router loss",
            'set "output_router_logits": true in its config.json',
        )
    elif not weight:
        what, fix = (
            "multiplies its router loss by 0",
            "set a nonzero router_aux_loss_coef in its config.json",
        )
    if what:
        raise ConfigError(f"{type(model).__name__} {what}", where=key, fix=f"{fix}, or remove the key")
    return weight
