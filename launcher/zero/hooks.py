"""Where modules and autograd call us.

before a unit's forward    its parameters are gathered, the next units' gathers start
after it                   they are freed, unless they are used again soon
before its backward        (a gradient reaches its outputs, or autograd unpacks one of its weights) gathered again
after its backward         (the gradient of its last leaf has come, or the backward has come to the unit before it and
                           the graph has no more of them) freed; its gradients are reduced
end of the backward        what is left is reduced and waited for; everything is freed

Autograd must not keep gathered parameters alive between forward and backward. So while the model runs, a saved tensor
that is a view of a gathered buffer is packed as (flat buffer, geometry) and unpacked from the buffer of that moment.
The same is done where a backward needs older weights than the newest (`versions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from launcher.errors import LauncherError
from launcher.models.activation import recomputing
from launcher.models.gradients import put_gradient
from launcher.zero.features.user_gradients import LeafElsewhere
from launcher.zero.fetch import Fetcher
from launcher.zero.flat import FlatBuffer
from launcher.zero.reduce import Reducer
from launcher.zero.slot import ParamSlot
from launcher.zero.unit import Unit

Packed = tuple[FlatBuffer, torch.Size, tuple[int, ...], int | torch.SymInt]


class Removable(Protocol):
    """What stays until a model is plain again."""

    def remove(self) -> None: ...


class LastHook:
    """A hook on the accumulated gradient of a leaf, called after those that were registered when `register` was last.
    A script's may edit the gradient; once ours was called, it may be on its way."""

    def __init__(self, leaf: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
        self._leaf, self._hook = leaf, hook
        self._handle: Removable | None = None
        self.register()

    def register(self) -> None:
        self.remove()
        self._handle = torchs_register_hook(self._leaf, self._hook)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()


torchs_register_hook: Any = Tensor.register_post_accumulate_grad_hook
"""torch's own, before `forgetting.follow_torch`: what it registers stays where it is."""
R = TypeVar("R", bound=Removable)


def _transformed() -> bool:
    """Whether this is the forward of torch.func's grad, vjp, jacrev, ..."""
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == functorch.TransformType.Grad for interpreter in stack)


