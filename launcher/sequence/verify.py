"""Before a model is trained: is the loss of a shared sequence that of a whole one?

Layers that pass something else along the sequence than attention does (convolutions, state spaces) would compute on
slices without an error. So the model itself is asked, with one short batch, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from launcher.errors import LauncherError
from launcher.sequence.apply import SharedModel
from launcher.sequence.inputs import refused

_SEED, _TOKENS = 20, 8  # of each rank
_MOST = {2: 2e-3, 4: 1e-5, 8: 1e-5}  # of a loss, by bytes of a number: no rounding makes more


def verify(
    shared: SharedModel, loss_of: Callable[[dict[str, Tensor]], float], rows: int, dtype: torch.dtype
) -> None:
    """Compare the two. Every rank must call it.

    Args:
        loss_of: evaluates the model.
        rows: of a batch.
        dtype: in which the model computes.

    Raises:
        ConfigError: they differ.
    """
    config: Any = shared.model.config.get_text_config()
    generator = torch.Generator().manual_seed(_SEED)
    length = _TOKENS * shared.layout.multiple
    ids = torch.randint(config.vocab_size, (rows, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    try:
        with shared.verified(active=True):
            found = loss_of(batch)
    except LauncherError:
        raise
    except Exception as error:  # of the model's own code, which meets a slice where it thinks of a sequence
        raise refused(
            shared.model, f"cannot compute a slice of a sequence ({type(error).__name__})"
        ) from error
    with shared.verified(active=False):
        wanted = loss_of(batch)
    if not abs(found - wanted) <= _MOST[dtype.itemsize] * abs(wanted):
        raise refused(
            shared.model,
            f"has a loss of {found:.6f} on slices of a sequence over {shared.axis.degree} ranks, and of {wanted:.6f} "
            "where each rank has all of it",
        )
