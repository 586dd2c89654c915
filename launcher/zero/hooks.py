"""The module and autograd hooks that drive ZeRO.

before a unit's forward    its parameters are unsharded, the gathers of the next units start
after its forward          they are resharded, unless they are used again soon
before its backward        (a gradient reaches its outputs, or autograd unpacks one of its weights) unsharded again
after its backward         (the gradient of its last leaf has arrived, or the backward has reached an earlier
                           unit and the graph produces no more) resharded; its gradients are reduced
end of the backward        the remaining reductions are started and waited for; everything is resharded

[Note: hooks own nothing]

torch keeps tensor hooks where Python's garbage collector cannot see them: a hook that owned its leaf, or
these Hooks, would keep the whole model alive forever. The hooks on leaves therefore hold weak references.
Objects that must live as long as modules call the hooks are held by the hooks on modules, which the garbage
collector can see (`Hooks.keeps`).

[Note: a gradient may not come]

All ranks start reductions in one order ([Note: the order of reductions] in reduce.py), and gathers in the
order of the forward and the backward. A rank may skip a layer or detach its output. Some or all of the
layer's leaves then get no gradient, and nothing signals the end of its backward. Another rank that used the
layer waits in its reduction and gathers nothing in the meantime, so this rank must not delay its part until
the end of the backward. When the backward reaches the outputs of a unit, the units that ran after it in the
forward are finished, and autograd's graph tells which of their leaves get no gradient (`_gets_gradient`).
These units are reduced at that moment (`Hooks._come_to`), and unsharded if this rank has not done so, because
the others do. A graph that runs nested in the backward (a reentrant checkpoint) cannot be queried before it
runs, so there all ranks must use the same parameters.

[Note: gradients in parts]

A leaf gets one gradient in a backward, and one more in each backward that runs nested in it (a reentrant checkpoint):
no count tells which is the last. Where gradients stay whole until the end of the backward (stages 0 and 1, the root
unit), they are reduced there. Other units are reduced after the first part of all leaves: it is nearly always the
only one, and whole gradients of all layers would not fit. A later part is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NoReturn, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from launcher.comm.collectives import profiler_range
from launcher.errors import LauncherError
from launcher.zero.flat import FlatBuffer
from launcher.zero.leaf_hooks import LastHook, Removable
from launcher.zero.reduce import Reducer
from launcher.zero.saved_tensors import TensorPacking
from launcher.zero.slot import ParamSlot
from launcher.zero.unit import Unit
from launcher.zero.unshard import Unsharder

R = TypeVar("R", bound=Removable)
NO_GRAPH = -1
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward that this thread is running, or NO_GRAPH."""


class TrainingState(Enum):
    """The state of a model, as far as its hooks have been called.

    IDLE: neither forward nor backward; gradients may be waiting for a step.
    FORWARD: from before the root module's forward to its end. The root unit is unsharded.
    BACKWARD: from the first sign of a backward (a gradient at an output, an unpacked weight, a leaf's
        gradient) to autograd's callback at its end, or to the next forward if an exception ended it.
    """

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


def _transformed() -> bool:
    """Return whether a forward of torch.func's grad, vjp, jacrev, ... is running."""
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or ()
    return any(interpreter.key() == functorch.TransformType.Grad for interpreter in stack)


def _gets_gradient(slot: ParamSlot) -> bool:
    """Return whether the running backward has computed, or will compute, a gradient of the parameter."""
    shown = (slot.leaf, slot.handle) if slot.flat.sharded else (slot.leaf,)
    with torch.enable_grad():  # an alias needs no data, which may be sharded
        aliases = [torch.ops.aten.alias.default(tensor) for tensor in shown]
    return any(
        alias.grad_fn is not None and torch._C._will_engine_execute_node(alias.grad_fn.next_functions[0][0])
        for alias in aliases
    )


