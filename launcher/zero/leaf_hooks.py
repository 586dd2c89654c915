"""Hooks on the accumulated gradients of leaves, called after those of scripts.

[Note: our hook on a leaf comes last]

A script may register a hook on a parameter that reads or edits its gradient, also after `initialize`. torch calls hooks
in the order of registration. Ours hands the gradient over: it may be on its way to other ranks when the next hook runs.
So `register_post_accumulate_grad_hook` is followed on torch's class (`features/user_gradients.py`), and ours is
registered anew, behind the script's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

torchs_register_hook: Any = Tensor.register_post_accumulate_grad_hook
"""torch's own, before `user_gradients.follow_torch`: what it registers stays where it is."""


class Removable(Protocol):
    """A hook that stays until a model is plain again."""

    def remove(self) -> None: ...


class LastHook:
    """A hook on the accumulated gradient of a leaf, called after those that were registered when `register` was last.
    See [Note: our hook on a leaf comes last]."""

    def __init__(self, leaf: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
        self._leaf, self._hook = leaf, hook
        self._handle: Removable | None = None
        self.register()

    def register(self) -> None:
        """Register after all hooks that there are now."""
        self.remove()
        self._handle = torchs_register_hook(self._leaf, self._hook)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
