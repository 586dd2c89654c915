"""Peak of bf16 matrix products of devices, dense, in FLOP/s (data), for model FLOPs utilisation.

From the makers' data sheets; those of NVIDIA print twice as much where they count sparsity. fp16 where a device has no
bf16 (V100, T4).
"""

from __future__ import annotations

PEAKS: tuple[tuple[str, float], ...] = (
    ("B200", 2250e12),  # NVIDIA HGX B200 data sheet: 36 PFLOP/s with sparsity for 8
    ("H200", 989e12),  # NVIDIA H200 data sheet
    ("H100 NVL", 835e12),  # NVIDIA H100 data sheet
    ("H100 PCIe", 756e12),  # NVIDIA H100 data sheet
    ("H100", 989e12),  # NVIDIA H100 data sheet, SXM
    ("A100", 312e12),  # NVIDIA A100 data sheet
    ("L40S", 362e12),  # NVIDIA L40S data sheet
    ("L4", 121e12),  # NVIDIA L4 data sheet
    ("A40", 149.7e12),  # NVIDIA A40 data sheet
    ("A10", 125e12),  # NVIDIA A10 data sheet
    ("V100", 125e12),  # NVIDIA V100 data sheet, SXM2
    ("T4", 65e12),  # NVIDIA T4 data sheet
    ("RTX 4090", 165.2e12),  # NVIDIA Ada architecture white paper, sums in fp32
    ("RTX 3090", 71e12),  # NVIDIA GA102 architecture white paper, sums in fp32
    ("MI300X", 1307.4e12),  # AMD MI300X data sheet
    ("MI250X", 383e12),  # AMD MI250X data sheet, both dies
)
"""(words in the device's name, peak); the first that fits counts."""


def peak_flops(name: str) -> float | None:
    """The peak of the device `torch.cuda.get_device_name()` calls `name`; None when it is not known."""
    words = name.replace("-", " ").split()
    for known, peak in PEAKS:
        if _runs_in(known.split(), words):
            return peak
    return None


def _runs_in(wanted: list[str], words: list[str]) -> bool:
    return any(words[i : i + len(wanted)] == wanted for i in range(len(words)))
