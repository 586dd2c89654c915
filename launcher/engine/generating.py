"""The likeliest continuation of a prompt, on any topology: whole, split or in stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

_NOBODY = -1


def continuation(engine: Engine, prompt: Sequence[int], most: int, end: int | None = None) -> list[int]:
    """Return the tokens that the model writes after `prompt`, each the likeliest. Every rank must call it, and gets the
    same.

    Each token is a forward of all that stand before it: meant for a look at a model, not for serving one.

    Args:
        prompt: tokens, the same on every rank.
        most: how many are written at most.
        end: the token to stop at; it is not returned.
    """
    written: list[int] = []
    while len(written) < most:
        batch = {"input_ids": torch.tensor([[*prompt, *written]])}
        outputs = engine.eval_batch(
            iter([batch]), compute_loss=False, reduce_output=None, num_micro_batches=1
        )
        # The last stage's ranks know it; where replicas differ by a rounding, all follow one of them.
        token = torch.tensor(_NOBODY, device=engine.device)
        if outputs is not None:
            token = outputs[0][0, -1].argmax()
        dist.all_reduce(token, op=dist.ReduceOp.MAX)
        if token == end:
            break
        written.append(int(token))
    return written
