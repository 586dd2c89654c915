"""Stand-ins for DeepSpeed classes that scripts only use in `isinstance` checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher.errors import LauncherError


class Kind(type):
    """Metaclass of classes that cannot be instantiated; their instances are the objects that `asks` accepts.

    Attributes:
        asks: returns whether an object is an instance.
        what: what the class stands for, for the error message.
        fix: what to do instead of instantiating it.
    """

    asks: Callable[[Any], bool]
    what: str
    fix: str

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.asks(instance)

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        raise LauncherError(
            f"{cls.__name__} cannot be instantiated: it only represents {cls.what} in isinstance checks",
            fix=cls.fix,
        )


def kind(name: str, asks: Callable[[Any], bool], what: str, fix: str) -> Kind:
    """Create a class with the metaclass `Kind`."""
    return Kind(name, (), {"asks": staticmethod(asks), "what": what, "fix": fix})
