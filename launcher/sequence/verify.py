"""Before a model is trained: is the loss of a shared sequence that of a whole one?

Layers that pass something else along the sequence than attention does (convolutions, state spaces) would compute on
slices without an error. So the model itself is asked, with one short batch, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from launcher.errors import ConfigError
from launcher.sequence.apply import SharedModel
from launcher.sequence.inputs import WHERE

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
    found = loss_of(batch)
    with shared.whole_sequences():
        wanted = loss_of(batch)
    if not abs(found - wanted) <= _MOST[dtype.itemsize] * abs(wanted):
        raise ConfigError(
            f"{type(shared.model).__name__} cannot work on slices of a sequence: the loss of one that is shared by "
            f"{shared.axis.degree} ranks is {found:.6f}, and {wanted:.6f} where each rank has all of it",
            where=WHERE,
            fix="leave the section out for this model, and split its layers instead (tensor_parallel)",
        )
