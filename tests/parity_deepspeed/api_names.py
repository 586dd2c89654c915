"""Collect the public names of the installed DeepSpeed by introspection, and write them to `api_names.json`.

    python -m tests.parity_deepspeed.api_names    # with DeepSpeed 0.19.8 on the path, without our shim

Of a module: the names that it defines, without a leading underscore. Of a package: also the names that it imports from
its modules. Plus every name that a project in `imported_names.tsv` imports from it. Of a few classes: methods and
attributes. A module that cannot be imported here (Triton, other devices) is parsed as text.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.parity_deepspeed.imported_names import PACKAGE, read

LIST = Path(__file__).with_suffix(".json")
CLASSES = {
    "runtime.engine.DeepSpeedEngine": "runtime.engine",
    "runtime.pipe.engine.PipelineEngine": "runtime.pipe.engine",
    "runtime.pipe.module.PipelineModule": "runtime.pipe.module",
    "runtime.pipe.topology.PipelineParallelGrid": "runtime.pipe.topology",
    "runtime.pipe.topology.ProcessTopology": "runtime.pipe.topology",
    "runtime.config.DeepSpeedConfig": "runtime.config",
    "runtime.zero.config.DeepSpeedZeroConfig": "runtime.zero.config",
    "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": "runtime.zero.stage3",
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": "runtime.zero.stage_1_and_2",
    "accelerator.abstract_accelerator.DeepSpeedAccelerator": "accelerator.abstract_accelerator",
}
"""Classes whose members are listed, and their modules."""
MARKED = ("runtime.zero.partition_parameters", "runtime.zero.parameter_offload", "runtime.zero.stage3")
"""Modules that set attributes named ds_* on parameters."""


def modules() -> list[str]:
    """Return every module below the package, and "" for the package itself."""
    root = importlib.util.find_spec(PACKAGE)
    assert root is not None and root.submodule_search_locations
    found = [""]
    for place in root.submodule_search_locations:
        for path in Path(place).rglob("*.py"):
            parts = path.relative_to(place).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found.append(".".join(parts))
    return sorted({name for name in found if "csrc" not in name and "__pycache__" not in name})


def names_of(module: str, used: set[str]) -> list[str]:
    """Return the public names of a module. `used`: the names that projects import from it."""
    source = _source(module)
    if source is None:
        return []
    defined, bound = _bindings(source)
    try:
        live: Any = importlib.import_module(f"{PACKAGE}.{module}" if module else PACKAGE)
    except Exception:
        return sorted(defined | (used & bound))
    taken = (
        {name for name, value in vars(live).items() if _ours(value)} if hasattr(live, "__path__") else set()
    )
    below = (
        {info.name for info in pkgutil.iter_modules(live.__path__)} if hasattr(live, "__path__") else set()
    )
    return sorted(
        {name for name in (defined | taken) - below if name[0] != "_"}
        | {n for n in used - below if hasattr(live, n)}
    )


def _ours(value: Any) -> bool:
    home = getattr(value, "__module__", None)
    return not isinstance(value, ModuleType) and isinstance(home, str) and home.partition(".")[0] == PACKAGE


def _source(module: str) -> str | None:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    base = (
        Path(spec.submodule_search_locations[0], *module.split("."))
        if module
        else Path(spec.submodule_search_locations[0])
    )
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.exists():
            return path.read_text()
    return None


def _bindings(source: str) -> tuple[set[str], set[str]]:
    """Return the names that a module defines, and all names that it binds."""
    defined: set[str] = set()
    bound: set[str] = set()
    stack: list[ast.stmt] = list(ast.parse(source).body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.If | ast.Try):
            stack += [*node.body, *node.orelse, *(s for h in getattr(node, "handlers", []) for s in h.body)]
    return {name for name in defined if name[0] != "_"}, bound | defined


def members_of(path: str) -> list[str]:
    """Return the methods of a class and the attributes set on self, from the source of it and its bases."""
    module, _, name = path.rpartition(".")
    kind = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != PACKAGE:
            continue
        found |= set(vars(base)) | set(getattr(base, "__annotations__", {}))
        found |= set(re.findall(r"^\s+self\.(\w+)(?:: [\w\[\], .]+)? = ", inspect.getsource(base), re.M))
    return sorted(
        name for name in found if name[0] != "_" and name not in ("model_config", "model_fields_set")
    )


def marks() -> list[str]:
    """Return the attributes that DeepSpeed sets on parameters and modules."""
    found: set[str] = set()
    for module in MARKED:
        found |= set(re.findall(r"\.(ds_\w+)\b(?! *\()", _source(module) or ""))
    return sorted(found)


def collect() -> dict[str, list[str]]:
    """Return module -> its names; `module.Class.` -> its members; `parameter.` -> attributes of parameters."""
    used: dict[str, set[str]] = {}
    known = modules()
    for name in read():
        parts = name.split(".")
        home = next(".".join(parts[:n]) for n in range(len(parts), -1, -1) if ".".join(parts[:n]) in known)
        rest = name[len(home) :].lstrip(".").split(".")[0]
        if rest and "()" not in rest:
            used.setdefault(home, set()).add(rest)
    found = {module: names_of(module, used.get(module, set())) for module in known}
    found |= {f"{path}.": members_of(path) for path in CLASSES}
    found["parameter."] = marks()
    return found


if __name__ == "__main__":
    lines = [f"{json.dumps(module)}: {json.dumps(names)}" for module, names in sorted(collect().items())]
    LIST.write_text("{\n" + ",\n".join(lines) + "\n}\n")
