"""The optimizer step on the slices that a rank owns, for any elementwise torch.optim class.

Optimizers that need whole parameters run a collective after the step on slices (`whole.py`).

Each parameter's slice is a 1-D fp32 tensor that the inner torch optimizer holds as its parameter. Param
groups, unused parameters (no gradient: no step, as in plain PyTorch) and per-parameter state therefore need
no special code. Flat buffers are stepped one after the other: the fp32 copy of a 16-bit gradient exists for
one buffer at a time, and the updated parameters of a buffer are communicated while the next one is stepped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import zip_longest
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from launcher.comm import Pending
from launcher.errors import MisplacedCallError
from launcher.offload.offloaded import OffloadedSlice
from launcher.optim import one_pass
from launcher.optim.states import FlatState
from launcher.optim.whole import Stepped, WholeOptimizer
from launcher.zero import ParamSlice, ZeroModel
from launcher.zero.features.user_gradients import engine_optimizers
from launcher.zero.gradients import FlatGradient
from launcher.zero.slot import ParamSlot

if TYPE_CHECKING:
    from launcher.optim.upload import Upload

logger = logging.getLogger("launcher")
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
StepBuffer = Callable[[FlatGradient], bool]
"""Steps the owned range of a buffer; returns whether `params_beside_master` was written, too."""
FinishBuffers = Callable[[Sequence[FlatGradient]], None]
"""Runs the second half of the step of buffers, which needs whole parameters."""


class _Steps(Protocol):
    """An engine that has an optimizer."""

    def step_without_schedule(self) -> None: ...


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps the slices that this rank owns, then sends the new parameters to every rank.

    Args:
        zero: the model.
        groups: param groups: dicts with "names" (parameter names) and any options of the inner optimizer.
        factory: creates the inner torch optimizer from param groups of slices.
        sub_group_size: maximum elements stepped at a time (at least one slice).
        state_dtype: least precise dtype of the optimizer's state and arithmetic: 16-bit master weights are
            widened to fp32 for their step unless this is their dtype (`bf16_optimizer_states`).

    `param_groups`, `state` and `defaults` are those of the inner optimizer, not copies, and isinstance() also
    accepts its class. `overflow` is true if the last step was skipped because of an overflow.
    """

    overflow = False
    # a weak reference: the engine holds this optimizer
    engine: Callable[[], _Steps | None] = staticmethod(lambda: None)
    name = ""
    """Its type in the JSON config, if it was created from that."""
    scales = False
    """Whether losses are scaled."""

    @property  # type: ignore[misc]  # scripts check isinstance(optimizer, AdamW)
    def __class__(self) -> type[Any]:
        return type(self.inner) if "inner" in self.__dict__ else type(self)

    def __init__(
        self,
        zero: ZeroModel,
        groups: Iterable[dict[str, Any]],
        factory: OptimizerFactory,
        sub_group_size: int = 2**63,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.zero, self.sub_group_size, self._state_dtype = zero, sub_group_size, state_dtype
        self.tensors: dict[str, nn.Parameter] = {}
        for flat in [gradient.flat for gradient in zero.gradients]:
            if not flat.is_offloaded:
                self.tensors |= {piece.name: nn.Parameter(piece.data) for piece in flat.slices()}
                continue
            # offloaded: a placeholder with only the shape, for optimizers that create their state at once
            zero_ = torch.zeros(1, dtype=flat.master_dtype, device=flat.optim_placement.device)
            for slot, start, stop in flat.overlaps(flat.owned):
                self.tensors[slot.name] = nn.Parameter(zero_.expand(stop - start))
        groups = list(groups)
        self._group_of = {name: i for i, group in enumerate(groups) for name in group["names"]}
        self.inner = factory([self._sliced(group) for group in groups])
        self.inner_step = self.inner.step
        engine_optimizers.update((self, self.inner))
        self._take_calls()
        self._widen_first_state()
        self._inherit()
        self.states = {
            gradient: FlatState(gradient, self.tensors, self.inner.state) for gradient in zero.gradients
        }
        self._state_of = {
            slot.name: state for state in self.states.values() for slot in state.gradient.flat.slots
        }
        self.compiles = False  # whether the step on the CPU may use torch.compile
        self.early: set[FlatGradient] = set()  # stepped before the step (`in_backward.py`)
        for state in self.states.values():
            state.hide()

    def _take_calls(self) -> None:
        """Redirect step() and zero_grad() of the inner optimizer, which the user may hold."""

        def step(inner: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self.step(closure)

        step.stands_for = vars(self.inner).get("step")  # type: ignore[attr-defined]  # for `one_pass.rule_of`
        # a bound method, because torch's schedulers wrap its function
        self.inner.step = MethodType(step, self.inner)  # type: ignore[method-assign]
        self.inner.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def _inherit(self) -> None:
        self.param_groups, self.state, self.defaults = (
            self.inner.param_groups,
            self.inner.state,
            self.inner.defaults,
        )
        self._hook_for_profile = lambda: None  # type: ignore[method-assign]

    def _sliced(self, group: dict[str, Any]) -> dict[str, Any]:
        options = {key: value for key, value in group.items() if key not in ("names", "params")}
        # torch requires a parameter in every group. If this rank owns no slice of a group, or another stage
        # holds its parameters, the group gets an empty parameter.
        owned = [self.tensors[name] for name in group["names"] if name in self.tensors]
        return {**options, "params": owned or [nn.Parameter(torch.empty(0, device=self.zero.pool.device))]}

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of the state and arithmetic of an owned parameter."""
        return self._widened(self.zero.slots[name].flat.master_dtype)

    def _widened(self, master: torch.dtype) -> torch.dtype:
        return master if master == self._state_dtype else torch.float32

    def _widen_first_state(self) -> None:
        """Widen state that the inner optimizer created in its constructor, in the dtype of the weights."""
        for name, tensor in self.tensors.items():
            for key, value in self.inner.state[tensor].items() if tensor in self.inner.state else ():
                if isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point():
                    self.inner.state[tensor][key] = value.to(self.dtype_of(name))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run `engine.step()` without the schedule, which is then left to the caller.

        Raises:
            MisplacedCallError: no engine has this optimizer.
        """
        loss = None if closure is None else closure()
        engine = self.engine()
        if engine is None:
            raise MisplacedCallError(
                "this optimizer no longer belongs to an engine", fix="call initialize() again"
            )
        engine.step_without_schedule()
        return loss

    @torch.no_grad()
    def step_scaled(self, scale: float = 1.0) -> None:
        """Step every parameter that got a gradient.

        Args:
            scale: factor on all gradients: 1 / (ranks x loss scale), and clipping.
        """
        step = partial(self._step_buffer, scale=scale, rule=one_pass.rule_of(self.inner))
        pending = step_in_turn(self._batches(), step, self._finish, ahead=self.zero.placements.reads_ahead)
        self.early.clear()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers check this
        for travelling in pending:
            travelling.wait()

    @torch.no_grad()
    def step_in_backward(self, gradient: FlatGradient, scale: float) -> None:
        """Step one buffer now, if its step needs no collective; the next `step` skips it."""
        squares = gradient.squares() if self.zero.policy.compute_norm else None
        step = partial(self._step_buffer, scale=scale, rule=one_pass.rule_of(self.inner))
        step_together([self.states[gradient]], step, self._finish)
        gradient.spend(squares)
        self.early.add(gradient)

    def forget_in_backward(self) -> None:
        """Forget buffers stepped in a backward whose optimizer step will not follow, with a warning."""
        if self.early:
            names = ", ".join(sorted(gradient.flat.name for gradient in self.early))
            logger.warning("an optimizer step failed after it had updated part of the model: %s", names)
        self.early.clear()

    def _batches(self) -> Iterator[list[FlatState]]:
        """Yield buffers to step together: one at a time or, for a `WholeOptimizer`, those of a sub-group."""
        batch: list[FlatState] = []
        elements, alone = 0, not isinstance(self.inner, WholeOptimizer)
        for gradient in self.zero.gradients:
            if gradient in self.early:
                continue
            if batch and (alone or elements + gradient.flat.numel > self.sub_group_size):
                yield batch
                batch, elements = [], 0
            batch.append(self.states[gradient])
            elements += gradient.flat.numel
        if batch:
            yield batch

    def _finish(self, gradients: Sequence[FlatGradient]) -> None:
        if not isinstance(self.inner, WholeOptimizer):
            return
        slots = [slot for gradient in gradients for slot in gradient.flat.slots]
        self.inner.finish(
            [
                Stepped(slot, self.param_groups[self._group_of[slot.name]], self.tensors.get(slot.name))
                for slot in slots
                if slot.used and slot.name in self._group_of
            ]
        )

    def _step_buffer(self, gradient: FlatGradient, scale: float, rule: one_pass.FusedRule | None) -> bool:
        """Step the owned range of a buffer; return whether `params_beside_master` was written."""
        if rule is not None and gradient.flat.master.device.type == "cpu":
            return self._step_in_one_pass(gradient, scale, rule)
        from launcher.optim import tiled

        tiled.step(self, gradient, scale=scale, dtype=self._widened(gradient.flat.master_dtype))
        return False

    def _step_in_one_pass(self, gradient: FlatGradient, scale: float, rule: one_pass.FusedRule) -> bool:
        flat, params = gradient.flat, gradient.flat.params_beside_master
        if params is None or not flat.steps_elsewhere:
            self._step_slices(gradient, scale, rule, params)
        else:
            with self._upload.to(params) as values:
                stepped = self._step_slices(gradient, scale, rule, values)
                for slot, theirs in flat.owned_views(params):
                    if slot in stepped:
                        theirs.copy_(stepped[slot], non_blocking=True)
        return params is not None

    @cached_property
    def _upload(self) -> Upload:
        from launcher.optim.upload import Upload

        return Upload(self.zero.placements.buffers.idle, self.zero.flats)

    def _step_slices(
        self, gradient: FlatGradient, scale: float, rule: one_pass.FusedRule, params: Tensor | None
    ) -> dict[ParamSlot, Tensor]:
        """Step a buffer's slices that got a gradient; return the new values of each inside `params`."""
        flat = gradient.flat
        into = {} if params is None else dict(flat.owned_views(params))
        by_group: dict[int, list[one_pass.FusedSlice]] = {}
        stepped: dict[ParamSlot, Tensor] = {}
        for slot, part in flat.owned_views(gradient.owned.to(flat.master.device)):
            if slot.used and slot.name in self._group_of:
                tensor = self.tensors[slot.name]
                zeros = partial(self.states[gradient].zeros, slot.name)
                if slot in into:
                    stepped[slot] = into[slot]
                item = one_pass.FusedSlice(tensor.data, part, self.inner.state[tensor], into.get(slot), zeros)
                by_group.setdefault(self._group_of[slot.name], []).append(item)
        for index, items in by_group.items():
            dtype = self._widened(flat.master_dtype)
            group = self.param_groups[index]
            one_pass.step(rule, group, items, scale=scale, dtype=dtype, compiles=self.compiles)
        return stepped

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zero.discard()

    def needs_scaler(self) -> bool:
        """Return whether a loss must go through `engine.scale()` before its own backward()."""
        return self.scales

    # ---- state ------------------------------------------------------------------------------

    @property
    def slices(self) -> dict[str, ParamSlice]:
        """Return the slices that this rank steps, by parameter name."""
        return {piece.name: piece for gradient in self.zero.gradients for piece in gradient.flat.slices()}

    def state_slices(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer state of each owned parameter: a 1-D tensor like the slice, an
        `OffloadedSlice` if the state is offloaded, or a scalar that is the same on all ranks."""
        return {
            slot.name: self.states[gradient].parts(slot.name)
            for gradient in self.zero.gradients
            for slot, _, _ in gradient.flat.overlaps(gradient.flat.owned)
            if self.tensors[slot.name] in self.inner.state
        }

    def states_in_memory(self, name: str) -> dict[str, Any]:
        """Return the inner optimizer's states of a parameter; empty if this rank owns no part of it."""
        tensor = self.tensors.get(name)
        return dict(self.inner.state[tensor]) if tensor is not None and tensor in self.inner.state else {}

    def start_state(self, name: str, key: str, dtype: torch.dtype) -> Tensor | OffloadedSlice:
        """Call `FlatState.start` for an owned parameter."""
        return self._state_of[name].start(name, key, dtype)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the inner optimizer, under DeepSpeed's attribute name."""
        return self.inner

    def _masters(self) -> list[Tensor]:
        """Return the weights that this rank steps, by slice; fp32 if they have fp32 master weights."""
        return [piece.data for piece in self.slices.values()]

    fp32_partitioned_groups_flat = single_partition_of_fp32_groups = fp32_groups_flat = property(_masters)

    def held_bytes(self) -> int:
        """Return the bytes of optimizer state in this rank's memory."""
        tensors = [v for state in self.inner.state.values() for v in state.values() if isinstance(v, Tensor)]
        held = sum(t.numel() * t.element_size() for t in tensors if t.dim() > 0)
        return held + sum(state.held_bytes for state in self.states.values() if not state.shown)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups' options and parameter names, in order; tensors are checkpointed by name."""
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        return {"param_groups": options, "names": self.group_names()}

    def group_names(self) -> list[list[str]]:
        """Return the names of this rank's parameters, by param group."""
        groups = range(len(self.param_groups))
        return [[name for name, at in self._group_of.items() if at == number] for number in groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        from launcher.optim.saved_groups import take_options

        take_options(self.param_groups, state_dict, self.group_names())


# ---- the order of a step, also used by the memory estimate ----------------------------------


def step_in_turn(
    batches: Iterable[Sequence[FlatState]], step: StepBuffer, finish: FinishBuffers, *, ahead: bool
) -> list[Pending]:
    """Step batches of buffers one after the other.

    Args:
        batches: The buffers to step together.
        ahead: Read the following batch during the step of this one; False: read nothing ahead.

    Returns:
        The pending collectives that send the parameters to every rank.
    """
    pending: list[Pending] = []
    for states in _read_ahead(batches, ahead=ahead):
        pending += step_together(states, step, finish)
    return pending


def step_together(states: Sequence[FlatState], step: StepBuffer, finish: FinishBuffers) -> list[Pending]:
    """Step buffers, release offloaded tensors, and start sending the parameters to every rank."""
    written = [_step_shown(state, step) for state in states]
    finish([state.gradient for state in states])
    pending: list[Pending] = []
    for state, beside in zip(states, written, strict=True):
        if state.is_offloaded:
            state.hide()
        state.gradient.rest(changed=False)
        pending += state.flat.publish(written=beside)
    return pending


def _step_shown(state: FlatState, step: StepBuffer) -> bool:
    if state.is_offloaded:
        state.fetch()
        state.show()
    return step(state.gradient)


def _read_ahead(batches: Iterable[Sequence[FlatState]], *, ahead: bool) -> Iterator[Sequence[FlatState]]:
    """Yield batches one after the other, each after starting to read the following one."""
    every = list(batches)
    nothing: Sequence[FlatState] = ()
    for batch, following in zip_longest(every, every[1:], fillvalue=nothing):
        for state in following if ahead else ():
            if state.is_offloaded:
                state.fetch()
        yield batch
