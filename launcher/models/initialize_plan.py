"""The plan of initialisation: which initialisers write which tensors, recorded on meta stand-ins."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions
from transformers.pytorch_utils import Conv1D

from launcher.errors import LauncherError

# A tensor's place: (name of the module that registers it, its name there).
InitializedTensor = tuple[str, str]


@dataclass(frozen=True)
class InitializerCall:
    """One initialiser call: `kind` of the module named `name`."""

    name: str
    kind: str
    """`hf`: the enclosing PreTrainedModel's `_init_weights(module)`; `constructor`; or a method's name."""


@dataclass
class InitializationPlan:
    """The writers of each tensor. Holds names, not modules, so it does not keep the model alive."""

    owner_of_tied: dict[InitializedTensor, InitializedTensor] = field(default_factory=dict)
    """Every other place of a tied parameter -> the place whose module initialises it."""
    hf_parent: dict[str, str] = field(default_factory=dict)
    """Module name -> name of the PreTrainedModel whose `_init_weights` is responsible for it."""
    touched: dict[InitializerCall, set[InitializedTensor]] = field(default_factory=dict)
    """Tensors that a call reads or writes."""
    written: dict[InitializedTensor, None] = field(default_factory=dict)
    writers: dict[str, list[InitializerCall]] = field(default_factory=dict)
    """Module name -> the calls that write into its own tensors, in the order of a full initialisation."""

    def owned(self, name: str, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return the tensors that are initialised with this module, by local name."""
        return {
            key: tensor
            for key, tensor in _tensors(module)
            if (name, key) not in self.owner_of_tied and not getattr(tensor, "_is_hf_initialized", False)
        }

    def writers_of(self, name: str) -> list[InitializerCall]:
        return self.writers.get(name, [])

    def touched_by(self, writer: InitializerCall) -> set[InitializedTensor]:
        return self.touched[writer]

    def is_written(self, name: str, key: str) -> bool:
        return (name, key) in self.written

    def call(self, root: nn.Module, writer: InitializerCall) -> None:
        _initialiser(self, root, writer)()


_plans: weakref.WeakKeyDictionary[nn.Module, InitializationPlan] = weakref.WeakKeyDictionary()


def plan_of(root: nn.Module) -> InitializationPlan:
    """Return the plan of `root`, made on the first call and cached for the lifetime of `root`."""
    if root not in _plans:
        _plans[root] = _make_plan(root)
    return _plans[root]


