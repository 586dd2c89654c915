"""The result of an estimate: bytes by component, at the peak of a step and between steps."""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of tensors on the device, by component.

    Args:
        parameters: parameters or shards that this rank keeps between steps.
        gradients: gradients; this rank's shards where the ZeRO stage shards them.
        optimizer: master weights and optimizer states.
        buffers: unsharded parameters, gradients being reduced, and cached free buffers.
        activations: everything else: saved activations, temporaries of backward, logits and loss.
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
    """The estimated memory of one rank.

    Args:
        peaks: peak bytes on the device in each phase of a step: forward, backward, step.
        at_peak: bytes by component at the highest peak.
        between: bytes by component between steps.
        host: bytes of host memory, for offloaded shards and the copies of background saves.
        nvme: bytes on NVMe.
        kept: bytes of parameters, gradients and optimizer states between steps, including offloaded ones.
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
        """Return the phase with the highest peak."""
        return max(self.peaks, key=lambda name: self.peaks[name])
