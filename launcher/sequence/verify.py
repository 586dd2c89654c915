"""Before a model is trained: is the loss of a shared sequence that of a whole one?

Layers that pass something else along the sequence than attention does (convolutions, state spaces) would compute on
slices without an error. So the model itself is asked, with three short batches, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from launcher.data.documents import IGNORED
from launcher.errors import LauncherError
from launcher.sequence.apply import SharedModel
from launcher.sequence.inputs import refused

_SEED, _TOKENS = 20, 8  # of each rank
_MOST = {2: 2e-3, 4: 1e-5, 8: 1e-5}  # of a loss, by bytes of a number: no rounding makes more


def verify(
    shared: SharedModel, loss_of: Callable[[dict[str, Tensor]], float], rows: int, dtype: torch.dtype
) -> None:
    """Compare the two. Every rank must call it.

    A model that differs on the padded batch alone takes others (`SharedModel.pads_alone`). One that differs on packed
    documents lets them see each other where it has whole sequences (`SharedModel.mixes_documents`).

    Args:
        loss_of: evaluates the model.
        rows: of a batch.
        dtype: in which the model computes.

    Raises:
        ConfigError: they differ.
    """
    config: Any = shared.model.config.get_text_config()
    generator = torch.Generator().manual_seed(_SEED)
    longest = int(getattr(config, "max_position_embeddings", None) or _TOKENS * shared.layout.multiple)
    length = min(_TOKENS * shared.layout.multiple, longest)
    ids = torch.randint(config.vocab_size, (rows, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids}
    found, wanted = _losses(shared, loss_of, batch)
    if not _is_near(found, wanted, dtype):
        raise refused(
            shared.model,
            f"has a loss of {found:.6f} on slices of a sequence over {shared.axis.degree} ranks, and of {wanted:.6f} "
            "where each rank has all of it",
        )
    kept = torch.ones_like(ids)
    kept[0, : length // 4] = 0
    learned = torch.cat([torch.zeros_like(kept[:, :1]), kept[:, :-1]], 1)  # by a token that sees some key
    labels = ids.masked_fill(learned * kept == 0, IGNORED)
    padded = {"input_ids": ids, "attention_mask": kept, "labels": labels}
    shared.pads_alone = not _is_near(*_losses(shared, loss_of, padded), dtype)
    places = torch.arange(length)
    packed = {**batch, "position_ids": (places % (length // 2 + 1)).expand(rows, -1).contiguous()}
    shared.mixes_documents = not _is_near(*_losses(shared, loss_of, packed), dtype)


def _losses(
    shared: SharedModel, loss_of: Callable[[dict[str, Tensor]], float], batch: dict[str, Tensor]
) -> tuple[float, float]:
    """Return the loss on slices and that of whole sequences."""
    try:
        with shared.verified(active=True):
            # stages learn for each order of the names what crosses between them, and here it is a slice
            found = loss_of(dict(reversed(batch.items())))
    except LauncherError:
        raise
    except Exception as error:  # of the model's own code, which meets a slice where it thinks of a sequence
        raise refused(
            shared.model, f"cannot compute a slice of a sequence ({type(error).__name__})"
        ) from error
    with shared.verified(active=False):
        return found, loss_of(batch)


def _is_near(found: float, wanted: float, dtype: torch.dtype) -> bool:
    return abs(found - wanted) <= _MOST[dtype.itemsize] * abs(wanted)
