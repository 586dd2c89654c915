"""Hooks on the accumulated gradients of leaves that run after the user's hooks.

[Note: our hook on a leaf comes last]

User code may register a hook that reads or edits a parameter's gradient, even after `initialize`. torch calls
hooks in the order of registration. Our hook hands the gradient over to the reduction, so it may already be in
flight when a later hook runs. `register_post_accumulate_grad_hook` is therefore wrapped on torch's class
(`features/user_gradients.py`), and our hook is registered again after each user hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

torchs_register_hook: Any = Tensor.register_post_accumulate_grad_hook
"""torch's method before `user_gradients.follow_torch` wraps it: registering with it reorders no hooks."""


class Removable(Protocol):
    """A hook that is removed when the model becomes a plain module again."""

    def remove(self) -> None: ...


class LastHook:
    """A hook on the accumulated gradient of a leaf that runs after all hooks registered before the last
    `register` call. See [Note: our hook on a leaf comes last]."""

    def __init__(self, leaf: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
        self._leaf, self._hook = leaf, hook
        self._handle: Removable | None = None
        self.register()

    def register(self) -> None:
        """Register the hook again, after all current hooks."""
        self.remove()
        self._handle = torchs_register_hook(self._leaf, self._hook)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
