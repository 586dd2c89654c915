"""Lookup of subcommands, recipes and example configurations by name, and early checks of a recipe's flags."""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.cli.flags import FlagParser
from launcher.errors import ConfigError, printable, shortened

DEFAULT_RECIPE = "pretrain"
SUBCOMMANDS = {
    "check": ("check", "check"),
    "schedule": ("schedule", "schedule"),
    "bench": ("bench", "bench"),
    "memory-estimate": ("memory_estimate", "memory_estimate"),
    "plan": ("plan", "plan"),
    "calibrate": ("calibrate", "calibrate"),
    "manifest": ("manifest", "print_manifest"),
    "top": ("top", "top"),
    "report": ("hosts", "report"),
    "ssh": ("hosts", "ssh"),
    "inspect": ("checkpoint", "inspect"),
    "export": ("checkpoint", "export"),
    "import": ("checkpoint", "import_"),
    "shim": ("shim", "shim"),
}
"""Name, with dashes or underscores -> (module of `launcher.cli`, function), imported on demand."""
LONGEST_NAME = 4095  # longest path on Linux
PACKAGE = Path(__file__).resolve().parent.parent


def shared_directory(name: str) -> Path:
    """Return the directory `recipes` or `ds_configs`: in the installed package, else in the source tree."""
    installed = PACKAGE / "_share" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def recipe_names() -> list[str]:
    """Return the sorted names of all recipes."""
    return sorted(path.stem for path in shared_directory("recipes").glob("*.py") if path.stem[0] != "_")


def find_config(given: str) -> tuple[str, str | None]:
    """Resolve `--config`: an existing file, else an example of the package, such as zero2.json.

    The prefix of ds_configs/zero2.json, which the documentation writes, is optional.

    Returns:
        what to read, and a message for the user if it is an example.
    """
    example = given.removeprefix("ds_configs/")
    if example in _config_names() and not os.path.lexists(given):
        path = str(shared_directory("ds_configs") / example)
        return path, f"{given} does not exist in this directory; using the example {path}"
    return given, None


def _config_names() -> list[str]:
    return sorted(path.name for path in shared_directory("ds_configs").glob("*.json"))


def check_name(name: str, kind: str) -> None:
    """Raise `ConfigError` if `name` cannot be the name of a module or a program."""
    if not name or name.startswith("-") or len(name) > LONGEST_NAME or printable(name) != name:
        flag = {"module": "--module", "program": "--no_python"}.get(kind)
        raise ConfigError(
            f"{shortened(name)!r} is not a valid {kind} name",
            where=flag,
            fix=f"write it in place of the script's name{f': {flag} NAME' if flag else ''}",
        )


def find_recipe(name: str) -> tuple[Path, bool]:
    """Return the file of a recipe or script given on the command line.

    Args:
        name: a recipe's name, or a path that ends in `.py`.

    Returns:
        the file, and whether it is one of our own recipes, which define `flags`. All other files are scripts.

    Raises:
        ConfigError: no such recipe or file; the message lists the recipes and the nearest name.
    """
    if name.endswith(".py"):
        path = Path(name).absolute()
        if len(name) > LONGEST_NAME or not os.path.isfile(path):  # `isfile` accepts any string
            where = shortened(str(path), 300)
            raise ConfigError(f"file not found: {shortened(name, 300)}", where=where, fix=_known(path.stem))
        path = path.resolve()
        return path, path.parent == shared_directory("recipes").resolve() and _has_flags(path)
    if name in recipe_names():
        path = shared_directory("recipes") / f"{name}.py"
        return path, _has_flags(path)
    raise ConfigError(f"unknown recipe {shortened(name)!r}", fix=_known(name))


def _has_flags(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return any(
        isinstance(statement, ast.FunctionDef) and statement.name == "flags" for statement in tree.body
    )


def check_flags(path: Path, arguments: Sequence[str]) -> argparse.Namespace | None:
    """Parse a recipe's arguments before any rank is started, if the recipe defines a parser.

    The parser comes from a top-level function `flags() -> FlagParser` in the recipe's file, which may use
    `launcher.cli` and the file's plain constants. `--help` is handled here and raises SystemExit, as in
    argparse.

    Returns:
        the parsed flags; None if only the ranks can parse them.

    Raises:
        ConfigError: an unknown flag, or an invalid value.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    # Execute only what `flags` needs: the recipe's other imports would load torch, which takes seconds.
    tree.body = [statement for statement in tree.body if _serves_flags(statement)]
    scope: dict[str, Any] = {}
    exec(compile(tree, str(path), "exec"), scope)
    if "flags" not in scope:
        return None
    try:
        parser = scope["flags"]()
    except NameError:  # `flags` uses other parts of the recipe: the ranks will check
        return None
    _, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        _refuse_launchers(parser, unknown[0], path.stem)
    parsed: argparse.Namespace = parser.parse_args(list(arguments))
    return parsed


def _refuse_launchers(parser: FlagParser, token: str, recipe: str) -> None:
    """Raise `ConfigError` if `token` is a launcher flag, which must precede the recipe's name."""
    from launcher.cli.launch_flags import launch_parser

    launcher = launch_parser()
    flag = launcher.canonical(token.partition("=")[0])
    if flag in launcher.known_flags():
        parser.refuse(token, hint=f"write it before the recipe's name: `launch {flag} ... {recipe} ...`")


def _serves_flags(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
        return module == "__future__" or module.startswith("launcher.cli.")
    if isinstance(statement, ast.Assign):
        return not any(
            isinstance(node, ast.Call | ast.Name) and _is_read(node) for node in ast.walk(statement)
        )
    return isinstance(statement, ast.FunctionDef) and statement.name == "flags"


def _is_read(node: ast.AST) -> bool:
    return not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _known(name: str) -> str:
    from launcher.config.problems import nearest

    names = recipe_names()
    near = nearest(name[:80], [*names, *SUBCOMMANDS], furthest=max(1, len(name[:80]) // 2))
    guess = f"did you mean `launch {near}`? " if near else ""
    return f"{guess}recipes: {', '.join(names) or 'none found'}; or give the path of a .py file"
