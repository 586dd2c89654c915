"""Each writer passes the numbers that its library expects; the libraries are fakes, except for CSV."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.errors import ConfigError
from launcher.monitor.writers import Monitor, open_writers

EVENTS = [("Train/Samples/lr", 0.1, 8), ("Train/Samples/train_loss", 2.5, 8)]
CSV = {"enabled": True, "output_path": "", "job_name": "job"}
COMET = {
    "enabled": True,
    "samples_log_interval": 100,
    "project": "p",
    "workspace": "w",
    "api_key": "k",
    "experiment_name": "name",
    "experiment_key": "e",
    "online": False,
    "mode": "create",
}


class Calls(list[tuple[Any, ...]]):
    """Records calls: `calls.of("name")` is a function that appends (name, args, kwargs)."""

    def of(self, name: str, result: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.append((name, args, kwargs))
            return result

        return call


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.key("csv_monitor.enabled", "csv_monitor.output_path", "csv_monitor.job_name")
@pytest.mark.parametrize("output_path", ["", "there", "a/b"])
def test_csv_files_lie_in_output_path_and_job_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for samples in (8, 16):
        # Opened anew, as by a run that goes on: no second header.
        monitor = Monitor(open_writers({"csv_monitor": {**CSV, "output_path": output_path}}))
        monitor.write_events([(name, value, samples) for name, value, _ in EVENTS])
    found = {path.name: path.read_bytes() for path in (tmp_path / output_path / "job").iterdir()}
    assert found == {
        "Train_Samples_lr.csv": b"step,lr\r\n8,0.1\r\n16,0.1\r\n",
        "Train_Samples_train_loss.csv": b"step,train_loss\r\n8,2.5\r\n16,2.5\r\n",
    }


def test_a_killed_process_has_written_all_its_events(tmp_path: Path) -> None:
    code = (
        "import os, signal; from launcher.monitor.writers import *\n"
        f"m = Monitor([csv_writer({str(tmp_path)!r}, 'job')])\n"
        "for i in range(100): m.write_events([('loss', i / 2, i)])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "job" / "loss.csv").read_text().splitlines()[1:] == [
        f"{i},{i / 2}" for i in range(100)
    ]


@pytest.mark.key("csv_monitor.output_path")
def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="csv_monitor cannot write to") as caught:
        open_writers({"csv_monitor": {**CSV, "output_path": str(tmp_path / "file")}})
    assert caught.value.where == "csv_monitor.output_path"


@pytest.mark.key("tensorboard.enabled", "tensorboard.output_path", "tensorboard.job_name")
def test_tensorboard_gets_scalars_and_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    writer = SimpleNamespace(
        add_scalar=calls.of("add_scalar"), flush=calls.of("flush"), close=calls.of("close")
    )
    fake(monkeypatch, "torch.utils.tensorboard", SummaryWriter=calls.of("SummaryWriter", writer))
    keys = {"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "job"}
    monitor = Monitor(open_writers({"tensorboard": keys}))
    monitor.write_events(EVENTS)
    monitor.close()
    assert calls == [
        ("SummaryWriter", (), {"log_dir": str(tmp_path / "logs" / "job")}),
        ("add_scalar", EVENTS[0], {}),
        ("add_scalar", EVENTS[1], {}),
        ("flush", (), {}),
        ("close", (), {}),
    ]
    assert (tmp_path / "logs" / "job").is_dir()


@pytest.mark.key("tensorboard.enabled")
def test_the_real_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keys = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    Monitor(open_writers({"tensorboard": keys})).write_events(EVENTS)
    events = EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("Train/Samples/train_loss")] == [(8, 2.5)]


@pytest.mark.key("wandb.enabled", "wandb.group", "wandb.team", "wandb.project")
def test_wandb_is_started_with_project_group_and_team(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    run = SimpleNamespace(log=calls.of("log"), finish=calls.of("finish"))
    fake(monkeypatch, "wandb", init=calls.of("init", run))
    monitor = Monitor(open_writers({"wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"}}))
    monitor.write_events(EVENTS)
    monitor.close()
    assert calls == [
        ("init", (), {"project": "p", "group": "g", "entity": "t"}),
        ("log", ({"Train/Samples/lr": 0.1},), {"step": 8}),
        ("log", ({"Train/Samples/train_loss": 2.5},), {"step": 8}),
        ("finish", (), {}),
    ]


@pytest.mark.key("mlflow.enabled", "mlflow.tracking_uri", "mlflow.experiment_name", "mlflow.run_name")
def test_mlflow_gets_each_metric_at_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    names = ("set_tracking_uri", "set_experiment", "end_run")
    run = SimpleNamespace(info=SimpleNamespace(run_id="7"))
    client = SimpleNamespace(log_metric=calls.of("log_metric"))
    members = {name: calls.of(name) for name in names}
    fake(monkeypatch, "mlflow", start_run=calls.of("start_run", run), MlflowClient=lambda: client, **members)
    keys = {"enabled": True, "tracking_uri": "sqlite:///m.db", "experiment_name": "e", "run_name": "r"}
    monitor = Monitor(open_writers({"mlflow": keys}))
    monitor.write_events(EVENTS)
    monitor.close()
    assert calls == [
        ("set_tracking_uri", ("sqlite:///m.db",), {}),
        ("set_experiment", ("e",), {}),
        ("start_run", (), {"run_name": "r"}),
        ("log_metric", ("7", "Train/Samples/lr", 0.1), {"step": 8}),
        ("log_metric", ("7", "Train/Samples/train_loss", 2.5), {"step": 8}),
        ("end_run", (), {}),
    ]


@pytest.mark.key("trackio.enabled", "trackio.project", "trackio.name", "trackio.space_id")
def test_trackio_gets_a_row_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    run = SimpleNamespace(log=calls.of("log"), finish=calls.of("finish"))
    fake(monkeypatch, "trackio", init=calls.of("init", run))
    keys = {"enabled": True, "project": "p", "name": None, "space_id": None}
    monitor = Monitor(open_writers({"trackio": keys}))
    monitor.write_events(EVENTS)
    monitor.close()
    assert calls == [
        ("init", (), {"project": "p", "name": None, "space_id": None}),
        ("log", ({"Train/Samples/lr": 0.1, "Train/Samples/train_loss": 2.5},), {"step": 8}),
        ("finish", (), {}),
    ]


@pytest.mark.key("prometheus.enabled", "prometheus.textfile", "prometheus.job_name")
def test_prometheus_finds_the_newest_values_whole(tmp_path: Path) -> None:
    keys = {"enabled": True, "textfile": str(tmp_path / "node" / "run.prom"), "job_name": 'a "b"'}
    monitor = Monitor(open_writers({"prometheus": keys}))
    monitor.write_events(EVENTS)
    monitor.write_events([("Train/Samples/lr", 0.2, 16)])
    assert (tmp_path / "node" / "run.prom").read_text().splitlines() == [
        "# TYPE launcher_lr gauge",
        'launcher_lr{job="a \\"b\\""} 0.2',
        "# TYPE launcher_samples gauge",
        'launcher_samples{job="a \\"b\\""} 16',
        "# TYPE launcher_train_loss gauge",
        'launcher_train_loss{job="a \\"b\\""} 2.5',
    ]
    assert [path.name for path in (tmp_path / "node").iterdir()] == ["run.prom"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="prometheus cannot write to") as caught:
        open_writers({"prometheus": {**keys, "textfile": str(tmp_path / "file" / "x.prom")}})
    assert caught.value.where == "prometheus.textfile"


def fake_comet(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    names = ("log_metric", "set_name", "end")
    experiment = SimpleNamespace(**{name: calls.of(name) for name in names})
    fake(monkeypatch, "comet_ml", start=calls.of("start", experiment))
    return calls


@pytest.mark.key(*(f"comet.{key}" for key in COMET if key != "samples_log_interval"))
def test_comet_is_started_with_the_keys_of_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_comet(monkeypatch)
    open_writers({"comet": COMET})
    passed = {
        key: COMET[key] for key in ("project", "workspace", "api_key", "experiment_key", "online", "mode")
    }
    assert calls == [("start", (), passed), ("set_name", ("name",), {})]


@pytest.mark.key("comet.samples_log_interval", "comet.experiment_name")
@pytest.mark.parametrize(
    ("interval", "sent"), [(1, [0, 40, 80, 120, 160]), (80, [0, 80, 160]), (100, [0, 120])]
)
def test_comet_gets_each_metric_once_an_interval(
    monkeypatch: pytest.MonkeyPatch, interval: int, sent: list[int]
) -> None:
    calls = fake_comet(monkeypatch)
    monitor = Monitor(
        open_writers({"comet": {**COMET, "samples_log_interval": interval, "experiment_name": None}})
    )
    for samples in range(0, 161, 40):
        monitor.write_events([("a", 1.0, samples), ("b", 2.0, samples)])
    assert calls[1:] == [
        ("log_metric", (name, value), {"step": samples})
        for samples in sent
        for name, value in (("a", 1.0), ("b", 2.0))
    ]


@pytest.mark.key("tensorboard.enabled", "wandb.enabled", "comet.enabled")
@pytest.mark.parametrize(
    ("section", "module", "package", "keys"),
    [
        ("tensorboard", "torch.utils.tensorboard", "tensorboard", {"output_path": "", "job_name": "job"}),
        ("wandb", "wandb", "wandb", {"group": None, "team": None, "project": "p"}),
        ("comet", "comet_ml", "comet_ml", COMET),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, section: str, module: str, package: str, keys: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # what makes an import fail
    with pytest.raises(ConfigError, match=f"{section} needs the package {package}") as caught:
        open_writers({section: keys})
    assert f"pip install {package}" in str(caught.value.fix)
    assert caught.value.where == f"{section}.enabled"


@pytest.mark.key("wandb.enabled")
def test_what_a_library_refuses_is_said_with_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("no API key configured")

    fake(monkeypatch, "wandb", init=init)
    with pytest.raises(ConfigError, match="wandb could not start: no API key configured"):
        open_writers({"wandb": {"group": None, "team": None, "project": "p"}})
