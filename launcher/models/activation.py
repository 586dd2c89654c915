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
    """Return whether this is inside of a backward: a forward that runs here computes again what was not kept."""
    return bool(torch._C._current_graph_task_id() != -1)


class Checkpointer:
    """Runs functions so that only their inputs are kept, and the rest is computed again in backward.

    Random states are restored for the recomputation, so dropout drops the same elements. Inside a function that runs
    here, another `run` only calls its function: what is recomputed once need not be recomputed twice.

    Attributes:
        saved: the inputs that wait.
        timers: milliseconds of each name's `forward` and `recompute`.
        names: of the checkpointed blocks.
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
        """Build a checkpointer as the JSON's section says.

        Args:
            axis: its ranks have the same inputs (tp).
            places: inputs that the contiguous buffer has room for.
        """
        keeping = SavedInputPolicy(
            axis=axis if config.partition_activations else Axis(axis.name),
            on_host=config.cpu_checkpointing,
            places=places if config.contiguous_memory_optimization else 0,
        )
        return cls(keeping, synchronize=config.synchronize_checkpoint_boundary, profile=config.profile)

    def run(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return function(*args, **kwargs). Tensors among `args` are kept as `keeping` says, and those of `kwargs` that
        need a gradient; the rest, such as masks and positions that all blocks share, is kept as it is."""
        if _inside.get():
            return function(*args, **kwargs)
        count = len(args)
        named = {
            key: value for key, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad
        }
        if not any(_on_device(value) for value in (*args, *named.values())):
            # torch keeps the random state of devices that it sees among the positional arguments
            named |= dict([item for item in kwargs.items() if _on_device(item[1])][:1])
        args, kwargs = (*args, *named.values()), {key: kwargs[key] for key in kwargs if key not in named}
        names = tuple(named)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._watch(name):
                return function(*args[:count], **dict(zip(names, args[count:], strict=True)), **kwargs)

        if self.saved.keeping.changes_nothing:
            return checkpoint(watched, *args, use_reentrant=False, **kwargs)
        with self.saved.block():  # outside the checkpoint: what it saves itself are the inputs
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
        """Print the milliseconds a step since the last time; nothing when nothing was timed."""
        steps, self.steps = self.steps, 0
        if line := self.timers.line(steps):
            print(f"activation_checkpointing, mean of {steps} steps: {line}", flush=True)


class CheckpointedForward:
    """Stands in a block as its `forward`.

    Attributes:
        forward: what is recomputed; Engine.compile puts the compiled one here.
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
    """Let blocks keep only their inputs and recompute the rest in backward.

    Args:
        model: its own gradient checkpointing is switched off, with a warning: once is enough.
        blocks: (name, module) in the order of the forward.
        config: None: nothing is checkpointed; at most `number_checkpoints` blocks, spread evenly, else all.
        axis: the tensor-parallel axis, over which `partition_activations` splits.

    Returns:
        What runs them; its `names` are the checkpointed blocks.
    """
    if config is None:
        return None
    if not blocks:
        warnings.warn(
            "activation_checkpointing is present, but the model has no transformer blocks to recompute "
            "(no `_no_split_modules`, no nn.ModuleList of equal modules): nothing is checkpointed",
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
    """Wait for the work that is queued on this process's accelerator; a CPU queues none."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments without transformers' key-value cache: a recomputation would fill it a second time."""
    args = tuple(None if hasattr(arg, "get_seq_length") else arg for arg in args)
    kwargs = {key: None if hasattr(arg, "get_seq_length") else arg for key, arg in kwargs.items()}
    return args, kwargs | ({"use_cache": False} if "use_cache" in kwargs else {})


def _switch_off(module: nn.Module) -> None:
    """Switch off the gradient checkpointing of transformers, for all of `module`."""
    warnings.warn(
        "The model's own gradient checkpointing (gradient_checkpointing_enable) is switched off: the JSON's "
        "activation_checkpointing recomputes the blocks already. Remove one of the two.",
        stacklevel=3,
    )
    for inner in module.modules():
        if getattr(inner, "gradient_checkpointing", False):
            inner.gradient_checkpointing = False  # type: ignore[assignment]
