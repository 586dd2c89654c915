"""`deepspeed.runtime.fp16.loss_scaler`: loss scalers for scripts that scale their own loss.

The engine has its own loss scale (`launcher.optim.loss_scale`), which follows the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from launcher.optim.loss_scale import LossScale

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"


class LossScalerBase:
    """A loss scaler.

    Args:
        cur_scale: a fixed scale, or the rule that updates it.
    """

    def __init__(self, cur_scale: float | LossScale) -> None:
        self._rule = cur_scale if isinstance(cur_scale, LossScale) else LossScale(scale=float(cur_scale))

    @property
    def cur_scale(self) -> float:
        return self._rule.scale

    @property
    def loss_scale(self) -> float:
        return self._rule.scale

    @property
    def dynamic(self) -> bool:
        return self._rule.dynamic

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale

    def scale_gradient(self, module: Any, grad_in: Iterable[Tensor], grad_out: Any) -> tuple[Tensor, ...]:
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Update the scale; call once per step.

        Raises:
            LossScaleExhausted: gradients overflowed at the minimum scale.
        """
        self._rule.update(overflow)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self.scale_loss(loss).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class LossScaler(LossScalerBase):
    """A static loss scaler."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: a fixed scale skips no step."""
        return False


class DynamicLossScaler(LossScalerBase):
    """A scale that doubles after good steps and halves after overflows; arguments match the `fp16` keys."""

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(
            LossScale(
                scale=float(init_scale),
                dynamic=True,
                window=scale_window,
                minimum=float(min_scale),
                hysteresis=delayed_shift,
                consecutive=consecutive_hysteresis,
                tolerance=delayed_shift,
            )
        )
        self.raise_error_at_min_scale = raise_error_at_min_scale

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient on this rank is not finite."""
        return any(param.grad is not None and not bool(torch.isfinite(param.grad).all()) for param in params)

    def update_scale(self, overflow: bool) -> None:
        rule = self._rule
        if overflow and rule.exhausted and not self.raise_error_at_min_scale:
            rule.last_overflow, rule.step = rule.step, rule.step + 1
        else:
            super().update_scale(overflow)


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: dict[str, Any] | None,
) -> LossScalerBase:
    """Return the scaler that the arguments describe for float16, and a static scale of 1 for other dtypes."""
    if dtype is torch.half and dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or {}))
    return LossScaler(static_loss_scale if dtype is torch.half else 1.0)
