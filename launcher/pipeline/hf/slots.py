"""Finds and fills the places of values in the arguments of a block.

slot    the path of a value: the keys that lead to it from (args, kwargs)
shared  a dictionary or list inside the arguments: one object that the model passes to one block after another
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
ArgumentPath = tuple[Any, ...]


def slots_of(call: CallArguments) -> dict[ArgumentPath, Any]:
    """Return the value of each slot."""
    return dict(_visited(call, ()))


def _visited(value: Any, slot: ArgumentPath) -> Iterator[tuple[ArgumentPath, Any]]:
    inside: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, list) or type(value) is tuple:
        inside = enumerate(value)
    else:
        yield slot, value
        return
    for key, inner in inside:
        yield from _visited(inner, (*slot, key))


def in_shared(call: CallArguments, slot: ArgumentPath) -> bool:
    """Return whether a slot is in a shared container, whose contents persist for later blocks."""
    value: Any = call[slot[0]]
    for key in slot[1:-1]:
        value = value[key]
        if isinstance(value, MutableMapping | list):
            return True
    return False


def filled(call: CallArguments, values: Mapping[ArgumentPath, Any]) -> CallArguments:
    """Return the call with `values` in their slots. Shared containers are modified in place, and may grow."""
    for slot, value in values.items():
        call = _put(call, slot, value)
    return call


def _put(container: Any, slot: ArgumentPath, value: Any) -> Any:
    if not slot:
        return value
    key, rest = slot[0], slot[1:]
    if isinstance(container, MutableMapping):
        container[key] = _put(container.get(key, ()), rest, value)
        return container
    items = container if isinstance(container, list) else list(container)
    items += [None] * (key + 1 - len(items))
    items[key] = _put(items[key] if items[key] is not None else (), rest, value)
    return items if isinstance(container, list) else tuple(items)