def _refuse_part(name: str) -> NoReturn:
    raise LauncherError(
        f"the gradient of {name} arrives in several parts, and the first has been reduced already: its layer runs in "
        "several reentrant checkpoints of one backward",
        where="backward()",
        fix='checkpoint with use_reentrant=False (gradient_checkpointing_kwargs={"use_reentrant": False} in the '
        "Trainer), or use ZeRO stage 0 or 1",
    )


class Hooks:
    """Connects units to their modules and to autograd.

    Args:
        units: all units; the root unit is the last, and its module is the whole model.
    """

    def __init__(self, units: list[Unit], unsharder: Unsharder, reducer: Reducer) -> None:
        self.units, self.root = units, units[-1]
        self.unsharder, self.reducer = unsharder, reducer
        self._owner: dict[FlatBuffer, Unit] = {flat: unit for unit in units for flat in unit.flats}
        self.state = TrainingState.IDLE
        occupants = next(iter(self._owner)).pool.occupants if self._owner else {}
        self.packing = TensorPacking(
            occupants, self._before_unpack, enabled=any(unit.sharded for unit in units)
        )
        self._scales = False
        self.losses_were_scaled: set[bool] = set()  # for the backwards of this step
        self._forwards = 0  # of units
        self._graph = NO_GRAPH  # the outermost backward; others run nested in it
        self._handles: list[Removable] = []
        self._arrivals: dict[int, LastHook] = {}  # by the id of the leaf, which lives as long as these hooks
        self.gather_for_one_call: Callable[[Hooks, Unit, nn.Module], None] | None = None
        """Feature hook (`features/outside.py`) for a module that is called outside the model's forward."""
        self.keeps: object = None  # an object that must live as long as these hooks are called
        self._register()

    def _register(self) -> None:
        for unit in self.units:
            if self.packing.enabled or unit is self.root:
                before, after = self._before(unit), self._after(unit)
                self._handles.append(unit.module.register_forward_pre_hook(before, prepend=True))
                # always_call: an exception in forward must not leave the packing of saved tensors on
                self._handles.append(unit.module.register_forward_hook(after, always_call=True))
            for slot in unit.trainable_slots():
                self._arrivals[id(slot.leaf)] = self.add_removable(LastHook(slot.leaf, self._arrival(unit)))
        for unit in self.units:
            for module in dict.fromkeys(unit.owners()):
                before = self._before_inner(unit)
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))

    def add_removable(self, thing: R) -> R:
        """Register an object that `remove` also removes."""
        self._handles.append(thing)
        return thing

    def come_last(self, leaf: Tensor) -> None:
        """Move our hook to the end after another hook was registered on one of our leaves."""
        if (ours := self._arrivals.get(id(leaf))) is not None:
            ours.register()

    def remove(self) -> None:
        """Remove every hook: the modules are plain modules again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._arrivals.clear()
        self.keeps = None

    # ---- forward ----------------------------------------------------------------------------

    def _before(self, unit: Unit) -> Callable[..., None]:
        def before_forward(module: nn.Module, args: object) -> None:
            if _graph_task() != NO_GRAPH:  # inside a backward: activation checkpointing
                self._recompute(unit)
                return
            if unit is self.root:
                self._begin_forward()
            with profiler_range(unit.name, "unshard"):
                self.unsharder.use(unit, "forward")

        return before_forward

    def _before_inner(self, unit: Unit) -> Callable[..., None]:
        """Return a pre-forward hook for a module that owns a sharded parameter and may be called directly."""

        def before_forward(module: nn.Module, args: object) -> None:
            if torch.compiler.is_compiling() or (unit.is_unsharded and not unit.in_backward):
                return
            if _graph_task() != NO_GRAPH:  # inside a backward: activation checkpointing, also of submodules
                self._recompute(unit)
            elif unit.is_unsharded or module is unit.module or self.gather_for_one_call is None:
                return  # already unsharded, or the unit's own hook does it
            else:
                self.gather_for_one_call(self, unit, module)

        return before_forward

    def _begin_forward(self) -> None:
        self.abandon()
        self.state = TrainingState.FORWARD
        self.unsharder.begin(torch.is_grad_enabled())
        self.packing.start()

    def _after(self, unit: Unit) -> Callable[..., None]:
        def after_forward(module: nn.Module, args: object, output: object) -> None:
            if _graph_task() != NO_GRAPH:  # inside a backward: activation checkpointing
                return
            if unit is self.root:
                self._end_forward(output)
                return
            self._forwards += 1
            unit.ran_as(self._forwards)
            self.unsharder.leave(unit)
            self._watch_outputs(output, lambda _: self._come_to(unit))

        return after_forward

    def _end_forward(self, output: object) -> None:
        if self.state is TrainingState.FORWARD:
            self.state = TrainingState.IDLE
        if self.packing.is_active:
            self.packing.stop()
        if not (torch.is_grad_enabled() and self.watch_backward(output)):
            self.unsharder.end()  # no backward will come

    def watch_backward(self, output: object) -> bool:
        """Start the backward when a gradient reaches one of these outputs; return whether one can."""
        return self._watch_outputs(output, lambda _: self.begin_backward())

    def _watch_outputs(self, output: object, hook: Callable[[Tensor], None]) -> bool:
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        if not outputs or _transformed():  # torch.func differentiates inputs and reaches no parameter
            return False
        register_multi_grad_hook(outputs, hook, mode="any")
        return True

    # ---- backward ---------------------------------------------------------------------------

    @contextmanager
    def scaling(self) -> Iterator[None]:
        """Mark backwards inside the `with` as those of losses that the engine has scaled, by the loss scale
        and by gradient accumulation."""
        self._scales = True
        try:
            yield
        finally:
            self._scales = False

    def begin_scaled(self, gradient: torch.Tensor) -> None:
        """Mark the backward that starts as scaled: a hook on a loss scaled by the engine, outside of `scaling()`."""
        self._scales = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_scaled)  # type: ignore[attr-defined]

    def _end_scaled(self) -> None:
        self._scales = False

    def begin_backward(self) -> None:
        """Start a backward at its first sign; later calls do nothing."""
        if self.state is TrainingState.BACKWARD:
            return
        if self.reducer.norm_computed:
            raise LauncherError(
                "backward was called after clip_grad_norm_() in the same step: its gradients would not "
                "be part of the norm",
                where="backward()",
                fix="call clip_grad_norm_() after the last backward of a step, then step(); or call "
                "zero_grad() before another backward",
            )
        self.state = TrainingState.BACKWARD
        self.losses_were_scaled.add(self._scales)
        for gradient in self.reducer.gradients:
            gradient.reopen()
        self._graph = _graph_task()
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)  # type: ignore[attr-defined]
        self.enter_root()

    def enter_root(self) -> None:
        """Unshard the root unit, unless the backward passes through no unit."""
        if self.reducer.plan.unit_names != ():
            self.enter_backward(self.root)

    def _begin_unseen(self) -> None:
        """Start a backward whose first sign is a leaf's gradient: its forward bypassed the model."""
        if any(gradient.closed for gradient in self.reducer.gradients):
            self.abandon()
            raise LauncherError(
                "backward was called after the gradients of this step were reduced over the ranks, and "
                "its forward did not go through the engine or engine.module",
                where="backward()",
                fix="call the engine (or engine.module), not a submodule; or add the losses and call "
                "backward once",
            )
        self.begin_backward()

    def _before_unpack(self, flat: FlatBuffer) -> None:
        unit = self._owner[flat]
        if not flat.is_unsharded or not unit.in_backward:
            self.enter_backward(unit)

    def _recompute(self, unit: Unit) -> None:
        """Enter the backward of a unit whose forward is recomputed: autograd saves its leaves unpacked."""
        self.enter_backward(unit)
        unit.to_recomputed()

    def enter_backward(self, unit: Unit) -> None:
        """Unshard a unit at the start of its backward."""
        self.begin_backward()
        if unit.in_backward and unit.is_unsharded:
            return
        unit.to_backward()
        if unit.sharded:
            self._free_passed_units(unit)
            with profiler_range(unit.name, "unshard"):
                self.unsharder.use(unit, "backward")

    def _free_passed_units(self, entering: Unit) -> None:
        """Reshard units whose backward has ended without a gradient to signal it: units without trainable
        parameters, and recomputed units with frozen parameters (`Unit.may_need_frozen`)."""
        for unit in list(self.unsharder.unsharded):
            if unit.in_backward and unit.has_all_gradients and unit not in (entering, self.root):
                unit.to_passed()
                self.unsharder.reshard(unit)

    def _arrival(self, unit: Unit) -> Callable[[Tensor], None]:
        mine, of_unit = ref(self), ref(unit)  # see [Note: hooks own nothing]

        def gradient_arrived(leaf: Tensor) -> None:
            hooks, unit = mine(), of_unit()
            if hooks is not None and unit is not None:
                hooks._count(unit, leaf)

        return gradient_arrived

    def _count(self, unit: Unit, leaf: Tensor) -> None:
        """Count a gradient, and finish the unit after its last one: see [Note: gradients in parts]."""
        if self.state is not TrainingState.BACKWARD:
            self._begin_unseen()
        unit.in_parts |= _graph_task() != self._graph
        if id(leaf) in unit.got_gradient:
            if unit.in_parts and unit.has_all_gradients and not self._waits(unit):
                _refuse_part(next(slot.name for slot in unit.trainable_slots() if slot.leaf is leaf))
            return
        unit.got_gradient.add(id(leaf))
        unit.arrived += 1
        if unit.has_all_gradients and not self._waits(unit):
            self._finish(unit)

    def _waits(self, unit: Unit) -> bool:
        """Return whether the unit is reduced at the end of the backward: more may be added to its gradients."""
        return unit.in_parts and (unit is self.root or not self.unsharder.policy.shard_grads)

    def _finish(self, unit: Unit) -> None:
        """Reduce a unit whose last gradient has arrived, and reshard it."""
        with profiler_range(unit.name, "reduce"):
            self.reducer.ready(unit)
        if unit.sharded and unit is not self.root and not unit.may_need_frozen:
            self.unsharder.reshard(unit)

    def _come_to(self, unit: Unit) -> None:
        """Enter the backward of a unit whose outputs the backward has reached, after finishing the units that
        followed it in the forward: see [Note: a gradient may not come]."""
        self.begin_backward()
        # autograd can query only the graph of the innermost backward
        in_nested = _graph_task() != self._graph
        while not in_nested and (late := self.reducer.awaited) and self._is_over(late, unit):
            self._take_part(late)
            late.arrived = late.expected
            self._finish(late)
        self.enter_backward(unit)

    def _is_over(self, late: Unit, come_to: Unit) -> bool:
        """Return whether all gradients of `late` that this backward produces have arrived."""
        if not (late.ran and come_to.ran and late.ran[0] > come_to.ran[1]):
            return False
        missing = sum(not _gets_gradient(slot) for slot in late.trainable_slots())
        return late.arrived + missing == late.expected

    def _take_part(self, unit: Unit) -> None:
        """Unshard a unit that this rank skips in the backward: other ranks may need its shard."""
        if unit.sharded and unit.ran and not unit.in_backward and self.reducer.plan.enters(unit.name):
            self.unsharder.use(unit, "backward")
            self.unsharder.reshard(unit)

    def end_backward(self) -> None:
        """Launch the remaining reductions in order and wait for all of them, at the end of the backward."""
        with profiler_range("root", "finish_backward"):
            for unit in self.reducer.remaining_units:
                self._take_part(unit)
            self.reducer.finish()
        self._forget_backward()

    def abandon(self) -> None:
        """Reset after a backward that an exception ended: autograd does not call `end_backward` then."""
        if self.state is TrainingState.BACKWARD:
            self.reducer.drain()
            self._forget_backward()

    def _forget_backward(self) -> None:
        self.state = TrainingState.IDLE
        for unit in self.units:
            unit.to_idle()
        self.unsharder.end()
