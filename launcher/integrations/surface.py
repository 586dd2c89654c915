"""Creates the `deepspeed` package that scripts see, from the tables in `served.py`, `whole_modules.py`,
`constants.py` and `refused.py`.

Its only file is `shim/deepspeed/__init__.py`. Submodules are created on demand and names are resolved on
first access, so importing the package is cheap. A name that is not available raises an error with the reason.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from launcher.integrations.constants import NAMED, VALUES, constants_of
from launcher.integrations.only_called import ONLY_CALLS, only_called
from launcher.integrations.refused import PACKAGE, NoSuchModule, NotHere, missing
from launcher.integrations.served import NAMES, VERSION
from launcher.integrations.whole_modules import WHOLE_MODULES

DIRECTORY = Path(__file__).parent / "shim"
"""The directory to put on sys.path: the package and its metadata."""

SWITCH = "LAUNCHER_DEEPSPEED_SHIM"
"""Environment variable: 0 disables a shim that is installed in the environment (`cli/shim.py`)."""
TOLD = "LAUNCHER_DEEPSPEED_SHIM_TOLD"
"""Environment variable that suppresses the notice about what `import deepspeed` resolves to."""

__all__ = [
    "DIRECTORY",
    "MODULES",
    "NAMES",
    "PACKAGE",
    "SWITCH",
    "TOLD",
    "VERSION",
    "NoSuchModule",
    "NotHere",
    "getter",
    "look_up",
    "serve",
]


def _with_parents() -> frozenset[str]:
    found = {""}
    for module in {*NAMES, *WHOLE_MODULES, *NAMED, *VALUES, *ONLY_CALLS}:
        parts = module.split(".")
        found |= {".".join(parts[:number]) for number in range(1, len(parts) + 1)}
    return frozenset(found)


MODULES = _with_parents()
"""All modules below the package, and "" for the package itself."""


def look_up(module: str, name: str) -> Any:
    """Return the value of a name in a module of the package.

    Args:
        module: its name below the package; "" for the package itself.

    Raises:
        NotHere: the name is not available; the error contains the reason and the alternative.
    """
    below = f"{module}.{name}" if module else name
    if name in NAMES.get(module, {}):
        home, _, attribute = NAMES[module][name].partition(":")
        found = importlib.import_module(home)
        return getattr(found, attribute) if attribute else found
    if below in MODULES:
        return importlib.import_module(f"{PACKAGE}.{below}")
    if not name.startswith("__"):
        constants = constants_of(module)
        if name in constants:
            return constants[name]
        for home in WHOLE_MODULES.get(module, ()):
            rest = importlib.import_module(home)
            if hasattr(rest, name):
                return getattr(rest, name)
    if (stand_in := only_called(module, name)) is not None:
        return stand_in
    what, how = missing(below)
    raise NotHere(what, **how)


def getter(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of the package.

    Args:
        module: its name below the package; "" for the package itself.
    """

    def find(name: str) -> Any:
        value = look_up(module, name)
        setattr(sys.modules[f"{PACKAGE}.{module}" if module else PACKAGE], name, value)
        return value

    return find


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Creates the modules below the package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, below = fullname.partition(".")
        if package != PACKAGE or not below:
            return None
        if below not in MODULES:
            what, how = missing(below)
            raise NoSuchModule(what, **how)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        find = getter(module.__name__.partition(".")[2])
        setattr(module, "__getattr__", find)  # noqa: B010


def tell() -> None:
    """Print once, on rank 0, what was imported, so that nobody mistakes it for DeepSpeed."""
    if os.environ.get("RANK", "0") == "0" and TOLD not in os.environ:
        os.environ[TOLD] = "1"  # child processes do not print it again
        print(f"launcher: `import {PACKAGE}` uses launcher's engine (`launch shim --help`)", file=sys.stderr)


def serve() -> Callable[[str], Any]:
    """Make the modules below the package importable, and return the package's own `__getattr__`."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    return getter("")
