"""Writers for the metrics of a run: TensorBoard, CSV, Weights & Biases, Comet, MLflow, trackio, Prometheus.
Each is a `MonitorWriter`."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError
from launcher.files import replace_text

MonitorEvent = tuple[str, float, int]
"""(name, value, samples), as in DeepSpeed."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class MonitorWriter:
    """A destination for metrics.

    Attributes:
        write: accepts (name, value, samples seen).
        flush: when it returns, written values survive the end of this process, if the library supports that.
        close: closes the destination.
    """

    write: Callable[[str, float, int], None]
    flush: Callable[[], None] = _nothing
    close: Callable[[], None] = _nothing


class Monitor:
    """The type of `engine.monitor`: sends events to every writer, as DeepSpeed's MonitorMaster does.

    Attributes:
        enabled: whether the JSON enables any writer; equal on all ranks, although only rank 0 has writers.
    """

    def __init__(self, writers: Iterable[MonitorWriter] = (), *, enabled: bool | None = None) -> None:
        self.writers = list(writers)
        self.enabled = bool(self.writers) if enabled is None else enabled

    def write_events(self, event_list: Iterable[MonitorEvent], flush: bool = True) -> None:
        """Write (name, value, samples) tuples; scripts may call this on every rank."""
        for name, value, samples in event_list:
            for writer in self.writers:
                writer.write(name, value, samples)
        for writer in self.writers if flush else ():
            writer.flush()

    def close(self) -> None:
        """Close all writers."""
        for writer in self.writers:
            writer.close()
        self.writers.clear()


def open_writers(sections: Mapping[str, Mapping[str, Any]]) -> list[MonitorWriter]:
    """Open the writers of all enabled sections of the JSON.

    Args:
        sections: name of a section -> its keys.

    Raises:
        ConfigError: a package is missing, a directory cannot be created, or the library raises an error.
    """
    return [
        _open(name, {key: value for key, value in keys.items() if key != "enabled"})
        for name, keys in sections.items()
    ]


def _open(section: str, keys: Mapping[str, Any]) -> MonitorWriter:
    try:
        return OPENERS[section](**keys)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{section} could not start: {error}",
            where=section,
            fix=f"fix that, or set {section}.enabled to false",
        ) from error


def csv_writer(output_path: str, job_name: str) -> MonitorWriter:
    """Return a writer of one CSV file per metric in output_path/job_name, with DeepSpeed's file names.

    For instance, `Train/Samples/lr` is written to `Train_Samples_lr.csv`. Each row is passed to the system
    before the next one is written.
    """
    directory = _directory("csv_monitor", output_path, job_name)

    def write(name: str, value: float, samples: int) -> None:
        path = directory / (name.replace("/", "_").replace(" ", "_") + ".csv")
        with path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if file.tell() == 0:
                rows.writerow(["step", name.rpartition("/")[2]])
            rows.writerow([samples, value])

    return MonitorWriter(write)


def tensorboard_writer(output_path: str, job_name: str) -> MonitorWriter:
    """Return a writer of TensorBoard event files in output_path/job_name."""
    library = _library("torch.utils.tensorboard", "tensorboard", "tensorboard")
    inner = library.SummaryWriter(log_dir=str(_directory("tensorboard", output_path, job_name)))
    return MonitorWriter(inner.add_scalar, inner.flush, inner.close)


def wandb_writer(group: str | None, team: str | None, project: str) -> MonitorWriter:
    """Return a writer for a run of Weights & Biases, whose own process uploads the logged values."""
    library = _library("wandb", "wandb", "wandb")
    run = library.init(project=project, group=group, entity=team)
    return MonitorWriter(lambda name, value, samples: run.log({name: value}, step=samples), close=run.finish)


def comet_writer(samples_log_interval: int, experiment_name: str | None, **start: Any) -> MonitorWriter:
    """Return a writer for a Comet experiment, which logs a metric once per `samples_log_interval` samples.

    Args:
        start: keyword arguments of comet_ml.start.
    """
    library = _library("comet_ml", "comet_ml", "comet")
    experiment = library.start(**start)
    if experiment_name is not None:
        experiment.set_name(experiment_name)
    last: dict[str, int] = {}

    def write(name: str, value: float, samples: int) -> None:
        if name in last and samples - last[name] < samples_log_interval:
            return
        last[name] = samples
        experiment.log_metric(name, value, step=samples)

    return MonitorWriter(write, close=experiment.end)


def mlflow_writer(
    tracking_uri: str | None, experiment_name: str | None, run_name: str | None
) -> MonitorWriter:
    """Return a writer for an MLflow run."""
    library = _library("mlflow", "mlflow", "mlflow")
    if tracking_uri is not None:
        library.set_tracking_uri(tracking_uri)
    if experiment_name is not None:
        library.set_experiment(experiment_name)
    run = library.start_run(run_name=run_name)
    client, number = library.MlflowClient(), run.info.run_id

    def write(name: str, value: float, samples: int) -> None:
        client.log_metric(number, name, value, step=samples)

    return MonitorWriter(write, close=library.end_run)


def trackio_writer(project: str, name: str | None, space_id: str | None) -> MonitorWriter:
    """Return a writer for a trackio run, with the metrics of a step in one row."""
    library = _library("trackio", "trackio", "trackio")
    run = library.init(project=project, name=name, space_id=space_id)
    row: dict[str, float] = {}
    at = 0

    def write(key: str, value: float, samples: int) -> None:
        nonlocal at
        row[key], at = value, samples

    def flush() -> None:
        run.log(dict(row), step=at)
        row.clear()

    return MonitorWriter(write, flush, run.finish)


def prometheus_writer(textfile: str, job_name: str) -> MonitorWriter:
    """Return a writer that atomically replaces a file of the latest values.

    A line is, for instance, `launcher_train_loss{job="..."} 2.5`.

    Format: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    path = Path(os.path.expanduser(textfile))
    _directory("prometheus", str(path.parent), "", key="textfile")
    job = job_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    values: dict[str, float] = {}

    def write(name: str, value: float, samples: int) -> None:
        values[re.sub(r"\W", "_", name.rpartition("/")[2])] = value
        values["samples"] = samples

    def flush() -> None:
        lines = [
            f'# TYPE launcher_{name} gauge\nlauncher_{name}{{job="{job}"}} {value!r}\n'
            for name, value in sorted(values.items())
        ]
        replace_text(path, "".join(lines))

    return MonitorWriter(write, flush)


OPENERS: dict[str, Callable[..., MonitorWriter]] = {
    "tensorboard": tensorboard_writer,
    "csv_monitor": csv_writer,
    "wandb": wandb_writer,
    "comet": comet_writer,
    "mlflow": mlflow_writer,
    "trackio": trackio_writer,
    "prometheus": prometheus_writer,
}


def _library(module: str, package: str, section: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{section} needs the package {package}, which cannot be imported: {error}",
            where=f"{section}.enabled",
            fix=f"pip install {package}, or set {section}.enabled to false",
        ) from error


def _directory(section: str, output_path: str, job_name: str, key: str = "output_path") -> Path:
    path = Path(os.path.expanduser(output_path)) / job_name
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{section} cannot write to {path}: {error.strerror}",
            where=f"{section}.{key}",
            fix="name a directory that can be created",
        ) from error
    return path
