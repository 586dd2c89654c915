"""The sections for monitoring and profiling: monitors, `flops_profiler`, `comms_logger` and `timers`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from launcher.config.problems import in_json, show
from launcher.config.section import Count, Section, WholeNumber, complaint

PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "comet": ("comet_ml", "comet_ml"),
    "mlflow": ("mlflow", "mlflow"),
    "trackio": ("trackio", "trackio"),
}
"""Section of a tracker -> the module that it imports, and the package that provides it."""


def is_installed(module: str) -> bool:
    """Return whether a module can be imported."""
    return find_spec(module) is not None


_WITH_LOSS = "also writes train_loss and grad_norm; DeepSpeed writes the rate and the loss scale"


class TensorboardConfig(Section):
    """TensorBoard files, written by rank 0. Needs the package `tensorboard`.

    Every step writes `Train/Samples/train_loss` (the mean over the global batch), `lr`, `grad_norm`,
    `loss_scale` with fp16, and the times of the phases with `wall_clock_breakdown`; evaluations write
    `eval_loss`. The x-axis is the number of samples.
    """

    differs: ClassVar[dict[str, str]] = {"enabled": _WITH_LOSS}

    enabled: bool = False
    """Write TensorBoard files."""

    output_path: str = ""
    """Base directory; files go to output_path/job_name. Empty: ./job_name in the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Subdirectory of output_path."""


class CsvMonitorConfig(Section):
    """One CSV file per metric, written by rank 0: `Train_Samples_lr.csv` and so on, with the columns step
    (samples) and value. The metrics are the same as for `tensorboard`."""

    differs: ClassVar[dict[str, str]] = {
        "enabled": f"{_WITH_LOSS}; a resumed run does not repeat the header",
    }

    enabled: bool = False
    """Write CSV files."""

    output_path: str = ""
    """Base directory; files go to output_path/job_name. Empty: ./job_name in the working directory."""

    job_name: str = "DeepSpeedJobName"
    """Subdirectory of output_path."""


class WandbConfig(Section):
    """Weights & Biases, logged by rank 0. Needs the package `wandb`. The metrics are the same as for
    `tensorboard`."""

    differs: ClassVar[dict[str, str]] = {"enabled": _WITH_LOSS}

    enabled: bool = False
    """Log to Weights & Biases."""

    group: str | None = None
    """Group of the run; null: none."""

    team: str | None = None
    """Team or user (`entity`) of the run; null: the account's default."""

    project: str = "deepspeed"
    """Project of the run."""


class CometConfig(Section):
    """Comet, logged by rank 0. Needs the package `comet_ml`. The metrics are the same as for
    `tensorboard`."""

    differs: ClassVar[dict[str, str]] = {"enabled": _WITH_LOSS}

    enabled: bool = False
    """Log to Comet."""

    samples_log_interval: Count = 100
    """Samples between two logged values of a metric; steps in between are not logged."""

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
    """False: write only local files. Null: online."""

    mode: Literal["get", "create", "get_or_create"] | None = None
    """Whether to continue `experiment_key` ("get") or to create a new experiment ("create"). Null:
    "get_or_create", continue it if it exists."""


class MlflowConfig(Section):
    """MLflow, logged by rank 0 to files, a database or a server. Needs the package `mlflow`. The metrics are
    the same as for `tensorboard`."""

    differs: ClassVar[dict[str, str]] = {"enabled": "a section of this launcher"}

    enabled: bool = False
    """Log to MLflow."""

    tracking_uri: str | None = None
    """Where to log: sqlite:///mlruns.db, a directory or http://HOST:PORT. Null: MLFLOW_TRACKING_URI or
    MLflow's own default."""

    experiment_name: str | None = None
    """Experiment of the run; null: MLFLOW_EXPERIMENT_NAME or "Default"."""

    run_name: str | None = None
    """Name of the run; null: MLflow chooses."""


class TrackioConfig(Section):
    """trackio, logged by rank 0 to a database in this user's cache, which `trackio show` displays. Needs the
    package `trackio`. The metrics are the same as for `tensorboard`."""

    differs: ClassVar[dict[str, str]] = {"enabled": "a section of this launcher"}

    enabled: bool = False
    """Log to trackio."""

    project: str = "launcher"
    """Project of the run."""

    name: str | None = None
    """Name of the run; null: trackio chooses."""

    space_id: str | None = None
    """A Space of the Hugging Face Hub that displays the run. Null: nothing leaves this machine."""


