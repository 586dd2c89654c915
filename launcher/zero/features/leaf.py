"""Leaf modules: modules that form one unit with all their submodules, marked by DeepSpeed's functions.

Units are transformer blocks, the embedding and the head. A leaf inside a unit has no effect. A leaf that
contains units replaces them. Any other leaf is taken out of the root unit and becomes its own unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import eq

from torch import nn

from launcher.errors import ConfigError
from launcher.models.units import class_before

FLAG = "_z3_leaf"  # DeepSpeed's attribute name, so modules marked by its functions are leaves, too
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
STRUCTURE = (*CONTAINERS, nn.Sequential)  # modules whose children may be used without calling them
LARGEST = 10**9  # maximum elements of a leaf chosen by module granularity

Blocks = list[tuple[str, nn.Module]]


# ---- marking --------------------------------------------------------------------------------------


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark `model` itself as a leaf, or remove the mark."""
    setattr(model, FLAG, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of `model`."""
    return [module for module in model.modules() if getattr(module, FLAG, False)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark every module of these classes and return them. Call this before `launcher.initialize`.

    Args:
        leaf_module_classes: classes or class names, with or without their Python module.
        raise_if_not_found: raise an error if no module matches.

    Raises:
        ConfigError: no module is of these classes.
    """
    return _mark_classes(model, list(leaf_module_classes), True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the mark from every module of these classes and return them."""
    return _mark_classes(model, list(leaf_module_classes), False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark modules by their names in `named_modules()`; return (modules, names that no module has)."""
    return _mark_names(model, module_names, flag, raise_if_not_found, eq)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark every module whose name has one of the suffixes; return (modules, suffixes without a match)."""
    return _mark_names(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def _mark_classes(
    model: nn.Module, classes: list[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found = [module for module in model.modules() if any(_is_of(module, kind) for kind in classes)]
    if not found and raise_if_not_found:
        names = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in classes)
        raise ConfigError(f"no module has the class {names}", fix="pass the class of a module of the model")
    return _mark(found, flag)


def _is_of(module: nn.Module, kind: type | str) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    own = class_before(module)
    return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")


def _mark_names(
    model: nn.Module,
    wanted: Iterable[str],
    flag: bool,
    raise_if_not_found: bool,
    fits: Callable[[str, str], bool],
) -> tuple[list[nn.Module], list[str]]:
    found: dict[nn.Module, None] = {}
    missing = []
    for text in wanted:
        fitting = [module for name, module in model.named_modules() if fits(name, text)]
        found |= dict.fromkeys(fitting)
        missing += [] if fitting else [text]
    if missing and raise_if_not_found:
        raise ConfigError(
            f"no module name matches: {', '.join(missing)}",
            fix="use names from named_modules(), or their last parts",
        )
    return _mark(list(found), flag), missing


def _mark(modules: list[nn.Module], flag: bool) -> list[nn.Module]:
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def mark_fine_modules(model: nn.Module, threshold: int) -> list[nn.Module]:
    """Mark the outermost modules whose mean number of elements per submodule with parameters (itself
    included, rounded down) is at most `threshold`. Containers, modules without children, and modules with
    more than 1e9 elements are not marked."""
    found: list[nn.Module] = []
    _mark_fine(model, threshold, found)
    return _mark(found, True)


def _mark_fine(module: nn.Module, threshold: int, found: list[nn.Module]) -> None:
    numel = sum(p.numel() for p in module.parameters())
    if numel == 0:
        return
    calls = [
        m for m in module.modules() if not isinstance(m, STRUCTURE) and any(True for _ in m.parameters())
    ]
    nests = any(True for _ in module.children()) and not isinstance(module, STRUCTURE)
    if nests and numel <= min(LARGEST, (threshold + 1) * len(calls) - 1):
        found.append(module)
        return
    for child in module.children():
        _mark_fine(child, threshold, found)


# ---- units ----------------------------------------------------------------------------------------


def with_leaves(model: nn.Module, blocks: Blocks) -> Blocks:
    """Return the modules that become units, in model order: `blocks`, and the outermost leaves that are not
    inside a block.

    Raises:
        ConfigError: such a leaf is a container without a forward.
    """
    leaves = list(_outermost_leaves(model))
    if not leaves:
        return blocks
    if leaves[0][1] is model:
        return []
    inside_leaf = {inner for _, leaf in leaves for inner in leaf.modules()}
    inside_block = {inner for _, block in blocks for inner in block.modules() if inner is not block}
    units = [(name, block) for name, block in blocks if block not in inside_leaf]
    units += [(name, _called(name, leaf)) for name, leaf in leaves if leaf not in inside_block]
    place = {module: i for i, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: place[unit[1]])


def _called(name: str, leaf: nn.Module) -> nn.Module:
    if isinstance(leaf, CONTAINERS):
        raise ConfigError(
            f"{name} is a {type(leaf).__name__}, which cannot be a leaf: it has no forward to gather "
            "its parameters in",
            fix="mark its parent module, or the modules inside it",
        )
    return leaf


def _outermost_leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if getattr(module, FLAG, False) and module not in inside:
            inside.update(module.modules())
            if any(True for _ in module.parameters()):
                yield name, module
