"""`compile`: torch.compile of the transformer blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from launcher.config.section import Conflict, Remark, Section


class CompileConfig(Section):
    """torch.compile, as DeepSpeed 0.14 and 0.15 had it in the JSON. Off when the section is left out or empty.

    Each transformer block is compiled by itself; gathers, reductions and checkpoints stay outside of the graphs. With
    "inductor" so is Adam's step of 16-bit parameters on the CPU, where there is a compiler: 1.2 times as fast.
    In DeepSpeed since 0.16 the section holds the keys of DeepCompile, of which only those that are off are taken
    here; `Engine.compile()` is there as in DeepSpeed.
    """

    differs: ClassVar[dict[str, str]] = {
        "enabled": "the blocks are compiled one by one; DeepSpeed 0.14 compiled the whole module",
        "disable": "a key of DeepSpeed 0.14; newer ones refuse it",
        "backend": "a key of DeepSpeed 0.14 and 0.15; newer ones refuse it",
        "kwargs": "a key of DeepSpeed 0.14 and 0.15; newer ones refuse it",
    }

    enabled: bool | None = None
    """The blocks are compiled. Null: they are when `disable` is false or `backend` is written."""

    disable: bool | None = None
    """True: nothing is compiled; false: the blocks are. Null says nothing."""

    backend: str | None = None
    """The backend of torch.compile; null: "inductor"."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments of torch.compile, for example {"dynamic": true}."""

    @property
    def on(self) -> bool:
        """Whether the blocks are to be compiled."""
        if self.enabled is not None:
            return self.enabled
        return self.disable is False or (self.disable is None and self.backend is not None)

    def conflicts(self) -> Iterator[Conflict]:
        if self.enabled is not None and self.enabled == self.disable:
            yield Conflict(
                ("enabled", "disable"),
                f"enabled and disable are both {'true' if self.enabled else 'false'}, and one is the other's opposite",
                "keep one of compile.enabled and compile.disable",
            )
        if "backend" in self.kwargs:
            yield Conflict(
                ("kwargs", "backend"),
                "kwargs holds a backend, which has a key of its own",
                "write compile.backend",
            )

    def remarks(self) -> Iterator[Remark]:
        if self.on:
            yield Remark(
                "",
                f"is written: torch.compile ({self.backend or 'inductor'}) compiles each transformer block",
            )
