"""`deepspeed.moe`: names that models import whether they have experts or not."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from launcher.errors import LauncherError


class MoE(nn.Module):
    """Mixture-of-experts layers are not here.

    Raises:
        LauncherError: one is made.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        raise LauncherError(
            "deepspeed.moe.layer.MoE is not here: there is no expert parallelism",
            fix="use the experts of a Hugging Face model, which every rank has all of, or sharded by ZeRO 3; for "
            "DeepSpeed itself write `launch --no_deepspeed_shim ...`",
        )


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter belongs to one expert only: none does."""
    return not getattr(param, "allreduce", True)
