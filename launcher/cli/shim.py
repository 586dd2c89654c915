"""`launch shim`: makes `import deepspeed` use this engine in programs that `launch` does not start."""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.cli.flags import FlagParser
from launcher.errors import ConfigError
from launcher.integrations.surface import DIRECTORY, PACKAGE, SWITCH

DESCRIPTION = """\
Makes `import deepspeed` use this engine in programs that `launch` does not start: torchrun, accelerate launch,
notebooks. An installed DeepSpeed is not modified; without the shim, it is imported as before."""
EPILOG = f"""\
examples:
  launch shim run -- accelerate launch --config_file accelerate.yaml train.py      only that command
  PYTHONPATH=$(launch shim path) torchrun --nproc_per_node 2 train.py              the same, manually
  launch shim install                                        every program of this Python environment
  launch shim remove

{SWITCH}=0 disables an installed shim for one command.
"""
FILE = "launcher_deepspeed_shim.pth"
"""File in site-packages. At startup, Python executes the lines of a .pth file that begin with `import`."""


def shim_parser() -> FlagParser:
    parser = FlagParser(prog="launch shim", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument(
        "action",
        choices=("status", "path", "run", "install", "remove"),
        nargs="?",
        default="status",
        help="status: show what `import deepspeed` imports in this environment (default)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="for run: -- COMMAND ...")
    return parser


def shim(argv: Sequence[str]) -> int:
    """Run `launch shim [ACTION]`; the action `run` replaces this process with the command."""
    action, *command = argv or ["status"]
    flags = shim_parser().parse_args([action])
    if command and flags.action != "run":
        raise ConfigError(
            f"launch shim {flags.action} takes no arguments: {' '.join(command)}",
            fix="launch shim --help",
        )
    match flags.action:
        case "path":
            print(DIRECTORY)
        case "run":
            _run(command[1:] if command[:1] == ["--"] else command)
        case "install":
            _install()
        case "remove":
            _remove()
    if flags.action in ("install", "remove", "status"):
        print(status())
    return 0


def with_shim(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the shim first in PYTHONPATH."""
    found = os.pathsep.join(filter(None, [str(DIRECTORY), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": found}


def status() -> str:
    """Return a line describing what `import deepspeed` imports in this environment."""
    if place().exists():
        return f"installed in {place()}: `import {PACKAGE}` imports launcher's engine in this environment"
    return f"not installed: `import {PACKAGE}` imports launcher's engine only in what `launch` starts"


def place() -> Path:
    return Path(sysconfig.get_path("purelib")) / FILE


def _run(command: Sequence[str]) -> None:
    if not command:
        raise ConfigError(
            "missing argument: the command to run", fix="launch shim run -- accelerate launch train.py"
        )
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), with_shim(os.environ))
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from None


def _install() -> None:
    line = f"import os, sys; os.environ.get({SWITCH!r}) == '0' or sys.path.insert(0, {str(DIRECTORY)!r})\n"
    try:
        place().write_text(line)
    except OSError as error:
        raise ConfigError(
            f"the shim cannot be installed: {error.strerror}",
            where=str(place()),
            fix="make a virtual environment that you may write to, or use `launch shim run`",
        ) from None


def _remove() -> None:
    try:
        place().unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"the shim cannot be removed: {error.strerror}", where=str(place())) from None
