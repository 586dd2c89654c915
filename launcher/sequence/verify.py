"""Verifies, before training, that the loss of a sharded sequence equals the loss of the full one.

Layers other than attention that mix tokens (convolutions, state spaces) would compute on slices without an
error. So the model is evaluated once, on three short batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from launcher.data.documents import IGNORED
from launcher.errors import LauncherError
from launcher.sequence.apply import SharedModel
from launcher.sequence.inputs import refused

_SEED, _TOKENS = 20, 8  # tokens per rank
_MOST = {2: 2e-3, 4: 1e-5, 8: 1e-5}  # relative tolerance of the loss by itemsize: rounding errors stay below


def verify(
    shared: SharedModel, loss_of: Callable[[dict[str, Tensor]], float], rows: int, dtype: torch.dtype
) -> None:
    """Compare the losses on slices and on full sequences. Every rank must call it.

    If only the padded batch differs, the model computes positions of its own for padded batches
    (`SharedModel.pads_alone`). If packed documents differ, they attend to each other in full sequences
    (`SharedModel.mixes_documents`).

    Args:
        loss_of: evaluates the model.
        rows: rows of a batch.
        dtype: dtype of the model's computation.

    Raises:
        ConfigError: the losses differ.
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
            f"has a loss of {found:.6f} with sequences sharded over {shared.axis.degree} ranks, but {wanted:.6f} "
            "without sharding",
        )
    kept = torch.ones_like(ids)
    kept[0, : length // 4] = 0
    learned = torch.cat([torch.zeros_like(kept[:, :1]), kept[:, :-1]], 1)  # the previous token sees a key
    labels = ids.masked_fill(learned * kept == 0, IGNORED)
    padded = {"input_ids": ids, "attention_mask": kept, "labels": labels}
    shared.pads_alone = not _is_near(*_losses(shared, loss_of, padded), dtype)
    places = torch.arange(length)
    packed = {**batch, "position_ids": (places % (length // 2 + 1)).expand(rows, -1).contiguous()}
    shared.mixes_documents = not _is_near(*_losses(shared, loss_of, packed), dtype)


def _losses(
    shared: SharedModel, loss_of: Callable[[dict[str, Tensor]], float], batch: dict[str, Tensor]
) -> tuple[float, float]:
    """Return the loss on slices and the loss on full sequences."""
    try:
        with shared.verified(active=True):
            # pipeline stages cache boundary shapes per batch signature; reversed keys make one for slices
            found = loss_of(dict(reversed(batch.items())))
    except LauncherError:
        raise
    except Exception as error:  # from the model's own code, which expects a full sequence
        raise refused(
            shared.model, f"cannot run on a slice of a sequence ({type(error).__name__})"
        ) from error
    with shared.verified(active=False):
        return found, loss_of(batch)


def _is_near(found: float, wanted: float, dtype: torch.dtype) -> bool:
    return abs(found - wanted) <= _MOST[dtype.itemsize] * abs(wanted)
