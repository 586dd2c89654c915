"""`tensorboard`, `csv_monitor`, `wandb` and `comet`: where the numbers of a run go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from launcher.config.section import Count, Remark, Section

_WITH_LOSS = "also writes train_loss and grad_norm; DeepSpeed writes the rate and the loss scale"


class TensorboardConfig(Section):
    """TensorBoard files, written by rank 0. Needs the package `tensorboard`.

    Every step writes `Train/Samples/train_loss` (the mean over the global batch), `lr`, `grad_norm`, under fp16
    `loss_scale`, and with `wall_clock_breakdown` the times of the phases; evaluations write `eval_loss`. The x-axis
    counts samples.
    """

    differs: ClassVar[dict[str, str]] = {"enabled": _WITH_LOSS}

    enabled: bool = False
    """Write TensorBoard files."""

    output_path: str = ""
    """Base directory; files go to output_path/job_name. Empty: ./job_name of the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Directory below output_path."""


class CsvMonitorConfig(Section):
    """One CSV file a metric, written by rank 0: `Train_Samples_lr.csv` and so on, with the columns step (samples) and
    value. The metrics are those of `tensorboard`."""

    differs: ClassVar[dict[str, str]] = {
        "enabled": f"{_WITH_LOSS}; a run that goes on does not repeat the header",
    }

    enabled: bool = False
    """Write CSV files."""

    output_path: str = ""
    """Base directory; files go to output_path/job_name. Empty: ./job_name of the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Directory below output_path."""


class WandbConfig(Section):
    """Weights & Biases, from rank 0. Needs the package `wandb`. The metrics are those of `tensorboard`."""

    differs: ClassVar[dict[str, str]] = {"enabled": _WITH_LOSS}

    enabled: bool = False
    """Send to Weights & Biases."""

    group: str | None = None
    """Group of the run; null: none."""

    team: str | None = None
    """Team or user (`entity`) of the run; null: the account's default."""

    project: str = "deepspeed"
    """Project of the run."""


class CometConfig(Section):
    """Comet, from rank 0. Needs the package `comet_ml`. The metrics are those of `tensorboard`."""

    differs: ClassVar[dict[str, str]] = {"enabled": _WITH_LOSS}

    enabled: bool = False
    """Send to Comet."""

    samples_log_interval: Count = 100
    """Samples between two values of a metric; steps in between are not sent."""

    project: str | None = None
    """Project; null: COMET_PROJECT_NAME or Comet's own settings."""

    workspace: str | None = None
    """Workspace; null: COMET_WORKSPACE or Comet's own settings."""

    api_key: str | None = None
    """Key of the account; null: COMET_API_KEY or Comet's own settings."""

    experiment_name: str | None = None
    """Name of the experiment; null: Comet chooses."""

    experiment_key: str | None = None
    """Key of the experiment, 32 to 50 letters and digits; null: Comet chooses."""

    online: bool | None = None
    """false: keep everything in local files; null: online."""

    mode: Literal["get", "create", "get_or_create"] | None = None
    """Whether to go on with `experiment_key` ("get") or to begin anew ("create"); null: "get_or_create", what fits."""

    def remarks(self) -> Iterator[Remark]:
        if self.api_key is not None:
            what = "is for whoever reads this file; the environment variable COMET_API_KEY keeps it out"
            yield Remark("api_key", what)
