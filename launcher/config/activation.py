"""`activation_checkpointing`: the section's presence turns checkpointing of the transformer blocks on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from launcher.config.section import Count, Remark, Section


class ActivationCheckpointingConfig(Section):
    """Recompute the inside of transformer blocks in backward (Chen et al. 2016, arXiv:1604.06174).

    DeepSpeed reads this section only for models that call its own checkpoint function. Here its presence
    checkpoints the blocks of every model; remove the section to keep all activations. A block whose inside
    calls `launcher.checkpointing.checkpoint` is recomputed once, not twice.
    """

    differs: ClassVar[dict[str, str]] = {
        "number_checkpoints": "so many blocks are checkpointed; DeepSpeed only sizes a buffer with it",
        "contiguous_memory_optimization": "needs neither `partition_activations` nor `number_checkpoints`",
        "profile": "times are printed every `steps_per_print` steps, or once at the end, not at every checkpoint",
    }

    number_checkpoints: Count | None = None
    """At most how many blocks, spread evenly over the depth, are checkpointed; null: all."""

    partition_activations: bool = False
    """Each tensor-parallel rank keeps 1/N of the saved inputs, and gathers them before it recomputes. With one
    tensor-parallel rank that is the whole input, and nothing is sent."""

    cpu_checkpointing: bool = False
    """The saved inputs of checkpointed blocks wait in host memory, page-locked where there is a GPU, and the device
    holds none between forward and backward. An input is copied out while its block runs; in backward, that of the block
    before is copied in while a block is recomputed. Acts alone or with `partition_activations`, with which each rank's
    part is what is copied."""

    contiguous_memory_optimization: bool = False
    """The saved inputs lie in one buffer with a place for each checkpointed block, made in the first forward: less
    fragmentation, for one copy more. An input that does not fit into a place gets memory of its own."""

    synchronize_checkpoint_boundary: bool = False
    """The device's queued work is waited for before and after each forward and each recomputation of a block."""

    profile: bool = False
    """Rank 0 prints the milliseconds a step that each checkpointed block takes forward and in recomputation, every
    `steps_per_print` steps; where that is null, the mean at the end of the run. On a GPU the queued work is
    waited for at both ends of what is timed."""

    def remarks(self) -> Iterator[Remark]:
        which = "all" if self.number_checkpoints is None else f"at most {self.number_checkpoints}"
        yield Remark("", f"is written: {which} transformer blocks are recomputed in backward")
