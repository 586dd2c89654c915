"""docs/design/files.md, and the table of imports in docs/architecture.md: made from the modules themselves."""

from __future__ import annotations

from pathlib import Path

from tests.pages.packages import FILES, ORDER, imported_packages, package_of, purpose

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
    for package in ORDER:
        files = [path for path in FILES if len(path.parts) > 1 and package_of(path) == package]
        if files:
            about = purpose(Path(package, "__init__.py"))
            parts += ["", f"## {package}/", "", f"{about}.", "", *_rows(files)]
    return "\n".join(parts) + "\n"


def _rows(files: list[Path]) -> list[str]:
    inner = [path for path in files if path.as_posix() != f"{package_of(path)}/__init__.py"]
    rows = [f"| `{_file(path)}` | {_cell(purpose(path))} |" for path in inner]
    return ["| file | what it is for |", "|---|---|", *rows]


def _file(path: Path) -> str:
    """A module as its package lists it; a package inside of it is a folder."""
    inside = "/".join(path.parts[1:]) or path.name
    return inside if inside == "__init__.py" else inside.removesuffix("__init__.py")


def imports_table() -> str:
    """What each package imports, the lowest package first."""
    imports: dict[str, set[str]] = {package: set() for package in ORDER}
    for path in FILES:
        if package_of(path) in imports:
            imports[package_of(path)] |= set(imported_packages(path)) & set(ORDER)
    rows = []
    for package in ORDER:
        names = [_name(other) for other in ORDER if other in imports[package] - {package, "errors"}]
        rows.append(f"| {_name(package)} | {', '.join(names)} |")
    return "\n".join(["| package | imports |", "|---|---|", *rows])


def _name(package: str) -> str:
    return f"`{package}.py`" if Path(f"{package}.py") in FILES else f"`{package}/`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_imports_table(page: str) -> str:
    """docs/architecture.md with today's table between the two marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{imports_table()}\n\n{END}{rest.partition(END)[2]}"
