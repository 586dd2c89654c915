"""`disable_python_gc`: disables Python's cyclic garbage collector while an engine requires it."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

_holders = 0
_was_on = False


def hold(owner: Any) -> weakref.finalize[[], Any]:
    """Collect once, and disable the collector until the returned object is called or `owner` is destroyed.

    With several owners in one process, the last release restores the collector to its previous state.
    """
    global _holders, _was_on
    if _holders == 0:
        _was_on = gc.isenabled()
        gc.collect()
        gc.disable()
    _holders += 1
    return weakref.finalize(owner, _let_go)


def _let_go() -> None:
    global _holders
    _holders = max(0, _holders - 1)
    if _holders == 0 and _was_on:
        gc.enable()


def _in_child() -> None:
    """Enable the collector in a forked dataloader worker, which has no engine."""
    global _holders
    if _holders and _was_on:
        gc.enable()
    _holders = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
