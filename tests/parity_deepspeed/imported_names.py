"""Find the DeepSpeed names that projects use. Reads checkouts and writes `imported_names.tsv`: name -> projects.

    python -m tests.parity_deepspeed.imported_names PROJECT_DIRECTORY ... > tests/parity_deepspeed/imported_names.tsv

A name is the part after `deepspeed.`: an imported name, or an attribute of an imported module. Projects are the names
of the directories. Code that does not parse is skipped, and so are copies of DeepSpeed's engine.
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "deepspeed"
ACCELERATOR = "accelerator.get_accelerator"
LIST = Path(__file__).with_suffix(".tsv")


def names_in(source: str) -> set[str]:
    """Return the dotted names below `deepspeed` in a program.

    `accelerator.get_accelerator().x` for those of the device.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    known, found = _imported(tree)
    chains = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in chains}
    for node in chains:
        if id(node) not in inner and (name := _name_of(node, known)):
            found.add(name)
    return {name for name in found if name}


def _imported(tree: ast.AST) -> tuple[dict[str, str], set[str]]:
    """Return the meaning of each imported name, and the set of imports."""
    known: dict[str, str] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package, _, below = alias.name.partition(".")
                if package == PACKAGE:
                    known[alias.asname or package] = below if alias.asname else ""
                    found.add(below)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            package, _, below = node.module.partition(".")
            if package == PACKAGE:
                for alias in node.names:
                    name = f"{below}.{alias.name}" if below else alias.name
                    known[alias.asname or alias.name] = name
                    found.add(below if alias.name == "*" else name)
    return known, found


def _name_of(node: ast.expr, known: dict[str, str]) -> str:
    """Return the dotted name of a chain of attributes; "" if it is not DeepSpeed's."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    called = isinstance(node, ast.Call)
    if isinstance(node, ast.Call):
        inner = node.func
        name = known.get(inner.id, "") if isinstance(inner, ast.Name) else _name_of(inner, known)
        return f"{ACCELERATOR}().{parts[-1]}" if name == ACCELERATOR and parts else ""
    if called or not isinstance(node, ast.Name) or node.id not in known:
        return ""
    return ".".join([*filter(None, [known[node.id]]), *reversed(parts)])


def _sources(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*.py")):
        text = path.read_text(errors="replace")
        if PACKAGE in text and "class DeepSpeedEngine(" not in text:
            yield text


def collect(directories: list[Path]) -> dict[str, list[str]]:
    """Return name -> the projects that use it."""
    users: dict[str, set[str]] = defaultdict(set)
    for directory in directories:
        for source in _sources(directory):
            try:
                names = names_in(source)
            except SyntaxError:
                continue
            for name in names:
                users[name].add(directory.name.replace("+", "/"))
    return {name: sorted(users[name]) for name in sorted(users)}


def read() -> dict[str, list[str]]:
    """Return the stored list."""
    lines = (line.split("\t") for line in LIST.read_text().splitlines())
    return {name: projects.split(" ") for name, projects in lines}


if __name__ == "__main__":
    for name, projects in collect([Path(argument) for argument in sys.argv[1:]]).items():
        print(name, " ".join(projects), sep="\t")
