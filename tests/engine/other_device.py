"""A device beside the host, on a machine without one: torch's meta device, whose tensors have no values.

Operations between the two fail on it as they do between a GPU and its host, and `Crossings` sees all that goes from
one to the other, and every wait of the host for a value.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import launcher
from launcher.comm import setup
from launcher.errors import LauncherError
from launcher.zero.features import copies

OTHER = torch.device("meta")
PACKAGE = f"{Path(launcher.__file__).parent}/"
OPERATOR = "aten::{}".format
NOT_ON_META = {OPERATOR("_fused_sgd_"), OPERATOR("_fused_adagrad_")}


class Crossing(NamedTuple):
    """Something that went from one device to the other.

    Attributes:
        kind: "wait": the host waits for the device; "to host", "to device": a copy that it does not wait for;
            "pageable": it waits until its own memory has been read.
        where: file of the launcher that asked for it; "the model": none did.
    """

    kind: str
    where: str


class Crossings(TorchDispatchMode):
    """Counts them.

    Args:
        value: that the host finds in what has none.
    """

    def __init__(self, value: int = 1) -> None:
        super().__init__()
        self._value = value
        self.found: Counter[Crossing] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, first = func._schema.name, args[0] if args else None
        to_host = torch.device(kwargs.get("device") or OTHER).type == "cpu"
        if name == OPERATOR("_local_scalar_dense") and first.is_meta:
            self._note("wait")
            return float(self._value) if first.is_floating_point() else self._value
        if name == OPERATOR("_to_copy") and first.is_meta and to_host:
            self._note("wait")
            return torch.full(first.shape, self._value, dtype=kwargs.get("dtype") or first.dtype)
        if name == OPERATOR("nonzero") and first.is_meta:  # its size is a value
            self._note("wait")
            return torch.empty(first.numel(), first.dim(), dtype=torch.long, device=OTHER)
        if name == OPERATOR("bincount") and first.is_meta:  # it looks for the largest
            self._note("wait")
            return torch.empty(max(args[2:3] or [kwargs.get("minlength", 0)]), dtype=torch.long, device=OTHER)
        if name == OPERATOR("copy_") and first.is_meta and not args[1].is_meta:
            self._note("to device" if _at_once(args) else "pageable")
            return first
        if name == OPERATOR("copy_") and args[1].is_meta and not first.is_meta:
            self._note("to host" if _at_once(args) else "wait")
            return first
        if name in NOT_ON_META:  # they change what they are given, and return nothing
            return None
        result = func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor) and t.dim()]
        if len({t.is_meta for t in tensors}) > 1:
            self._note("to device")
        return result

    def _note(self, kind: str) -> None:
        self.found[Crossing(kind, _asked_for())] += 1

    def of(self, kind: str) -> Counter[str]:
        """Return how often each file did so; what the model does by itself is left out."""
        return Counter({
            crossing.where: count for crossing, count in self.found.items()
            if crossing.kind == kind and crossing.where != "the model"
        })  # fmt: skip


def _at_once(args: tuple[Any, ...]) -> bool:
    """Return whether a copy was said not to be waited for."""
    return len(args) > 2 and bool(args[2])


def _asked_for() -> str:
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(PACKAGE):
            return frame.filename.removeprefix(PACKAGE)
        if "/transformers/" in frame.filename:
            break
    return "the model"


@contextmanager
def other_device() -> Iterator[None]:
    """Let engines be built on it: ranks by gloo, torch's fused optimizers, no autocast."""
    devices = [*_foreach_utils._get_fused_kernels_supported_devices(), OTHER.type]
    plain, check = torch.is_autocast_enabled, copies.check_copies

    def without_verdict(*args: Any) -> None:
        with suppress(LauncherError):  # gradients without values differ
            check(*args)

    with (
        patch("torch.is_autocast_enabled", lambda kind="cpu": kind != OTHER.type and plain(kind)),
        patch.object(copies, "check_copies", without_verdict),
        patch.dict(setup.BACKENDS, meta="gloo"),
        patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: devices),
    ):
        yield


def third_step(
    model: Callable[[], nn.Module],
    config: dict[str, Any],
    batch: Callable[[], dict[str, Tensor]],
    world: int = 1,
) -> Crossings:
    """Return what crossed in the third step of an engine on the other device.

    Args:
        world: ranks, of which this process plays the first.
    """
    if world > 1:
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    with other_device():
        torch.manual_seed(0)
        whole = model().to(OTHER)
        whole.tie_weights()  # type: ignore[operator]
        with Crossings(world):
            engine: Any = launcher.initialize(model=whole, config=config, device=OTHER)[0]
        for _ in range(3):
            with Crossings(world) as crossings:
                number = engine.gradient_accumulation_steps()
                engine.train_microbatches([batch()] * number, [1 / number] * number)
                engine.step()
        engine.destroy()
    return crossings
