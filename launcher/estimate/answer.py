"""The answer of an estimate: bytes by component, at the peak of a step and between steps."""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of tensors on the device, by what they are for.

    Args:
        parameters: what this rank keeps of them between steps.
        gradients: of them; where the stage shards them, this rank's share.
        optimizer: master weights and states.
        buffers: gathered parameters, gradients on their way, and memory that waits to be used again.
        activations: all else: what backward will need, its temporaries, logits and loss.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations

    @property
    def model_states(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Estimate:
    """The needs of one rank.

    Args:
        peaks: bytes of the device at most in each phase of a step: forward, backward, step.
        at_peak: who holds what when there is most.
        between: the same between steps.
        host: bytes of host memory that shards rest in, and of the copies of saves in the background.
        nvme: bytes on NVMe.
        kept: bytes between steps of parameters, of gradients, and of what the optimizer has, wherever they rest.
    """

    rank: int
    world: int
    peaks: dict[str, int]
    at_peak: DeviceBytes
    between: DeviceBytes
    host: int = 0
    nvme: int = 0
    kept: tuple[int, ...] = ()

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def phase(self) -> str:
        """Return the one with the peak."""
        return max(self.peaks, key=lambda name: self.peaks[name])
