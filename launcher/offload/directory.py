"""The directory of one rank on a disk that is shared by jobs and users."""

from __future__ import annotations

import logging
from pathlib import Path

from launcher.offload import faults
from launcher.scratch import Scratch, size_of

logger = logging.getLogger("launcher")
DATA = "shards.bin"
PREFIX = "launcher-offload-"


class OwnDirectory:
    """A new directory under `parent` that no other job uses (see `Scratch`).

    Attributes:
        data: path of the data file, which is not created yet.
    """

    def __init__(self, parent: Path, rank: int) -> None:
        try:
            self._scratch = Scratch(parent, PREFIX, f"rank{rank}")
        except OSError as error:
            raise faults.as_offload_error(
                error, "creating a directory for offloaded shards", parent
            ) from error
        self.data = self._scratch.path / DATA
        if self._scratch.removed:
            logger.warning("%s: removed %s bytes left by crashed jobs", parent, f"{self._scratch.removed:,}")
        for path in self._scratch.foreign:
            logger.warning(
                "%s: %s bytes of a job of another machine; remove it if that job has ended",
                path,
                f"{size_of(path):,}",
            )

    def close(self) -> None:
        """Remove the directory. A second call does nothing."""
        self._scratch.close()