class PrometheusConfig(Section):
    """A file of gauges in Prometheus' text format, written by rank 0 for the textfile collector of the node
    exporter. It is replaced atomically after each step. The metrics are the same as for `tensorboard`, as
    `launcher_train_loss` and so on."""

    differs: ClassVar[dict[str, str]] = {"enabled": "a section of this launcher"}

    enabled: bool = False
    """Write the file."""

    textfile: Annotated[str, Field(min_length=1)] = "training.prom"
    """Path of the file in the collector's directory; its name must end in .prom."""

    job_name: str = "launcher"
    """Label `job` of each metric."""


OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "inference_all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
}
"""DeepSpeed's names of collectives -> ours."""


def _operations(names: Any) -> Any:
    if not isinstance(names, list | tuple):
        raise complaint(f"must be a list of operations, not {show(names)}", 'write ["all_reduce", ...]')
    for name in names:
        if name not in OPERATIONS:
            raise complaint(
                f"contains {in_json(name)}, which is not an operation", f"use {', '.join(OPERATIONS)}"
            )
    return tuple(names)


class FlopsProfilerConfig(Section):
    """Reports the parameters, floating-point operations and time of each module, for one step of rank 0.

    Operations are counted as they run: matrix products, convolutions and attention, two for each
    multiply-accumulate (MAC). Turns on `wall_clock_breakdown`, as in DeepSpeed. Compiled blocks run
    uncompiled in the step in which operations are counted, and each is timed as a whole.
    """

    differs: ClassVar[dict[str, str]] = {
        "enabled": "counts the backward too, instead of assuming twice the forward; operations are counted one "
        "step before their time is measured, so that counting does not slow down the timed step",
    }

    without_effect: ClassVar[dict[str, str]] = {
        "recompute_fwd_factor": "the backward is counted as it runs, recomputed forwards included, and not estimated",
    }

    enabled: bool = False
    """Write the report."""

    recompute_fwd_factor: Annotated[float, Field(ge=0)] = 0.0
    """DeepSpeed's estimate of how much of the forward is recomputed in the backward."""

    profile_step: WholeNumber = 1
    """Number of optimizer steps before the profiled step."""

    module_depth: Annotated[int, Field(ge=-1)] = -1
    """Depth of the tables; 0 is only the whole model, -1 is unlimited."""

    top_modules: Count = 1
    """Number of module classes that the summary lists at each depth."""

    detailed: bool = True
    """Also print every module in a table."""

    output_file: str | None = None
    """Output file of the report. Null or empty: standard output."""


class CommsLoggerConfig(Section):
    """Logs the number, bytes, time and bandwidth of each rank's collectives.

    The table is printed by rank 0 at the end of a recipe, and by `launcher.comm.log_summary()`.
    """

    differs: ClassVar[dict[str, str]] = {
        "enabled": "collectives still overlap with compute while they are timed, and the time that a rank "
        "was blocked is shown too; with overlap_comm false, each one is timed separately",
        "debug": "names the unit and the phase that started it, not the Python function",
    }

    enabled: bool = False
    """Log collectives."""

    verbose: bool = False
    """Print each collective on rank 0 when it has completed; on GPUs, this waits for it."""

    prof_all: bool = True
    """Log every operation; false: those of `prof_ops`."""

    debug: bool = False
    """Log units separately: one line for `model.layers.0/forward`, not one for the forward of all units."""

    prof_ops: Annotated[tuple[str, ...], BeforeValidator(_operations)] = ()
    """Operations to log if `prof_all` is false; DeepSpeed's names are accepted as well."""

    @property
    def operations(self) -> frozenset[str] | None:
        """Return our names of the operations to log; None for all."""
        return None if self.prof_all else frozenset(OPERATIONS[name] for name in self.prof_ops)


class ThroughputConfig(Section):
    """Sequences per second, from the start of the first forward to the end of the optimizer step."""

    enabled: bool = True
    """Print the throughput with the lines of `steps_per_print`: for the last step, and the mean without the
    first two steps."""

    synchronized: bool = True
    """Synchronize with the device at both ends; false measures how fast work is enqueued."""

    differs: ClassVar[dict[str, str]] = {
        "enabled": "nothing is measured or synchronized unless `steps_per_print` is set"
    }


class TimersConfig(Section):
    """Timers."""

    throughput: ThroughputConfig = Field(default_factory=ThroughputConfig.model_construct)
    """Sequences per second."""
