"""`disable_python_gc`: Python's cyclic garbage collector off, as long as an engine wants it to be."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

_holders = 0
_was_on = False


def hold(owner: Any) -> weakref.finalize[[], Any]:
    """Collect once, and turn the collector off until the answer is called, or `owner` is gone.

    Several owners share one process: the collector is on again, if it was before, when the last one lets go.
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
    """A forked worker of a data loader has no engine, and collects as usual."""
    global _holders
    if _holders and _was_on:
        gc.enable()
    _holders = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
