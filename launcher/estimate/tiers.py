"""An offload tier that stores no values and only counts bytes."""

from __future__ import annotations

from concurrent.futures import Future

from torch import Tensor

from launcher.offload.tier import finished, size_of


class CountingTier:
    """See `Tier`. The content of tensors read from it is undefined.

    Attributes:
        most: maximum number of bytes stored at once.
    """

    name = "counted"

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self.most = 0

    @property
    def nbytes(self) -> int:
        """Return the number of bytes stored now."""
        return sum(self._sizes.values())

    def reserve(self, size: int) -> None:
        """Do nothing: space is unlimited."""

    def write(self, key: str, tensor: Tensor) -> Future[None]:
        """See `Tier`."""
        self._sizes[key] = size_of(tensor)
        self.most = max(self.most, self.nbytes)
        return finished()

    def read(self, key: str, into: Tensor) -> Future[None]:
        """See `Tier`."""
        return finished()

    def free(self, key: str) -> None:
        """See `Tier`."""
        self._sizes.pop(key, None)

    def close(self) -> None:
        """See `Tier`."""
        self._sizes.clear()
