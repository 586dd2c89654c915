"""Activation checkpointing of transformer blocks (the JSON's `activation_checkpointing`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.comm import Axis
from launcher.config import ActivationCheckpointingConfig
from launcher.models.saved_inputs import SavedInputPolicy, SavedInputs
from launcher.monitor.timers import Timers

_inside: ContextVar[bool] = ContextVar("inside a checkpoint", default=False)


def recomputing() -> bool:
    """Return whether a backward is running: a forward that runs now is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


class Checkpointer:
    """Runs functions so that only their inputs are kept; everything else is recomputed in backward.

    RNG states are restored for the recomputation, so dropout drops the same elements. A `run` nested inside
    another only calls its function, so that nothing is recomputed twice.

    Attributes:
        saved: the saved inputs.
        timers: milliseconds of each name's `forward` and `recompute`.
        names: names of the checkpointed blocks.
        steps: optimizer steps since the last report.
    """

    def __init__(
        self, keeping: SavedInputPolicy, *, synchronize: bool = False, profile: bool = False
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.saved = SavedInputs(keeping)
        self.timers = Timers(enabled=profile, device=device)
        self.names: list[str] = []
        self.steps = 0
        self._synchronize = synchronize

    @classmethod
    def of(cls, config: ActivationCheckpointingConfig, axis: Axis, places: int) -> Checkpointer:
        """Build a checkpointer from the config section.

        Args:
            axis: the axis whose ranks have the same inputs (tp).
            places: capacity of the contiguous buffer, in inputs.
        """
        keeping = SavedInputPolicy(
            axis=axis if config.partition_activations else Axis(axis.name),
            on_host=config.cpu_checkpointing,
            places=places if config.contiguous_memory_optimization else 0,
        )
        return cls(keeping, synchronize=config.synchronize_checkpoint_boundary, profile=config.profile)

    def run(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return function(*args, **kwargs). Tensors in `args`, and those in `kwargs` that require a gradient,
        are kept according to `keeping`. Others, such as masks and positions shared by all blocks, are kept
        unchanged."""
        if _inside.get():
            return function(*args, **kwargs)
        count = len(args)
        named = {
            key: value for key, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad
        }
        if not any(_on_device(value) for value in (*args, *named.values())):
            # torch saves the RNG state only of devices that occur among the positional arguments
            named |= dict([item for item in kwargs.items() if _on_device(item[1])][:1])
        args, kwargs = (*args, *named.values()), {key: kwargs[key] for key in kwargs if key not in named}
        names = tuple(named)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._watch(name):
                return function(*args[:count], **dict(zip(names, args[count:], strict=True)), **kwargs)

        if self.saved.keeping.changes_nothing:
            return checkpoint(watched, *args, use_reentrant=False, **kwargs)
        with self.saved.block():  # outside the checkpoint, so that only its inputs are packed
            return checkpoint(watched, *args, use_reentrant=False, **kwargs)

    @contextmanager
    def _watch(self, name: str) -> Iterator[None]:
        phase = "recompute" if recomputing() else "forward"
        with ExitStack() as stack:
            stack.callback(_inside.reset, _inside.set(True))
            if self._synchronize:
                stack.callback(synchronize_device)
                synchronize_device()
            stack.enter_context(self.timers(f"{name} {phase}"))
            yield

    def print_profile(self) -> None:
        """Print the mean milliseconds per step since the last call; print nothing if nothing was timed."""
        steps, self.steps = self.steps, 0
        if line := self.timers.line(steps):
            print(f"activation_checkpointing, mean of {steps} steps: {line}", flush=True)


class CheckpointedForward:
    """Replaces the `forward` of a block.

    Attributes:
        forward: the function that is recomputed; Engine.compile replaces it with the compiled one.
    """

    def __init__(self, name: str, block: nn.Module, checkpointer: Checkpointer) -> None:
        self.forward: Callable[..., Any] = block.forward
        self._name, self._block, self._checkpointer = name, block, checkpointer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._block, "gradient_checkpointing", False):
            _switch_off(self._block)
        if torch.is_grad_enabled():
            args, kwargs = _without_cache(args, kwargs)
        return self._checkpointer.run(self._name, self.forward, *args, **kwargs)


def checkpoint_blocks(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    config: ActivationCheckpointingConfig | None,
    axis: Axis,
) -> Checkpointer | None:
    """Make blocks keep only their inputs and recompute the rest in backward.

    Args:
        model: its own gradient checkpointing is switched off with a warning, to recompute blocks only once.
        blocks: (name, module) in the order of the forward.
        config: `number_checkpoints` limits the number of blocks, which are evenly spread; by default all are
            checkpointed. None: nothing is checkpointed.
        axis: the tensor-parallel axis, over which `partition_activations` splits.

    Returns:
        The checkpointer; its `names` are the checkpointed blocks. None without a config.
    """
    if config is None:
        return None
    if not blocks:
        warnings.warn(
            "activation_checkpointing is set, but the model has no transformer blocks to recompute "
            "(no `_no_split_modules`, no nn.ModuleList of equal modules), so nothing is checkpointed",
            stacklevel=2,
        )
        return Checkpointer.of(config, axis, 0)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        _switch_off(model)
    count = min(config.number_checkpoints or len(blocks), len(blocks))
    chosen = [blocks[i * len(blocks) // count] for i in range(count)]
    checkpointer = Checkpointer.of(config, axis, count)
    for name, module in chosen:
        module.forward = CheckpointedForward(name, module, checkpointer)  # type: ignore[method-assign, assignment]
    checkpointer.names = [name for name, _ in chosen]
    return checkpointer


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_cpu


def synchronize_device() -> None:
    """Wait for the work queued on this process's accelerator; do nothing without one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments without transformers' key-value cache, which recomputation would fill twice."""
    args = tuple(None if hasattr(arg, "get_seq_length") else arg for arg in args)
    kwargs = {key: None if hasattr(arg, "get_seq_length") else arg for key, arg in kwargs.items()}
    return args, kwargs | ({"use_cache": False} if "use_cache" in kwargs else {})


def _switch_off(module: nn.Module) -> None:
    """Switch off transformers' gradient checkpointing in `module` and its submodules, with a warning."""
    warnings.warn(
        "The model's own gradient checkpointing (gradient_checkpointing_enable) is switched off, because "
        "activation_checkpointing in the JSON already recomputes the blocks. Remove one of the two.",
        stacklevel=3,
    )
    for inner in module.modules():
        if getattr(inner, "gradient_checkpointing", False):
            inner.gradient_checkpointing = False  # type: ignore[assignment]
