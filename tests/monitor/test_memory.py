"""Memory of this process."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest

from launcher.monitor import memory
from launcher.monitor.memory import current_memory_bytes, peak_memory_bytes

SLACK = 1 << 20  # the kernel adds up its counts of pages lazily, some pages a processor


def test_the_peak_stays_after_the_memory_is_given_back() -> None:
    old_peak = peak_memory_bytes("cpu")
    size = old_peak - current_memory_bytes("cpu") + (64 << 20)
    block = np.ones(size, dtype=np.uint8)
    held = current_memory_bytes("cpu")
    del block
    assert held - current_memory_bytes("cpu") > size - SLACK
    assert peak_memory_bytes("cpu") >= held - SLACK
    assert peak_memory_bytes("cpu") > old_peak + (60 << 20)


def test_without_proc_the_peak_comes_from_getrusage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_status_bytes", lambda key: None)
    unit = 1 if sys.platform == "darwin" else 1024
    assert peak_memory_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def test_a_missing_line_is_none() -> None:
    assert memory._status_bytes("NoSuchLine") is None


def test_the_room_is_imported_without_torch() -> None:
    names = ("metrics", "progress", "summary", "plot", "memory", "timers")
    code = "import sys;" + "".join(f"import launcher.monitor.{name};" for name in names)
    code += "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
