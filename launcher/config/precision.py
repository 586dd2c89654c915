"""`fp16` and `bf16`: mixed precision with fp32 master weights."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from launcher.config.section import Count, Section, Whole


class Fp16Config(Section):
    """Train in float16 with loss scaling (Micikevicius et al. 2018, arXiv:1710.03740)."""

    enabled: bool = False
    """Parameters and gradients are float16. Not together with bf16.enabled."""

    auto_cast: bool = False
    """Floating-point inputs of the model are cast to float16."""

    loss_scale: Annotated[float, Field(ge=0)] = 0.0
    """Fixed factor of the loss; 0 finds one by itself (dynamic)."""

    initial_scale_power: Whole = 16
    """A dynamic scale starts at 2 to this power."""

    loss_scale_window: Count = 1000
    """Steps without overflow before a dynamic scale doubles."""

    hysteresis: Count = 2
    """Overflows before a dynamic scale halves: the first hysteresis - 1 only skip their step."""

    consecutive_hysteresis: bool = False
    """A step without overflow refills the count of `hysteresis`."""

    min_loss_scale: Whole = 1
    """Floor of a dynamic scale; an overflow at the floor ends the run."""


class Bf16Config(Section):
    """Train in bfloat16 with float32 master weights."""

    enabled: bool = False
    """Parameters and gradients are bfloat16. Not together with fp16.enabled."""

    check_grad_overflow: bool = True
    """Skip the step when a gradient is infinite or not a number (DeepSpeed's default since June 2026)."""
