"""The structure that docs/architecture.md promises: every file is listed there, and rooms import downwards only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "launcher"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
# A room imports those before it, and itself.
ORDER = ["errors", "sizes", "monitor", "arguments", "config", "comm", "cluster", "data", "models", "checkpointing",
         "tensor", "pipeline", "pipe", "offload", "zero", "checkpoint", "optim", "engine", "estimate", "plan",
         "run", "train", "integrations", "cli"]  # fmt: skip
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> Iterator[str]:
    """Rooms that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        yield from (name.split(".")[1] for name in names if name.startswith("launcher."))


@pytest.mark.parametrize("path", FILES, ids=str)
def test_rooms_import_downwards(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    assert room in ORDER, f"give {room} its place in ORDER, and in docs/architecture.md"
    allowed = ORDER[: ORDER.index(room) + 1]
    assert set(imported_rooms(path)) <= set(allowed)


@pytest.mark.parametrize("path", FILES, ids=str)
def test_every_file_is_on_the_page(path: Path) -> None:
    assert f"\n| `{path.as_posix()}` |" in PAGE


def test_the_page_names_no_file_that_is_gone() -> None:
    listed = re.findall(
        r"^\| `([\w/]+\.py)` \|", PAGE[PAGE.index("## 2.") : PAGE.index("## 3.")], re.MULTILINE
    )
    assert sorted(listed) == [path.as_posix() for path in FILES]
