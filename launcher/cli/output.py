"""Console output and files of the subcommands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.recipes import find_config
from launcher.cluster.secret import masked
from launcher.errors import ConfigError, printable

if TYPE_CHECKING:
    from rich.console import Console

EXIT_MISTAKE = 2  # in flags or in the configuration
WIDE = 170  # columns when the output is not a terminal


def new_console() -> Console:
    """Return the console for tables; when the output is not a terminal, lines are long and not wrapped."""
    from rich.console import Console

    made = Console(highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = WIDE
    return made


def print_error(text: str) -> None:
    """Print `error: TEXT` to stderr, with the first word in red on a terminal."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("[bold red]error:[/bold red] ", end="")
    console.print(printable(masked(text)), markup=False)


def config_of(given: str) -> str:
    """Return the configuration to read for `given`; print to stderr if it is one of the examples."""
    path, found = find_config(given)
    if found:
        print(f"launch: {printable(found)}", file=sys.stderr)
    return path


def must_be_new(path: str | Path, flag: str) -> None:
    """Raise `ConfigError` if the file already exists; called before long work."""
    if Path(path).exists():
        raise ConfigError(f"{path} already exists", where=flag, fix="choose a new file")


def write(path: str | Path, text: str, flag: str, *, over: bool = False) -> None:
    """Write the file that a flag names; an existing file is replaced only with `over`.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    if not over:
        must_be_new(path, flag)
    try:
        with Path(path).open("w" if over else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", where=flag, fix="choose another file"
        ) from None
