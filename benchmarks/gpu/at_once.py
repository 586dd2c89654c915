"""A plugin of pytest (`-p benchmarks.gpu.at_once`): why a test failed is told when it does, for time may be up before
the end."""

from __future__ import annotations

import pytest

LINES = 30


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        lines = report.longreprtext.splitlines()
        print("", f"WHY {report.nodeid}", *lines[-LINES:], sep="\n", flush=True)
