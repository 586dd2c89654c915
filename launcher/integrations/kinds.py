"""Classes of DeepSpeed's that scripts ask `isinstance` of, where no such class is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.errors import LauncherError


class Kind(type):
    """A class whose instances are all that `asks` is true of; making one is an error.

    Attributes:
        asks: whether something is one.
        what: that it stands for.
        fix: what to do instead of making one.
    """

    asks: Callable[[Any], bool]
    what: str
    fix: str

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.asks(instance)

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        raise LauncherError(
            f"{cls.__name__} cannot be made by a script: it stands for {cls.what}", fix=cls.fix
        )


def kind(name: str, asks: Callable[[Any], bool], what: str, fix: str) -> Kind:
    """Return a class of this kind, by its name."""
    return Kind(name, (), {"asks": staticmethod(asks), "what": what, "fix": fix})
