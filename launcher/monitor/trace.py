"""Chrome traces of selected steps, one file per rank (`--profile DIR`), with collectives named by unit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.profiler import profile


class Trace:
    """Records steps first to last with torch.profiler: `with trace: ... with trace.step(n): ...`.

    Args:
        directory: directory of `rank<r>-steps<first>-<last>.json`; None records nothing.
        rank: rank of this process.
        steps: first and last optimizer step to record, from 1.
        cuda: also record CUDA kernels.

    Open the file in https://ui.perfetto.dev or chrome://tracing.
    """

    def __init__(
        self, directory: str | Path | None, *, rank: int, steps: tuple[int, int], cuda: bool = False
    ) -> None:
        self.path: Path | None = None
        if directory is not None:
            self.path = Path(directory).expanduser() / f"rank{rank}-steps{steps[0]}-{steps[1]}.json"
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.first, self.last = steps
        self._cuda = cuda
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wrap optimizer step `number`, from 1."""
        if self.path is not None and self._profile is None and self.first <= number <= self.last:
            self._start()
        yield
        if number >= self.last:
            self.close()

    def close(self) -> None:
        """Write what was recorded, if anything."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
            self._profile = None

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._cuda else [])
        self._profile = profile(activities=activities)
        self._profile.start()


def steps_of(text: str) -> tuple[int, int]:
    """Parse the flag `--profile-steps`: `3-5` into (3, 5), `4` into (4, 4).

    Raises:
        ValueError: `text` is neither.
    """
    found: Any = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+))?\s*", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"{text!r} is not a range of steps such as 3-5")
    return first, last
