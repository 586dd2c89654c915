"""Greedy generation from a prompt, on any topology: single rank, tensor parallel or in stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

_NOBODY = -1


def continuation(engine: Engine, prompt: Sequence[int], most: int, end: int | None = None) -> list[int]:
    """Return the greedy continuation of `prompt`, the same on every rank. Every rank must call it.

    There is no KV cache: each token takes a forward of the whole sequence. Use it to inspect a model, not to
    serve one.

    Args:
        prompt: token ids, the same on every rank.
        most: maximum number of tokens to generate.
        end: token to stop at; it is not returned.
    """
    written: list[int] = []
    while len(written) < most:
        batch = {"input_ids": torch.tensor([[*prompt, *written]])}
        outputs = engine.eval_batch(
            iter([batch]), compute_loss=False, reduce_output=None, num_micro_batches=1
        )
        # Only the last stage has the logits. MAX makes all ranks agree even if rounding differs between
        # replicas.
        token = torch.tensor(_NOBODY, device=engine.device)
        if outputs is not None:
            token = outputs[0][0, -1].argmax()
        dist.all_reduce(token, op=dist.ReduceOp.MAX)
        if token == end:
            break
        written.append(int(token))
    return written
