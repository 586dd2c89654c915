"""Documents that lie end to end in one row: positions that start anew with each, so that attention keeps them apart."""

from __future__ import annotations

import numpy as np

IGNORED = -100
"""The label that torch's and Hugging Face's cross entropy leave out."""


def positions(starts: np.ndarray) -> np.ndarray:
    """Return the place of each token in its document.

    Args:
        starts: bool [n], true where a document begins. The row itself begins one.

    Returns:
        int64 [n]: 0, 1, 2, ... from each start on.
    """
    places = np.arange(len(starts))
    return places - np.maximum.accumulate(np.where(starts, places, 0))


def starts_after(ids: np.ndarray, separator: int) -> np.ndarray:
    """Return bool [n]: the tokens of a row that follow a `separator`."""
    starts = np.zeros(len(ids), dtype=bool)
    starts[1:] = ids[:-1] == separator
    return starts
