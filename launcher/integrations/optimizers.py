"""DeepSpeed's optimizer classes: torch's or launcher's optimizers with DeepSpeed's arguments.

The engine steps each one like the class in `steps_as`, regardless of the device that stores the weights.
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch

from launcher.errors import ConfigError
from launcher.optim.elementwise import Lion
from launcher.optim.lamb import Lamb
from launcher.optim.sharded import ShardedOptimizer


class _Adam(torch.optim.Adam):
    """torch's Adam or AdamW.

    Args:
        decoupled: use AdamW's decoupled weight decay.

    Raises:
        ConfigError: `bias_correction` is false.
    """

    def __init__(self, params: Any, *, decoupled: bool, bias_correction: bool, **options: Any) -> None:
        if not bias_correction:
            name = type(self).__name__
            raise ConfigError(
                "bias_correction=False is not supported",
                where=f"{name}()",
                fix='set it in the JSON: "optimizer": {"type": "Adam", "params": {"bias_correction": false}}',
            )
        options["decoupled_weight_decay"] = decoupled
        super().__init__(params, fused=True, **options)
        if unwrap(type(self).step) is unwrap(torch.optim.Adam.step):  # a subclass may override step()
            self.steps_as = torch.optim.AdamW if decoupled else torch.optim.Adam


class _OfTheJson(type):
    """Metaclass: an engine's optimizer is also an instance, at stage 0 with type Adam or AdamW."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        of_engine = type(instance) is ShardedOptimizer and not instance.zero.policy.shard_optim
        return of_engine and instance.name in ("Adam", "AdamW")


class FusedAdam(_Adam, metaclass=_OfTheJson):
    """deepspeed.ops.adam.FusedAdam."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, decoupled=adam_w_mode, bias_correction=bias_correction, **options)


class DeepSpeedCPUAdam(_Adam):
    """deepspeed.ops.adam.DeepSpeedCPUAdam."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(model_params, decoupled=adamw_mode, bias_correction=bias_correction, **options)
        self.fp32_optimizer_states = fp32_optimizer_states


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """deepspeed.ops.adagrad.DeepSpeedCPUAdagrad."""

    steps_as = torch.optim.Adagrad

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay, fused=True)


class FusedLion(Lion):
    """deepspeed.ops.lion.FusedLion."""

    steps_as = Lion

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(FusedLion):
    """deepspeed.ops.lion.DeepSpeedCPULion."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLamb(Lamb):
    """deepspeed.ops.lamb.FusedLamb."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if max_grad_norm:
            raise ConfigError(
                "max_grad_norm is not supported",
                where="FusedLamb()",
                fix='set "gradient_clipping" in the JSON: it clips the norm of all gradients',
            )
        super().__init__(
            params, lr, betas, eps, weight_decay, bias_correction, max_coeff, min_coeff, eps_inside_sqrt
        )


class MultiTensorApply:
    """Calls a multi-tensor function with a fixed chunk size.

    Args:
        chunk_size: elements that the function processes at a time.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
