"""Stand-ins for names that this engine refuses: a file that imports one is run, and the tests that use it fail.

Else one import of an inside of DeepSpeed's would take all tests of its file along.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Absent(ModuleType):
    def __call__(self, *given: Any, **more: Any) -> Any:
        raise RuntimeError(f"{self.__name__} is not here")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Comes before all others, and answers for DeepSpeed's modules that they refuse.

    `from deepspeed.a import Name` asks for a module deepspeed.a.Name where deepspeed.a has no such name.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("deepspeed."):
            return None
        for finder in sys.meta_path:
            try:
                spec = None if finder is self else finder.find_spec(fullname, path, target)
            except ModuleNotFoundError:
                spec = None
            if spec is not None:
                return spec
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def serve() -> None:
    """From now on every name below `deepspeed` can be imported."""
    sys.meta_path.insert(0, _Finder())
