"""A client: one third-party program in one setting, with its JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
OURS, THEIRS = "ours", "deepspeed"
"""The engines."""


@dataclass(frozen=True)
class Client:
    """One program in one setting. Arguments may contain {out}, {models}, {json},
    {cwd}, {older} and {examples}.
    """

    name: str
    setting: str
    version_of: str
    """The Python package, or the directory below EXAMPLES, whose version the table shows."""
    program: str = ""
    """A file in `programs/`, or below EXAMPLES."""
    arguments: tuple[str, ...] = ()
    stage: int | None = None
    """ZeRO stage in the JSON."""
    sections: dict[str, Any] = field(default_factory=dict)
    """Other sections of the JSON."""
    without: str = ""
    """A key of `zero_optimization` that has no effect here; DeepSpeed gets the JSON without it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables; values may contain the same placeholders as arguments."""
    stand_ins: str = ""
    """Missing features of this machine to emulate: names of stand_ins/sitecustomize.py."""
    paths: tuple[str, ...] = ()
    """Directories with its own packages."""
    local_rank: bool = False
    """The program has a flag --local_rank, like programs for DeepSpeed's launcher."""
    limit: float = 1e-5
    """Largest relative difference of losses from DeepSpeed's."""
    module: bool = False
    """The program is a module's name."""
    ranks: int = 2
    alone: str = ""
    """Why DeepSpeed does not run it on a CPU, if known."""
    ends: str = ""
    """Why no engine can complete it on this machine, if known."""
    tests: tuple[str, ...] = ()
    """Test files below its checkout, for a test suite, which has no program."""
    least: float = 1.0
    """For a test suite: the share of DeepSpeed's passing tests that must pass here."""
    limit_s: float = 600.0
    """Timeout in seconds."""

    @property
    def own(self) -> bool:
        """Return whether the program is in `programs/` or in an installed package."""
        return not self.tests and (self.module or "/" not in self.program)

    @property
    def key(self) -> str:
        stage = "" if self.stage is None else f", stage {self.stage}"
        return f"{self.name}{stage}{', ' if self.setting else ''}{self.setting}"


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        error: the last error message of a failed run; empty on success.
        losses: by rank, of every backward; for a failed run, of the completed ones.
        tests: of a test suite: name -> "passed", "skipped", or the reason of the failure.
    """

    error: str = ""
    losses: list[list[float]] = field(default_factory=list)
    tests: dict[str, str] = field(default_factory=dict)


def json_of(client: Client, engine: str) -> dict[str, Any]:
    """Return the JSON of a client."""
    keys = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    zero: dict[str, Any] = {"stage": client.stage}
    if client.stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    sections = dict(client.sections)
    zero |= sections.pop("zero_optimization", {})
    if engine == THEIRS:
        zero.pop(client.without, None)
    return {**dict.fromkeys(keys, AUTO), "zero_optimization": zero, **sections}
