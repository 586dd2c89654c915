"""The structure that docs/architecture.md promises: every file is listed there, and rooms import downwards only."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "launcher"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
# A room imports those before it, and itself.
ORDER = ["errors", "files", "sizes", "owner", "scratch", "monitor", "arguments", "config", "comm", "cluster", "data",
         "models", "checkpointing", "tensor", "pipeline", "pipe", "offload", "zero", "checkpoint", "optim", "engine",
         "estimate", "plan", "resuming", "run", "train", "integrations", "cli"]  # fmt: skip
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


def test_every_room_has_its_place() -> None:
    rooms = {room_of(path) for path in FILES} - {"__init__"}
    assert rooms == set(ORDER), "give it its place in ORDER, and in docs/architecture.md"


def test_rooms_import_downwards() -> None:
    place = {room: index for index, room in enumerate(ORDER)}
    upwards = [
        f"{path} imports {room}"
        for path in FILES
        if room_of(path) in place
        for room in sorted(set(imported_rooms(path)))
        if place[room] > place[room_of(path)]
    ]
    assert upwards == []


def test_the_page_lists_every_file_and_no_other() -> None:
    listed = re.findall(
        r"^\| `([\w/]+\.py)` \|", PAGE[PAGE.index("## 2.") : PAGE.index("## 3.")], re.MULTILINE
    )
    assert sorted(listed) == [path.as_posix() for path in FILES]
