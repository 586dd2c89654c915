"""Weights of microbatches in the loss of a step so that all tokens count equally (`loss_normalization`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.comm import all_reduce
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.engine.core import EngineCore

KEY = "loss_normalization"


def learned_tokens(batch: Any) -> int:
    """Return the number of tokens of a microbatch in a causal LM's loss, which ignores the first label.

    Args:
        batch: a mapping with "labels" [micro, seq], or with "shift_labels", which are already shifted.

    Raises:
        ConfigError: it has neither.
    """
    from launcher.data.documents import IGNORED

    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    shifted = batch.get("shift_labels") if isinstance(batch, Mapping) else None
    if shifted is None and labels is None:
        raise ConfigError(
            'the microbatch has no "labels" to count tokens in',
            where=KEY,
            fix='pass microbatches as dicts with "labels", or remove the key',
        )
    counted: Tensor = labels[:, 1:] if shifted is None else shifted  # type: ignore[index]
    return int((counted != IGNORED).sum())


def token_weights(engine: EngineCore, counts: Sequence[int]) -> list[float]:
    """Return the weight of each microbatch of this rank, such that the average over dp is the mean over all
    tokens of the step. Every rank of dp must call it.

    Args:
        counts: tokens in the loss, by microbatch; any values on ranks that read no data.
    """
    # In host memory, where the counts are: reading a device tensor would wait for all queued kernels.
    total = torch.tensor([float(sum(counts))], dtype=torch.float64)
    all_reduce(total, engine.mesh.dp, "root/tokens").wait()
    return [count * engine.mesh.dp.degree / max(1.0, float(total)) for count in counts]


def check_backward(loss: Tensor) -> None:
    """Raise ConfigError: the weight depends on the token counts of the step's other microbatches."""
    raise ConfigError(
        f'{KEY} is "tokens", but engine.backward() sees one microbatch at a time: the weight of its '
        f"loss ({float(loss.detach()):.4g}) depends on the token counts of all microbatches",
        where=KEY,
        fix="call engine.train_batch(), or remove the key and pass num_items_in_batch to the model, as "
        "the Hugging Face Trainer does",
    )
