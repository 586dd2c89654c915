"""A pytest plugin (`-p benchmarks.gpu.at_once`) that prints failures at once, since a time limit may stop the run
early.
"""

from __future__ import annotations

import pytest

LINES = 30


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        lines = report.longreprtext.splitlines()
        print("", f"WHY {report.nodeid}", *lines[-LINES:], sep="\n", flush=True)
