"""Attributes of modules that count what is split: heads, features, channels."""

from __future__ import annotations

from typing import Any

from torch import nn

from launcher.tensor.parts import IndivisibleError


class ConfigView:
    """A config as one module sees it, with numbers of its own; all else is the config's, whenever it is asked for."""

    def __init__(self, config: Any) -> None:
        self.__dict__["_viewed"] = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_viewed" not in self.__dict__:  # asked by copy and pickle
            raise AttributeError(name)
        return getattr(self._viewed, name)


def divide(module: nn.Module, attribute: str, degree: int, *, replicates: bool) -> None:
    """Divide what `attribute` counts among the ranks.

    Args:
        attribute: of the module, or `config.x`: of the config that the module looks at.
        replicates: fewer than the ranks are held by several each.

    Raises:
        IndivisibleError: the degree does not divide it.
    """
    owner: Any = module
    if attribute.startswith("config."):
        attribute = attribute.removeprefix("config.")
        if not isinstance(module.config, ConfigView):
            module.config = ConfigView(module.config)  # type: ignore[assignment]
        owner = module.config
    value = getattr(owner, attribute)
    if value % degree == 0:
        setattr(owner, attribute, value // degree)
    elif replicates and degree % value == 0:
        setattr(owner, attribute, 1)
    else:
        raise IndivisibleError(value)
