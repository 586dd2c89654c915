"""The packages and modules of `launcher/`: their import order, imports, and docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "launcher"
# A package (or a top-level module) imports only those before it, and itself.
ORDER = ["errors", "files", "sizes", "owner", "scratch", "hub", "replica", "monitor", "arguments", "config",
         "comm", "cluster", "data", "models", "checkpointing", "tensor", "sequence", "experts", "pipeline", "pipe",
         "offload", "zero", "checkpoint", "earlier_run", "optim", "engine", "estimate", "plan", "resuming", "run",
         "replica_run", "training_log", "recipe_state", "train", "integrations", "top", "cli"]  # fmt: skip
# The same for the folders inside a package; all of them may import the modules next to them.
INSIDE = {"pipeline": ["schedules", "timeline", "executor", "partition", "hf", "sequential"]}
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text())


def package_of(path: Path) -> str:
    """Return the package of a file, or the name of a top-level module."""
    return path.parts[0].removesuffix(".py")


def imported_packages(path: Path) -> Iterator[str]:
    """Yield the packages that a file imports, anywhere in the file."""
    yield from (name.split(".")[1] for name in _imported_modules(path) if name.startswith("launcher."))


def imported_folders(path: Path) -> set[str]:
    """Return the folders of its own package that a file imports."""
    inside = f"launcher.{package_of(path)}."
    names = {
        name.removeprefix(inside).split(".")[0] for name in _imported_modules(path) if name.startswith(inside)
    }
    return {name for name in names if (PACKAGE / path.parts[0] / name).is_dir()}


def _imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(_parsed(path)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "launcher":
                names = [f"launcher.{alias.name}" for alias in node.names]
        yield from names


def purpose(path: Path) -> str:
    """Return the first sentence of a module's docstring, or "" if it has none."""
    said = ast.get_docstring(_parsed(path)) or ""
    paragraph = " ".join(said.partition("\n\n")[0].split())
    return re.split(r"(?<=[^.].\.) (?=[A-Z`(])", paragraph, maxsplit=1)[0].removesuffix(".").removesuffix(":")
