"""The loss scale of fp16 training (DeepSpeed's `fp16` section, with the rule of its DynamicLossScaler)."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.precision import Fp16Config
from launcher.errors import LauncherError


class LossScaleExhausted(LauncherError):
    """The scale is at its floor and gradients still overflow. Raised on every rank; the engine is unchanged
    by the step, so it can be saved.

    Args:
        scale: the floor.
        which: names of the overflowing parameters; "" if they were not searched for.
    """

    def __init__(self, scale: float, which: str = "") -> None:
        super().__init__(
            f"fp16 gradients overflow although the loss scale is already at its minimum of {scale:g}"
            + (f": {which}" if which else ""),
            where="fp16.min_loss_scale",
            fix='train in bf16 ("bf16": {"enabled": true}), lower the learning rate, or clip gradients'
            + (
                '; "prescale_gradients": true keeps sums over ranks small'
                if "sum over ranks" in which
                else ""
            ),
        )


@dataclass
class LossScale:
    """The loss scale: static, or doubled after good steps and halved after overflows.

    Args:
        scale: the current scale.
        dynamic: false for bf16 and fp32 (scale 1) and for a static `loss_scale`.
        window: number of good steps before the one that doubles the scale (`loss_scale_window`).
        minimum: floor (`min_loss_scale`).
        hysteresis: number of overflows tolerated before the scale is halved.
        consecutive: reset the tolerance after every good step (`consecutive_hysteresis`).
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    minimum: float = 1.0
    hysteresis: int = 2
    consecutive: bool = False
    tolerance: int = 2
    step: int = 0
    last_overflow: int = -1

    @classmethod
    def of(cls, fp16: Fp16Config, *, autocast: bool = False) -> LossScale:
        """Return the configured loss scale; 1 if fp16 is off.

        Args:
            autocast: float16 under torch_autocast, which uses the scale settings of the section even if it is
                off.
        """
        if not (fp16.enabled or autocast):
            return cls()
        if fp16.loss_scale > 0:
            return cls(scale=float(fp16.loss_scale))
        return cls(
            scale=float(2**fp16.initial_scale_power),
            dynamic=True,
            window=fp16.loss_scale_window,
            minimum=float(fp16.min_loss_scale),
            hysteresis=fp16.hysteresis,
            consecutive=fp16.consecutive_hysteresis,
            tolerance=fp16.hysteresis,
        )

    @property
    def at_floor(self) -> bool:
        """Return whether the scale cannot be reduced further."""
        return self.dynamic and self.scale == self.minimum

    @property
    def exhausted(self) -> bool:
        """Return whether one more overflow ends the run."""
        return self.at_floor and 1 in (self.hysteresis, self.tolerance)

    def update(self, overflow: bool) -> None:
        """Update the scale, once per step.

        Raises:
            LossScaleExhausted: an overflow at the floor.
        """
        if not self.dynamic:
            return
        if overflow:
            self._overflowed()
        else:
            self._good()
        self.step += 1

    def _overflowed(self) -> None:
        if self.exhausted:
            raise LossScaleExhausted(self.scale)
        if 1 in (self.hysteresis, self.tolerance):
            self.scale = max(self.scale / 2, self.minimum)
        else:
            self.tolerance -= 1
        self.last_overflow = self.step

    def _good(self) -> None:
        if self.consecutive:
            self.tolerance = self.hysteresis
        good = self.step - self.last_overflow - 1  # before this one
        if good > 0 and good % self.window == 0:
            if not self.consecutive:
                self.tolerance = self.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float | int]:
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "tolerance": self.tolerance,
            "step": self.step,
            "last_overflow": self.last_overflow,
        }

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Load a saved dynamic scale; ignored unless both the saved and the current scale are dynamic."""
        if not (self.dynamic and state.get("dynamic", True)):
            return
        self.scale, self.tolerance = float(state["scale"]), int(state["tolerance"])
        self.step, self.last_overflow = int(state["step"]), int(state["last_overflow"])
