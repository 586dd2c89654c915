"""The units of a model: transformer blocks, which are gathered, reduced and checkpointed one by one.

Also finds the two ends of a model: its input embedding and its output head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

EXPERTS = frozenset({"is_transposed", "has_bias"})
"""Attributes that transformers' `use_experts_implementation` sets on the experts module of every model."""

SPREAD = "_launcher_all_experts"
"""Attribute of a sharded experts module: the number of experts on all ranks (`experts/`)."""

SPREAD_OVER = "_launcher_spread_over"
"""Attribute of an experts module built by a script: the number of ranks to shard the experts over."""


def transformers_model_in(model: nn.Module) -> nn.Module:
    """Return the transformers model that `model` wraps (PEFT, a value head); `model` itself if it is one, or if
    it contains none or several."""
    from transformers import PreTrainedModel

    found = _outermost((name, m) for name, m in model.named_modules() if isinstance(m, PreTrainedModel))
    return found[0][1] if len(found) == 1 else model


def class_before(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before its layer was split over ranks or converted to float8."""
    kind: type[nn.Module] = type(module)
    while (before := vars(kind).get("class_before")) is not None:
        kind = before
    return kind


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module holds the experts of a layer, with the call interface of transformers."""
    return module.__dict__.keys() >= EXPERTS


def unit_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the transformer blocks of `model` as (name, module), in registration order, none inside another.

    Blocks are the modules whose class HF lists in `_no_split_modules`. Without such a list, or if nothing
    matches, they are the elements of the longest `nn.ModuleList` of equal-class modules, together with every
    other such list of the same length or the same class (encoder and decoder). Without blocks, return [].
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    inside_lists = {id(block) for m in model.modules() if isinstance(m, nn.ModuleList) for block in m}
    listed = [(name, module) for name, module in model.named_modules() if type(module).__name__ in names]
    # HF also lists embeddings and heads of some models; blocks are the modules in an nn.ModuleList.
    stacked = [(name, module) for name, module in listed if id(module) in inside_lists]
    return _outermost(stacked) or _longest_lists(model) or _outermost(listed)


def _longest_lists(model: nn.Module) -> list[tuple[str, nn.Module]]:
    outer = list(_outermost_lists(model))
    if not outer:
        return []
    longest = max((blocks for _, blocks in outer), key=len)
    kind = type(longest[0][1])
    alike = [blocks for _, blocks in outer if len(blocks) == len(longest) or type(blocks[0][1]) is kind]
    return _outermost([block for blocks in alike for block in blocks])


def _outermost_lists(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Yield the block lists that are not nested in another list's blocks (experts are not units)."""
    seen: list[str] = []
    for name, blocks in _block_lists(model):
        if not any(name.startswith(prefix) for prefix in seen):
            seen.append(f"{name}.")
            yield name, blocks


def _block_lists(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    """Yield every nn.ModuleList whose elements are of one class, have parameters, and define a forward
    (unlike a ModuleDict)."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        same_class = len({type(block) for block in module}) == 1
        called = type(module[0]).forward is not nn.Module.forward
        if same_class and called and any(True for _ in module[0].parameters()):
            yield name, [(f"{name}.{i}", block) for i, block in enumerate(module)]


def _outermost(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the modules that are in none of those before them, each once."""
    chosen: dict[nn.Module, str] = {}
    names: set[str] = set()
    for name, module in modules:
        path = name.split(".")
        nested = any(".".join(path[:end]) in names for end in range(1, len(path)))
        if not nested and module not in chosen:
            chosen[module] = name
            names.add(name)
    return [(name, module) for module, name in chosen.items()]


def ends_of(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the input embedding and the output head; None for one that the model does not provide."""
    found = []
    for get in ("get_input_embeddings", "get_output_embeddings"):
        try:
            found.append(getattr(model, get)())
        except (AttributeError, NotImplementedError):
            found.append(None)
    return found[0], found[1]