@contextmanager
def stand_ins(
    root: nn.Module, places: set[InitializedTensor]
) -> Iterator[dict[InitializedTensor, torch.Tensor]]:
    """Replace the tensors in the given places with like-shaped meta tensors, and restore them afterwards."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[InitializedTensor, torch.Tensor] = {}
    try:
        for name, key in places:
            module = root.get_submodule(name)
            table: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
            real = table[key]
            fake = torch.empty(real.shape, dtype=real.dtype, device="meta")
            made[name, key] = nn.Parameter(fake, requires_grad=False) if table is module._parameters else fake
            saved.append((table, key, real))
            table[key] = made[name, key]
        yield made
    finally:
        for table, key, real in saved:
            table[key] = real


def _make_plan(root: nn.Module) -> InitializationPlan:
    plan = InitializationPlan(owner_of_tied=_tied_places(root))
    post_order = list(_post_order(root, "", "" if isinstance(root, PreTrainedModel) else None, set()))
    plan.hf_parent = {name: parent for name, _, parent in post_order if parent is not None}
    places = {(name, key) for name, module, _ in post_order for key, _ in _tensors(module)}
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        guard_torch_init_functions(),
        stand_ins(root, places) as fakes,
    ):
        recorder = _Recorder(fakes)
        for name, module, parent in post_order:
            if parent is not None:
                _record(plan, root, InitializerCall(name, "hf"), recorder)
            _record_own_method(plan, root, name, module, recorder)
    return plan


def _record_own_method(
    plan: InitializationPlan, root: nn.Module, name: str, module: nn.Module, recorder: _Recorder
) -> None:
    """Record the module's own initialiser, if HF's left some of its tensors uninitialised."""
    if all((name, key) in plan.written for key, _ in _tensors(module)):
        return
    for kind in ("reset_parameters", "_reset_parameters", "init_weights"):
        if callable(getattr(module, kind, None)) and not isinstance(module, PreTrainedModel):
            return _record(plan, root, InitializerCall(name, kind), recorder)
    if type(module) in _CONSTRUCTORS:
        _record(plan, root, InitializerCall(name, "constructor"), recorder)


def _record(plan: InitializationPlan, root: nn.Module, writer: InitializerCall, recorder: _Recorder) -> None:
    try:
        with recorder:
            plan.call(root, writer)
    except Exception as error:
        raise LauncherError(
            f"The initialiser of {writer.name or 'the root module'} fails on meta tensors: {error}",
            where=f"{type(root.get_submodule(writer.name)).__name__}, {writer.kind}",
            fix="use in-place operations that do not depend on values, as torch.nn.init does",
        ) from error
    reads, writes = recorder.take()
    if not writes:
        return
    plan.touched[writer] = reads | writes
    plan.written.update(dict.fromkeys(writes))
    for name in {name for name, _ in writes}:
        plan.writers.setdefault(name, []).append(writer)


def _initialiser(plan: InitializationPlan, root: nn.Module, writer: InitializerCall) -> Callable[[], Any]:
    module = root.get_submodule(writer.name)
    if writer.kind == "constructor":
        return lambda: _CONSTRUCTORS[type(module)](module)
    if writer.kind != "hf":
        method: Callable[[], Any] = getattr(module, writer.kind)
        return method
    model = root.get_submodule(plan.hf_parent[writer.name])
    return lambda: model._init_weights(module)  # type: ignore[operator]


def _construct_conv1d(module: nn.Module) -> None:
    nn.init.normal_(module.get_parameter("weight"), std=0.02)
    nn.init.zeros_(module.get_parameter("bias"))


# Modules that initialise their parameters only in the constructor (OpenAI GPT relies on it).
_CONSTRUCTORS: dict[type[nn.Module], Callable[[nn.Module], None]] = {Conv1D: _construct_conv1d}


class _Recorder(TorchDispatchMode):
    """Records which stand-ins an operation reads and writes, also through views (by storage)."""

    def __init__(self, fakes: dict[InitializedTensor, torch.Tensor]) -> None:
        super().__init__()
        self._place_of = {fake.untyped_storage()._cdata: place for place, fake in fakes.items()}
        self._reads: set[InitializedTensor] = set()
        self._writes: set[InitializedTensor] = set()

    def take(self) -> tuple[set[InitializedTensor], set[InitializedTensor]]:
        """Return the places read and written since the last call."""
        reads, writes = self._reads, self._writes
        self._reads, self._writes = set(), set()
        return reads, writes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            self._note(value, self._writes if is_write else self._reads)
        return func(*args, **kwargs)

    def _note(self, value: Any, into: set[InitializedTensor]) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                place = self._place_of.get(tensor.untyped_storage()._cdata)
                if place is not None:
                    into.add(place)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers that a module owns directly."""
    for table in (module._parameters, module._buffers):
        for key, tensor in table.items():
            if tensor is not None:
                yield key, tensor


def _post_order(
    module: nn.Module, name: str, hf_parent: str | None, seen: set[int]
) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Yield (name, module, name of the responsible HF model): children before their parents, each once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    for key, child in module.named_children():
        child_name = f"{name}.{key}" if name else key
        parent = child_name if isinstance(child, PreTrainedModel) else hf_parent
        yield from _post_order(child, child_name, parent, seen)
    yield name, module, hf_parent


def _tied_places(root: nn.Module) -> dict[InitializedTensor, InitializedTensor]:
    """Map every place of a tied parameter except its owner's to the owner's place."""
    places: dict[int, list[InitializedTensor]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        module, _, key = name.rpartition(".")
        places.setdefault(id(parameter), []).append((module, key))
    hf_targets = {_place(name) for name in getattr(root, "all_tied_weights_keys", None) or {}}
    owners: dict[InitializedTensor, InitializedTensor] = {}
    for group in places.values():
        # HF lists the copies as targets; without such a list, the first name is the owner.
        owner = next((place for place in group if place not in hf_targets), group[0])
        owners.update({place: owner for place in group if place != owner})
    return owners


def _place(name: str) -> InitializedTensor:
    module, _, key = name.rpartition(".")
    return module, key
