"""Documents packed in one row: position ids that restart at each, so that attention separates them."""

from __future__ import annotations

import numpy as np

IGNORED = -100
"""The label that torch's and Hugging Face's cross entropy ignore."""


def positions(starts: np.ndarray) -> np.ndarray:
    """Return the position of each token in its document.

    Args:
        starts: bool [n], true where a document begins. The beginning of the row always counts.

    Returns:
        int64 [n]: 0, 1, 2, ... from each start.
    """
    places = np.arange(len(starts))
    return places - np.maximum.accumulate(np.where(starts, places, 0))


def starts_after(ids: np.ndarray, separator: int) -> np.ndarray:
    """Return a mask, bool [n], of the tokens that follow a `separator`."""
    starts = np.zeros(len(ids), dtype=bool)
    starts[1:] = ids[:-1] == separator
    return starts
