"""Stand-ins for names that this engine refuses. A file that imports one can run, and only the tests that use it fail.

Otherwise a single import of a DeepSpeed internal would fail all tests of its file.
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
    """Precedes all other finders, and serves DeepSpeed modules that they do not find.

    `from deepspeed.a import Name` looks for a module deepspeed.a.Name if deepspeed.a has no such name.
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
    """Make every name below `deepspeed` importable."""
    sys.meta_path.insert(0, _Finder())
