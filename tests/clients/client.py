"""What a client is: one program of others in one setting, and the JSON that it is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
OURS, THEIRS = "ours", "deepspeed"
"""The engines."""


@dataclass(frozen=True)
class Client:
    """One program in one setting. Arguments may hold {out}, {models}, {json},
    {cwd}, {older} and {examples}."""

    name: str
    setting: str
    version_of: str
    """The Python package, or the directory below EXAMPLES, whose version the table tells."""
    program: str = ""
    """Of `programs/`, or below EXAMPLES."""
    arguments: tuple[str, ...] = ()
    stage: int | None = None
    """Of the JSON that it is given."""
    sections: dict[str, Any] = field(default_factory=dict)
    """Of that JSON, besides."""
    without: str = ""
    """A key of `zero_optimization` that has no effect here; DeepSpeed gets the JSON without it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that it gets; values may hold the same words as arguments."""
    stand_ins: str = ""
    """What this machine lacks, and gets stood in: words of stand_ins/sitecustomize.py."""
    paths: tuple[str, ...] = ()
    """Directories in which it finds packages of its own."""
    local_rank: bool = False
    """It has a flag --local_rank, as programs for DeepSpeed's launcher have."""
    limit: float = 1e-5
    """How far losses may be from DeepSpeed's, relatively."""
    module: bool = False
    """The program is a module's name."""
    ranks: int = 2
    alone: str = ""
    """Why DeepSpeed does not run it on a CPU, where that is known."""
    ends: str = ""
    """Why no engine can bring it to its end on this machine, where that is known."""
    tests: tuple[str, ...] = ()
    """Files below its checkout; then it is a test suite, and has no program."""
    least: float = 1.0
    """Of a test suite: the share of what DeepSpeed passes that has to pass here."""
    limit_s: float = 600.0
    """How long it may run."""

    @property
    def own(self) -> bool:
        """Its program is of `programs/`, or of an installed package."""
        return not self.tests and (self.module or "/" not in self.program)

    @property
    def key(self) -> str:
        stage = "" if self.stage is None else f", stage {self.stage}"
        return f"{self.name}{stage}{', ' if self.setting else ''}{self.setting}"


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        error: the last words of a run that failed; empty where it ended well.
        losses: by rank, of every backward; of a run that failed those until then.
        tests: of a test suite: name -> "passed", "skipped", or why it failed.
    """

    error: str = ""
    losses: list[list[float]] = field(default_factory=list)
    tests: dict[str, str] = field(default_factory=dict)


def json_of(client: Client, engine: str) -> dict[str, Any]:
    """The JSON that a client is given."""
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
