"""`activation_checkpointing`: the section's presence turns checkpointing of the transformer blocks on."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.config.section import Count, Remark, Section


class ActivationCheckpointingConfig(Section):
    """Recompute the inside of transformer blocks in backward (Chen et al. 2016, arXiv:1604.06174).

    DeepSpeed reads this section only for models that call its own checkpoint function. Here its presence
    checkpoints the blocks of every model; leave the section out to keep all activations.
    """

    number_checkpoints: Count | None = None
    """How many blocks, spread evenly over the depth, are checkpointed; null: all."""

    cpu_checkpointing: bool = False
    """The saved inputs of checkpointed blocks wait in host memory."""

    def remarks(self) -> Iterator[Remark]:
        which = "all" if self.number_checkpoints is None else str(self.number_checkpoints)
        yield Remark("", f"is written: {which} transformer blocks are recomputed in backward")
