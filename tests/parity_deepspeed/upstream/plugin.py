"""A pytest plugin that replaces their conftest.py: it starts ranks, selects tests and records results."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.parity_deepspeed.upstream import absent
from tests.parity_deepspeed.upstream.areas import why_left_out
from tests.parity_deepspeed.upstream.ranks import run_on_ranks


class Results:
    """Test id -> its result, written to a file during the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}

    def note(self, test: str, outcome: str, text: str = "", seconds: float = 0.0) -> None:
        self.outcomes[test] = {"outcome": outcome, "text": text[:6000], "seconds": f"{seconds:.1f}"}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            expected = "x" if hasattr(report, "wasxfail") else ""
            self.note(report.nodeid, expected + report.outcome, _said(report), report.duration)
            if report.when == "call":
                self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.note(report.nodeid, report.outcome, _said(report))

    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.outcomes, indent=1, sort_keys=True))
        new.replace(self.path)


def _said(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    first = f"{crash.message}\n\n" if crash else ""
    return first + report.longreprtext


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("upstream")
    group.addoption("--results", type=Path, required=True)
    group.addoption("--worlds", type=int, default=2, help="the most ranks; tests of more are skipped")
    group.addoption("--rank-limit", type=float, default=60.0, help="seconds of one test on its ranks")
    group.addoption(
        "--passed-in", type=Path, help="results: only what passed there is run, and is not left out"
    )
    group.addoption("--left-out", action="store_true", help="run what is left out, too")
    group.addoption("--again", action="store_true", help="run what is in the results already, too")


def pytest_configure(config: pytest.Config) -> None:
    results = Results(config.getoption("--results"))
    config.pluginmanager.register(results, "upstream-results")
    config.stash[_RESULTS] = results
    if os.environ["UPSTREAM_SIDE"] == "ours":
        absent.serve()
    from unit import common, util

    util.bf16_required_version_check = lambda accelerator_check=True: True  # as in preload.py

    def launch(test: Any, world: int, init_method: str) -> None:
        if world > config.getoption("--worlds"):
            pytest.skip(f"{world} ranks")
        outcome, text = run_on_ranks(test, world, init_method, config.getoption("--rank-limit"))
        if outcome == "skipped":
            pytest.skip(text)
        if outcome == "failed":
            pytest.fail(text, pytrace=False)

    common.DistributedExec._launch_procs = launch
    common.time = SimpleNamespace(
        time=common.time.time, sleep=lambda seconds: None
    )  # half a second after each test


_RESULTS = pytest.StashKey[Results]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = {} if config.getoption("--again") else config.stash[_RESULTS].outcomes
    items[:] = [item for item in items if item.nodeid not in known]
    if reference := config.getoption("--passed-in"):
        passed, everything = Results(reference).outcomes, config.getoption("--left-out")
        items[:] = [
            item
            for item in items
            if passed.get(item.nodeid, {}).get("outcome") == "passed"
            and (everything or not why_left_out(item.nodeid))
        ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Call a distributed test as a whole: it starts its ranks, and they run the method."""
    cls = getattr(item, "cls", None)
    if getattr(cls, "is_dist_test", False):
        assert cls is not None
        cls()(getattr(item, "_request"))  # noqa: B009
        setattr(item, "runtest", lambda: None)  # noqa: B010


class _Module(pytest.Module):
    """One of their test files, with its distributed fixtures adapted to current pytest."""

    def _getobj(self) -> ModuleType:
        module = super()._getobj()
        for name, value in list(vars(module).items()):
            if (
                isinstance(value, type)
                and getattr(value, "is_dist_fixture", False)
                and value.__module__ == module.__name__
            ):
                setattr(module, f"fixture_{name}", pytest.fixture(name=name)(_starter(value)))
        return module


def _starter(fixture: type[Any]) -> Any:
    def start(request: pytest.FixtureRequest) -> Any:
        return fixture()(request)

    return start


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    module: pytest.Module = _Module.from_parent(parent, path=module_path)
    return module


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Restore directory and environment after tests without ranks, which run in this process."""
    directory, environment = Path.cwd(), dict(os.environ)
    try:
        return (yield)
    finally:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
