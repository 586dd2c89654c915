"""What every Python process of a client has besides its own: a record of losses, and what a machine without GPUs and
without a hub lacks. Python imports this file by itself, because its directory is on the path. The clients stay as
they are.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import client_data
import client_devices


class _After(importlib.abc.MetaPathFinder):
    """Calls a function before a module is imported, and another one after.

    Args:
        module: its full name.
    """

    def __init__(
        self,
        module: str,
        then: Callable[[ModuleType], None] | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        self.module, self.then, self.first = module, then, first
        self.asking = False  # the finders behind this one

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module or self.asking:
            return None
        if self.first is not None:
            self.first()
        self.asking = True
        spec = importlib.util.find_spec(fullname)
        self.asking = False
        if spec is None or spec.loader is None or self.then is None:
            return spec
        run, then = spec.loader.exec_module, self.then

        def executed(module: ModuleType) -> None:
            run(module)
            then(module)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


# ---- losses ---------------------------------------------------------------------------------------


def _record(deepspeed: ModuleType) -> None:
    """From now on every loss that an engine gets in `backward`, or gives in `train_batch`, is a line of a file."""
    original = deepspeed.initialize

    def initialize(*arguments: Any, **keywords: Any) -> Any:
        made = original(*arguments, **keywords)
        _seed()  # for its data
        kind = type(made[0])
        if "recorded" not in vars(kind):
            kind.recorded = True
            name = "train_batch" if hasattr(kind, "train_batch") and _has_stages(made[0]) else "backward"
            setattr(kind, name, _told(getattr(kind, name), of_result=name == "train_batch"))
        return made

    deepspeed.initialize = initialize  # type: ignore[attr-defined]
    _seed()  # for its weights: DeepSpeed has drawn numbers while it was imported
    if not hasattr(deepspeed, "__launcher__"):
        _arrive_early(deepspeed)


def _seed() -> None:
    """For a program that makes weights and data up and sets no seed."""
    if "seed" in os.environ.get("CLIENT_STAND_INS", "").split():
        import torch

        torch.manual_seed(0)


def _arrive_early(deepspeed: ModuleType) -> None:
    """accelerate opens the process group itself on CPUs, and DeepSpeed's `zero.Init` counts ranks by its own."""
    begin = deepspeed.zero.Init.__init__

    def begun(self: Any, *arguments: Any, **keywords: Any) -> None:
        deepspeed.init_distributed()
        begin(self, *arguments, **keywords)

    deepspeed.zero.Init.__init__ = begun


def _has_stages(engine: Any) -> bool:
    """Whether it trains whole batches of stages, DeepSpeed's engine or ours."""
    runtime = getattr(engine, "runtime", None)
    return type(engine).__name__ == "PipelineEngine" or (runtime is not None and not runtime.staged.is_whole)


def _told(method: Callable[..., Any], of_result: bool) -> Callable[..., Any]:
    file = Path(os.environ["CLIENT_LOSSES"] + os.environ.get("RANK", "0"))

    def called(engine: Any, *arguments: Any, **keywords: Any) -> Any:
        result = None
        if of_result:
            result = method(engine, *arguments, **keywords)
        loss = result if of_result else (arguments[0] if arguments else keywords["loss"])
        with file.open("a") as record:
            record.write(json.dumps([type(engine).__module__, float(loss)]) + "\n")
        return result if of_result else method(engine, *arguments, **keywords)

    return called


# ---- torchvision ----------------------------------------------------------------------------------


def _without_operators() -> None:
    """The torchvision of PyPI is built for torch with CUDA; with torch for CPUs its operators do not load, and the
    module that describes them fails. Data sets and transforms need none."""
    sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")


# ---- packages, data, and devices ----------------------------------------------------------------------------


def _pretend(package: str) -> None:
    module = ModuleType(package)
    module.__spec__ = importlib.machinery.ModuleSpec(package, None)
    sys.modules[package] = module


_STAND_INS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "cifar": ("torchvision.datasets", client_data.cifar),
    "data": ("datasets", client_data.from_hub),
    "metrics": ("evaluate", client_data.metrics),
    "timm": ("timm", client_data.untrained),
    "no_dropout": ("torch.nn.functional", client_data.no_dropout),
    "cuda": ("torch", client_devices.no_devices),
    "accelerators": ("accelerate.test_utils.testing", client_devices.two_accelerators),
    "torch_accelerators": ("transformers.testing_utils", client_devices.two_accelerators),
    "gloo": ("accelerate.state", client_devices.gloo),
    "fp16": ("deepspeed", client_devices.half_precision),
    "no_init_weights": ("transformers.modeling_utils", client_data.older_names),
}
"""Words of CLIENT_STAND_INS -> the module that is changed, and how. `seed` is read above."""

_PACKAGES = {"torchaudio": "llamafactory"}
"""Words of CLIENT_STAND_INS that are packages without a wheel for this machine -> the program that imports them, and
uses nothing of them here."""

if "CLIENT_STAND_INS" in os.environ:
    if os.environ.get("CLIENT_LOSSES"):
        sys.meta_path.insert(0, _After("deepspeed", then=_record))
    sys.meta_path.insert(0, _After("torchvision", first=_without_operators))
    for _word in os.environ["CLIENT_STAND_INS"].split():
        if _word in _PACKAGES:
            sys.meta_path.insert(0, _After(_PACKAGES[_word], first=partial(_pretend, _word)))
        elif _word != "seed":
            _module, _then = _STAND_INS[_word]
            sys.meta_path.insert(0, _After(_module, then=_then))
