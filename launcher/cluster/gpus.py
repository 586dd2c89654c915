"""The number of CUDA devices that torch would see in a rank, without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that restrict the devices visible to a process."""
_COUNT = "import torch; print(torch.cuda.device_count())"


def count() -> int:
    """Return the number of CUDA devices visible to a rank in this environment; 0 without torch or CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return 0
    version = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    if re.search(r"^hip\b.*= '", version, re.MULTILINE):
        asked = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True)
        return int(asked.stdout) if asked.returncode == 0 else 0
    return _cuda_devices() if re.search(r"^cuda\b.*= '", version, re.MULTILINE) else 0


def _cuda_devices() -> int:
    """Query the driver, which understands every form of CUDA_VISIBLE_DEVICES."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    found = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(found)) != 0:
        return 0
    return found.value
