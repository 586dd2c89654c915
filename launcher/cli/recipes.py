"""Subcommands, recipes and example configurations by name: which is meant, where it is, whether its flags are right."""

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
"""Name, with dashes or underscores: (module of `launcher.cli`, function), imported when the command is given."""
LONGEST_NAME = 4095  # of a path, on Linux
PACKAGE = Path(__file__).resolve().parent.parent


def shared_directory(name: str) -> Path:
    """Return `recipes` or `ds_configs`: beside the installed package, else at the root of the source tree."""
    installed = PACKAGE / "_share" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def recipe_names() -> list[str]:
    """Return the names that can be given to `launch`, sorted."""
    return sorted(path.stem for path in shared_directory("recipes").glob("*.py") if path.stem[0] != "_")


def find_config(given: str) -> tuple[str, str | None]:
    """Return what `--config` names: a file that is there, else an example of the package, such as zero2.json or, as
    the documentation writes it, ds_configs/zero2.json.

    Returns:
        what to read, and a line for people where an example was taken.
    """
    example = given.removeprefix("ds_configs/")
    if example in _config_names() and not os.path.lexists(given):
        path = str(shared_directory("ds_configs") / example)
        return path, f"there is no {given} in this directory; using the example {path}"
    return given, None


def _config_names() -> list[str]:
    return sorted(path.name for path in shared_directory("ds_configs").glob("*.json"))


def check_name(name: str, kind: str) -> None:
    """Raise `ConfigError` where what stands on the command line cannot be the name of a module or a program."""
    if not name or name.startswith("-") or len(name) > LONGEST_NAME or printable(name) != name:
        flag = {"module": "--module", "program": "--no_python"}.get(kind)
        raise ConfigError(
            f"{shortened(name)!r} is not the name of a {kind}",
            where=flag,
            fix=f"write it in place of the script's name{f': {flag} NAME' if flag else ''}",
        )


def find_recipe(name: str) -> tuple[Path, bool]:
    """Return the file behind what stands on the command line.

    Args:
        name: a recipe's name, or a path that ends in `.py`.

    Returns:
        the file, and True where it is one of our own recipes that know our flags. Others are scripts.

    Raises:
        ConfigError: no such recipe or file; the message lists the recipes and the nearest name.
    """
    if name.endswith(".py"):
        path = Path(name).absolute()
        if len(name) > LONGEST_NAME or not os.path.isfile(path):  # isfile takes any name
            where = shortened(str(path), 300)
            raise ConfigError(f"there is no file {shortened(name, 300)}", where=where, fix=_known(path.stem))
        path = path.resolve()
        return path, path.parent == shared_directory("recipes").resolve() and _has_flags(path)
    if name in recipe_names():
        path = shared_directory("recipes") / f"{name}.py"
        return path, _has_flags(path)
    raise ConfigError(f"there is no recipe {shortened(name)!r}", fix=_known(name))


def _has_flags(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return any(
        isinstance(statement, ast.FunctionDef) and statement.name == "flags" for statement in tree.body
    )


def check_flags(path: Path, arguments: Sequence[str]) -> argparse.Namespace | None:
    """Parse a recipe's arguments before any rank is started, where the recipe tells how.

    A recipe tells it by a function `flags() -> FlagParser` at the top of its file, which may use
    `launcher.cli` and the file's plain constants. `--help` is answered here, as argparse does, by SystemExit.

    Returns:
        the parsed flags; None where only the ranks can tell.

    Raises:
        ConfigError: a flag the recipe does not know, or a wrong value.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    # Only what the flags need: the recipe's other imports would bring torch, and seconds.
    tree.body = [statement for statement in tree.body if _serves_flags(statement)]
    scope: dict[str, Any] = {}
    exec(compile(tree, str(path), "exec"), scope)
    if "flags" not in scope:
        return None
    try:
        parser = scope["flags"]()
    except NameError:  # it uses more of the recipe: the ranks will check
        return None
    _, unknown = parser.parse_known_args(list(arguments))
    if unknown:
        _refuse_launchers(parser, unknown[0], path.stem)
    parsed: argparse.Namespace = parser.parse_args(list(arguments))
    return parsed


def _refuse_launchers(parser: FlagParser, token: str, recipe: str) -> None:
    """Refuse a flag of the launcher's behind the recipe's name, and say where it goes."""
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
