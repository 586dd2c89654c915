"""Which of their directories are run, and which of their tests are not asked of this engine, with the reason (data)."""

from __future__ import annotations

from fnmatch import fnmatchcase

AREAS = (
    "runtime",
    "checkpoint",
    "pipe",
    "comm",
    "elasticity",
    "monitor",
    "profiling",
    "utils",
    "linear",
    "model_parallelism",
    "launcher/test_ds_arguments.py",
    "v1/zero",
    "v1/half_precision",
    "v1/accelerator",
    "v1/pin_memory",
    "v1/moe",
    "sequence_parallelism",
    "ulysses_alst",
)
"""Below tests/unit. Not: inference, hybrid engine, kernels (ops), compile, autotuning, compression, launchers of clusters."""

LEFT_OUT: tuple[tuple[str, str], ...] = ()
"""Pattern of test ids -> why this engine is not asked; the first that matches holds."""


def why_left_out(test: str) -> str | None:
    """The reason, or None for a test that is asked."""
    return next((reason for pattern, reason in LEFT_OUT if fnmatchcase(test, pattern)), None)


def area_of(test: str) -> str:
    """The directory of a test id, as the table names it."""
    path = test.partition("::")[0].removeprefix("unit/")
    below, _, name = path.rpartition("/")
    if below == "runtime":
        return "runtime/*.py"
    return below or name
