"""Stand-ins for modules that run on other stages: no parameters, but the attributes that models read."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from launcher.errors import ElsewhereError, LauncherError
from launcher.pipeline.crossing import TensorShape
from launcher.pipeline.hf.origins import Origin
from launcher.pipeline.hf.route import NO_PIPELINE, Route, StageOutputs


class RemoteModule(nn.Module):
    """Stand-in for a module that does not run in this forward. It has the module's plain attributes and
    properties, because models read, for example, the attention type of a block. During a forward it also has
    inner modules, which are stand-ins, and tensors, which are zeros, because models read, for example, the
    device of a weight.

    Args:
        where: description of the module's name and stage, for messages.
    """

    def __init__(self, module: nn.Module, where: str, route: Route) -> None:
        super().__init__()
        own = set(self.__dict__)
        self.__dict__.update({key: value for key, value in module.__dict__.items() if key not in own})
        self.__dict__.pop("forward", None)
        self.where, self.route, self.of = where, route, type(module)
        tensors = {**module._parameters, **module._buffers}
        # A plain attribute, so that nothing is registered: names stay those of the whole model.
        self.__dict__["inner"] = {
            **{name: None if tensor is None else TensorShape.of(tensor) for name, tensor in tensors.items()},
            **{name: _inner(child, where, route) for name, child in module.named_children()},
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        inner = self.__dict__.get("inner", {})
        if name in inner and self.route.running:
            found = inner[name]
            return self._zeros(found) if isinstance(found, TensorShape) else found
        found = inspect.getattr_static(self.__dict__.get("of"), name, None)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        if found is not None and not hasattr(found, "__get__"):
            return found
        raise ElsewhereError(
            f"{self.__dict__.get('where')}: {name!r} is not available on this rank",
            fix="access it on the ranks of that stage, or save the whole model with "
            "engine.save_16bit_model()",
        )

    def _zeros(self, shape: TensorShape) -> Tensor:
        """Return zeros of this shape. Floats get the current dtype of the weights, which may have been cast
        since the shape was recorded."""
        dtype = self.route.like().dtype if shape.dtype.is_floating_point else shape.dtype
        return self.route.zeros(TensorShape(shape.size, dtype))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ElsewhereError(f"{self.where}: it cannot run on this rank", fix=NO_PIPELINE)


def _inner(module: nn.Module, where: str, route: Route) -> nn.Module:
    if isinstance(module, nn.ModuleList):
        return nn.ModuleList([_inner(child, where, route) for child in module])
    if isinstance(module, nn.ModuleDict):
        return nn.ModuleDict({key: _inner(child, where, route) for key, child in module.items()})
    return RemoteModule(module, where, route)


class RemoteBlock(RemoteModule):
    """Stand-in for a block. Blocks before this stage pass their input on; blocks after it end the forward."""

    def __init__(self, block: nn.Module, where: str, route: Route, index: int) -> None:
        super().__init__(block, where, route)
        self.index = index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        route = self.route
        if self.index >= route.leave:
            route.leave_at(self.index, (args, kwargs))
        elif self.index > route.enter:
            raise LauncherError(
                f"block {self.index} was called out of order", where="pipeline", fix=NO_PIPELINE
            )
        states = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor))

        def made(value: Any) -> Any:
            if not isinstance(value, TensorShape):
                return value
            alike = TensorShape.of(states) == value and route.origins is None
            return states if alike else route.zeros(value)

        return tree_map(made, route.learned.returns_of(self.of))


class RemotePart(RemoteModule):
    """Stand-in for a part before or after the blocks. Before the blocks it returns zeros of the shape that
    the part returned on the first stage; values derived from them are replaced at this stage's first
    block."""

    def __init__(self, part: nn.Module, where: str, route: Route, name: str, *, before: bool) -> None:
        super().__init__(part, where, route)
        self.name, self.before = name, before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        template = self.route.learned.outputs.get(self.name) if self.before else None
        if template is None and self.route.looking_ahead:
            raise StageOutputs
        if template is None:
            raise LauncherError(
                f"{self.name} was called on a stage that does not have it", where="pipeline", fix=NO_PIPELINE
            )
        device = next(
            (leaf.device for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)),
            self.route.like().device,
        )

        def zeros(value: Any) -> Any:
            if not isinstance(value, TensorShape):
                return value
            return torch.zeros(value.size, dtype=value.dtype, device=device)

        return self.route.marked(tree_map(zeros, template), Origin.STAND_IN)