class Hooks:
    """Connects units to their modules, and to autograd.

    Args:
        units: all units; the root unit is the last and its module is the whole model.
    """

    def __init__(self, units: list[Unit], fetcher: Fetcher, reducer: Reducer) -> None:
        self.units, self.root = units, units[-1]
        self.fetcher, self.reducer = fetcher, reducer
        self._owner: dict[FlatBuffer, Unit] = {flat: unit for unit in units for flat in unit.flats}
        self._occupants = next(iter(self._owner)).pool.occupants if self._owner else {}
        self._packing: list[saved_tensors_hooks] = []
        self._in_backward = False
        self._scales = False
        self.kinds: set[bool] = set()  # of the backwards of this step: whether their losses were scaled
        self._forwards = 0  # of units
        self._graph = -1  # the backward that autograd was asked for; others run nested in it
        self._handles: list[Removable] = []
        self._arrivals: dict[int, LastHook] = {}  # by the leaf's id, which lives as long as these
        self.gather_for_one_call: Callable[[Hooks, Unit, nn.Module], None] | None = (
            None  # `features/outside.py`
        )
        self.keeps: object = None  # what must live as long as these hooks are called
        self.packs = any(unit.sharded for unit in units)  # what is saved for backward is looked through
        self._register()

    def _register(self) -> None:
        for unit in self.units:
            if self.packs or unit is self.root:
                before, after = self._before(unit), self._after(unit)
                self._handles.append(unit.module.register_forward_pre_hook(before, prepend=True))
                # always_call: an exception in forward must not leave the packing of saved tensors on
                self._handles.append(unit.module.register_forward_hook(after, always_call=True))
            for slot in unit.trainable_slots():
                self._arrivals[id(slot.leaf)] = self.add_removable(LastHook(slot.leaf, self._arrival(unit)))
                if slot.flat.sharded:
                    move = self._from_handle(unit, slot)
                    self._handles.append(Tensor.register_post_accumulate_grad_hook(slot.handle, move))
        for unit in self.units:
            for module in dict.fromkeys(unit.owners()):
                before = self._before_inner(unit)
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))

    def add_removable(self, thing: R) -> R:
        """Have `remove` take this away, too."""
        self._handles.append(thing)
        return thing

    def come_last(self, leaf: Tensor) -> None:
        """Another hook was registered on a tensor: if it is a leaf of ours, our hook has to follow it."""
        if (ours := self._arrivals.get(id(leaf))) is not None:
            ours.register()

    def remove(self) -> None:
        """Take every hook off: the modules are plain modules again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._arrivals.clear()
        self.keeps = None

    # ---- forward ----------------------------------------------------------------------------

    def _before(self, unit: Unit) -> Callable[..., None]:
        def before_forward(module: nn.Module, args: object) -> None:
            if recomputing():
                unit.recomputed = True
                self.enter_backward(unit)
                return
            if unit is self.root:
                self._begin_forward()
            with record_function(f"{unit.name}/unshard"):
                self.fetcher.use(unit, "forward")

        return before_forward

    def _before_inner(self, unit: Unit) -> Callable[..., None]:
        """For every module that shows a sharded parameter: it may be called while its unit's module is not running."""

        def before_forward(module: nn.Module, args: object) -> None:
            if torch.compiler.is_compiling() or unit.is_unsharded:
                return
            if recomputing():
                unit.recomputed = True
                self.enter_backward(unit)
            elif (
                module is not unit.module and self.gather_for_one_call is not None
            ):  # that one's own hook gathers
                self.gather_for_one_call(self, unit, module)

        return before_forward

    def _begin_forward(self) -> None:
        self.abandon()
        self.fetcher.begin(torch.is_grad_enabled())
        self.start_packing()

    def start_packing(self) -> bool:
        """Pack what is saved for backward, from now on; gives whether that is new. Who else takes what is saved, as
        torch.utils.checkpoint does to compute it again, must find it as it is."""
        taken = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        starts = torch.is_grad_enabled() and self.packs and not taken
        if starts:
            packing = saved_tensors_hooks(self._pack, self._unpack)
            packing.__enter__()
            self._packing.append(packing)
        return starts

    def stop_packing(self) -> None:
        self._packing.pop().__exit__(None, None, None)

    def _after(self, unit: Unit) -> Callable[..., None]:
        def after_forward(module: nn.Module, args: object, output: object) -> None:
            if recomputing():
                return
            if unit is self.root:
                self._end_forward(output)
                return
            self._forwards += 1
            unit.ran = (unit.ran[0] if unit.ran else self._forwards, self._forwards)
            self.fetcher.leave(unit)
            self._watch_outputs(output, lambda _: self._come_to(unit))

        return after_forward

    def _end_forward(self, output: object) -> None:
        if self._packing:
            self.stop_packing()
        if not (torch.is_grad_enabled() and self.watch_backward(output)):
            self.fetcher.end()  # no backward will come

    def watch_backward(self, output: object) -> bool:
        """Have the backward begin when it comes to these outputs; gives whether one can."""
        return self._watch_outputs(output, lambda _: self._begin_backward())

    def _watch_outputs(self, output: object, hook: Callable[[Tensor], None]) -> bool:
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if not outputs or _transformed():  # its backward is of inputs, and comes to no parameter
            return False
        register_multi_grad_hook(outputs, hook, mode="any")
        return True

    # ---- saved tensors ----------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor | Packed:
        flat = self._flat_of(tensor)
        if flat is None:
            return tensor
        return flat, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Tensor | Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        flat, size, stride, offset = packed
        unit = self._owner[flat]
        if not flat.is_unsharded or not unit.in_backward:
            self.enter_backward(unit)
        assert flat.full is not None
        return flat.full.as_strided(size, stride, offset)

    def _flat_of(self, tensor: Tensor) -> FlatBuffer | None:
        if type(tensor) not in (Tensor, nn.Parameter, LeafElsewhere) or tensor.layout is not torch.strided:
            return None
        return self._occupants.get(tensor.untyped_storage()._cdata)

    # ---- backward ---------------------------------------------------------------------------

    @contextmanager
    def scaling(self) -> Iterator[None]:
        """Backwards inside are of losses that the engine has scaled: by the loss scale, by accumulation."""
        self._scales = True
        try:
            yield
        finally:
            self._scales = False

    def begin_scaled(self, gradient: torch.Tensor) -> None:
        """A backward begins, outside of `scaling()`, of a loss that the engine has scaled: for a hook of that loss."""
        self._scales = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_scaled)  # type: ignore[attr-defined]

    def _end_scaled(self) -> None:
        self._scales = False

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        if self.reducer.measured:
            raise LauncherError(
                "a backward came after clip_grad_norm_() in the same step: its gradients would not be in the norm",
                where="backward()",
                fix="call clip_grad_norm_() after the last backward of a step, then step(); or zero_grad() before "
                "another backward",
            )
        self._in_backward = True
        self.kinds.add(self._scales)
        for gradient in self.reducer.gradients:
            gradient.reopen()
        self._graph = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]
        self.enter_backward(self.root)

    def _begin_unseen(self) -> None:
        """The first that is heard of a backward is this leaf's gradient: its forward did not go through the model."""
        if any(gradient.closed for gradient in self.reducer.gradients):
            self.abandon()
            raise LauncherError(
                "a backward came after the gradients of this step were reduced over the ranks, and its forward did not "
                "go through the engine or its module as a whole",
                where="backward()",
                fix="call the engine (or engine.module), not a module inside; or add the losses and call backward once",
            )
        self._begin_backward()

    def enter_backward(self, unit: Unit) -> None:
        self._begin_backward()
        if unit.in_backward and unit.is_unsharded:
            return
        unit.in_backward = True
        if unit.sharded:
            self._free_passed_units(unit)
            with record_function(f"{unit.name}/unshard"):
                self.fetcher.use(unit, "backward")

    def _free_passed_units(self, entering: Unit) -> None:
        """Of a unit without trainable parameters no gradients tell that its backward has ended. Nor do those of one
        that was recomputed and is partly frozen: its frozen parameters may be needed after the last of them."""
        for unit in list(self.fetcher.unsharded):
            if unit.in_backward and unit.arrived == unit.expected and unit not in (entering, self.root):
                unit.in_backward = False
                self.fetcher.reshard(unit)

    def _arrival(self, unit: Unit) -> Callable[[Tensor], None]:
        # torch keeps hooks where Python's collector does not look: one that owned its leaf would keep all of us.
        mine, of_unit = ref(self), ref(unit)

        def gradient_arrived(leaf: Tensor) -> None:
            hooks, unit = mine(), of_unit()
            if hooks is None or unit is None:
                return
            if not hooks._in_backward:
                hooks._begin_unseen()
            unit.arrived += 1
            if unit.arrived == unit.expected:
                hooks._finish(unit)

        return gradient_arrived

    def _finish(self, unit: Unit) -> None:
        """The last of its gradients has come."""
        with record_function(f"{unit.name}/reduce"):
            self.reducer.ready(unit)
        if unit.sharded and unit is not self.root and not (unit.recomputed and unit.partly_frozen):
            self.fetcher.reshard(unit)

    def _come_to(self, unit: Unit) -> None:
        """The backward has come to the outputs of a unit, from all that followed it in the forward.

        Some of that this rank may not have used, or not wholly. Other ranks may have, and wait for its reduction, while
        this one needs them to gather what comes next: so it is finished first.
        """
        self._begin_backward()
        in_nested = torch._C._current_graph_task_id() != self._graph  # which knows of its own graph only
        while not in_nested and (late := self.reducer.awaited) and self._is_over(late, unit):
            self._take_part(late)
            late.arrived = late.expected
            self._finish(late)
        self.enter_backward(unit)

    def _is_over(self, late: Unit, come_to: Unit) -> bool:
        """Whether all gradients of `late` that the backward has, have come."""
        if not (late.ran and come_to.ran and late.ran[0] > come_to.ran[1]):
            return False
        missing = sum(not slot.gets_gradient() for slot in late.trainable_slots())
        return late.arrived + missing == late.expected

    def _take_part(self, unit: Unit) -> None:
        """Gather a unit whose backward this rank leaves out: other ranks may need its part."""
        if unit.sharded and unit.ran and not unit.in_backward:
            self.fetcher.use(unit, "backward")
            self.fetcher.reshard(unit)

    def _from_handle(self, unit: Unit, slot: ParamSlot) -> Callable[[Tensor], None]:
        """Some compute with a handle inside GatheredParameters: its gradient is the leaf's."""
        mine, of_unit, of_slot = ref(self), ref(unit), ref(slot)  # as above

        def gradient_arrived(handle: Tensor) -> None:
            hooks, unit, slot = mine(), of_unit(), of_slot()
            if hooks is None or unit is None or slot is None:
                return
            hooks._begin_backward()
            gradient = handle.grad
            put_gradient(handle, None)
            assert gradient is not None
            if unit.arrived == unit.expected:
                raise LauncherError(
                    f"a gradient of {slot.name} came when those of {unit.name} were on their way already",
                    where=f"parameter {slot.name}, used inside GatheredParameters",
                    fix="use it through its module's forward",
                )
            if slot.leaf.grad is not None:
                slot.leaf.grad.add_(gradient)
                return
            shown, slot.leaf.data = (
                slot.leaf.data,
                gradient,
            )  # it may be freed, and a gradient must be of its shape
            put_gradient(slot.leaf, gradient)
            slot.leaf.data = shown

        return gradient_arrived

    def _end_backward(self) -> None:
        with record_function("root/finish_backward"):
            for unit in self.reducer.left:
                self._take_part(unit)
            self.reducer.finish()
        self._forget_backward()

    def abandon(self) -> None:
        """Forget a backward that an exception ended: autograd does not call us then."""
        if self._in_backward:
            self.reducer.abandon()
            self._forget_backward()

    def _forget_backward(self) -> None:
        self._in_backward = False
        for unit in self.units:
            unit.arrived, unit.in_backward, unit.ran, unit.recomputed = 0, False, None, False
        self.fetcher.end()
