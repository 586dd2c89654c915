"""docs/design/files.md, and the table of imports in docs/architecture.md: made from the modules themselves."""

from __future__ import annotations

from pathlib import Path

from tests.pages.rooms import FILES, ORDER, imported_rooms, purpose, room_of

BEGIN, END = "<!-- imports: made by `python -m tests.pages` -->", "<!-- end of imports -->"
HEAD = """\
# Files

Every module of `launcher/`, by package, in the order of imports: a package imports only packages above it. The
sentences are the first ones of the modules' docstrings. Made by `python -m tests.pages`.
"""


def files_page() -> str:
    """The text of docs/design/files.md."""
    parts = [
        HEAD,
        "## Modules beside the packages",
        "",
        *_rows([path for path in FILES if len(path.parts) == 1]),
    ]
    for room in ORDER:
        files = [path for path in FILES if len(path.parts) > 1 and room_of(path) == room]
        if files:
            about = purpose(Path(room, "__init__.py"))
            parts += ["", f"## {room}/", "", f"{about}.", "", *_rows(files)]
    return "\n".join(parts) + "\n"


def _rows(files: list[Path]) -> list[str]:
    inner = [path for path in files if path.as_posix() != f"{room_of(path)}/__init__.py"]
    rows = [f"| `{'/'.join(path.parts[1:]) or path.name}` | {_cell(purpose(path))} |" for path in inner]
    return ["| file | what it is for |", "|---|---|", *rows]


def imports_table() -> str:
    """What each room imports, the lowest room first."""
    imports: dict[str, set[str]] = {room: set() for room in ORDER}
    for path in FILES:
        if room_of(path) in imports:
            imports[room_of(path)] |= set(imported_rooms(path)) & set(ORDER)
    rows = []
    for room in ORDER:
        names = [_name(other) for other in ORDER if other in imports[room] - {room, "errors"}]
        rows.append(f"| {_name(room)} | {', '.join(names)} |")
    return "\n".join(["| room | imports |", "|---|---|", *rows])


def _name(room: str) -> str:
    return f"`{room}.py`" if Path(f"{room}.py") in FILES else f"`{room}/`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_imports_table(page: str) -> str:
    """docs/architecture.md with today's table between the two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{imports_table()}\n\n{END}{rest.partition(END)[2]}"
