"""The engine that `initialize` returns: DeepSpeed's API on top of the core. See the DeepSpeed documentation
for each method; docstrings here note the differences."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from launcher.comm import Mesh
from launcher.config import Config
from launcher.engine.deepspeed_methods import DeepSpeedMethods
from launcher.engine.fragments import ENGINES
from launcher.engine.same_inputs import CutBy, SameInputs
from launcher.engine.saving import CheckpointMixin
from launcher.engine.telemetry import Telemetry
from launcher.engine.torch_clipping import follow_clipping
from launcher.engine.whole_batches import WholeBatches
from launcher.monitor.log import set_level
from launcher.monitor.writers import Monitor
from launcher.optim.sharded import ShardedOptimizer
from launcher.pipeline.executor.runtime import Runtime
from launcher.zero import ZeroModel

if TYPE_CHECKING:
    from launcher.models.activation import Checkpointer
    from launcher.sequence.apply import SharedModel
    from launcher.zero.features.versions import Versions


class Engine(CheckpointMixin, DeepSpeedMethods, WholeBatches):
    """A model in training, created by `launcher.initialize`.

    The training loop calls `loss = engine(batch); engine.backward(loss); engine.step()` for every microbatch;
    the optimizer steps at the accumulation boundary.

    Attributes: those of `EngineCore`, and
        monitor: its `write_events([(name, value, samples), ...])` writes to the configured monitors.
        training_dataloader: from `initialize(training_data=...)`.
        shared_sequences: the sequence-parallel model; None without sequence parallelism, or if the script
            does it.
    """

    shared_sequences: SharedModel | None = None

    def __init__(
        self,
        zero: ZeroModel,
        config: Config,
        mesh: Mesh,
        runtime: Runtime,
        optimizer: ShardedOptimizer | None,
        lr_scheduler: Any,
        training_dataloader: Any = None,
        checkpointer: Checkpointer | None = None,
        monitor: Monitor | None = None,
        versions: Versions | None = None,
        cut_by: CutBy = CutBy.HOOKS,
    ) -> None:
        telemetry = Telemetry(config, mesh, monitor or Monitor(), checkpointer)
        inputs = SameInputs(cut_by.same_inputs(mesh), mesh.device)
        super().__init__(zero, config, mesh, runtime, optimizer, lr_scheduler, telemetry, versions, inputs)
        self.training_dataloader, self.checkpointer = training_dataloader, checkpointer
        if optimizer is not None:
            optimizer.engine = weakref.ref(self)
        weakref.finalize(self, telemetry.flush_on_exit)
        self.is_compiled = False
        follow_clipping()
        self._gc: Callable[[], Any] | None = None
        if config.disable_python_gc:
            from launcher.engine.python_gc import hold

            self._gc = hold(self)
        set_level(config.log_level)
        ENGINES.add(self)
        if config.dump_state and mesh.rank == 0:
            from launcher.engine.describe import state_lines

            print(*state_lines(self), sep="\n", flush=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of the current step."""
        self.zero.discard()

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the transformer blocks one by one; all-gathers and reductions stay outside of the graphs.

        With "inductor" this also compiles the optimizer step of 16-bit parameters on the CPU. DeepSpeed
        compiles the whole module. A second call does nothing.

        Args:
            backend, compile_kwargs: passed to torch.compile.
            schedule: a list of (step, DeepCompile's passes). Logged and ignored: ZeRO prefetches all-gathers
                whether the blocks are compiled or not.
            compiled_autograd_enabled: logged and ignored: a block's backward is compiled with its forward.
        """
        if not self.is_compiled:
            from launcher.models.compiled import compile_blocks

            unused = {
                "schedule": schedule is not None,
                "compiled_autograd_enabled": compiled_autograd_enabled,
            }
            for name in (name for name, given in unused.items() if given and self.mesh.rank == 0):
                self.telemetry.say(
                    f"engine.compile(): {name}= has no effect: torch.compile compiles each block"
                )

            compile_blocks(self.module, backend, compile_kwargs or {})
            if self.optimizer is not None and backend == "inductor":
                self.optimizer.compiles = True
            self.is_compiled = True

    def collect_python_gc(self) -> int:
        """Collect cyclic garbage, even if the collector is disabled; return the number of objects freed."""
        return gc.collect()

    def empty_partition_cache(self) -> None:
        """Free gathered parameters and idle buffers."""
        self.zero.reshard_all()

    def destroy(self) -> None:
        """Wait for a background save, close monitors, remove hooks, free buffers, delete data on NVMe, and
        undo `disable_python_gc`."""
        if self._saver is not None:
            self._saver.wait()
        self._destroyed = True
        if self._gc is not None:
            self._gc()
        self.telemetry.close()
        self.zero.hooks.remove()
        self.zero.reshard_all()
        self.runtime.channel.close()
        self.zero.placements.close()
