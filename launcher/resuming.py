"""What a recipe does before there is an engine: resume a checkpoint with its global batch, or start in a directory that
has no earlier run."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoint import store
from launcher.checkpoint.tags import LATEST_FILE, latest_tag, list_tags
from launcher.comm.plain import decode
from launcher.config import Config
from launcher.config.ranks import ACCUMULATION, BATCH_KEYS, MICRO, TRAIN
from launcher.errors import CheckpointError, ConfigError

CHECKPOINTS, MODEL = "checkpoints", "model"
"""Directories of a run's results, below its output directory."""
RESTARTS = ("LAUNCHER_ATTEMPT", "SLURM_RESTART_COUNT", "LAUNCHER_POD_RESTARTS")
"""Variables above 0 in a run that was started again. A pod cannot know it: the last one says that it may have been."""


@dataclass(frozen=True)
class Resuming:
    """A checkpoint to go on from.

    Attributes:
        directory, tag: where; no tag: the latest.
        meta: what was noted of the run, `client_state` in it.
    """

    directory: Path
    tag: str | None
    meta: Mapping[str, Any]

    @classmethod
    def wanted(cls, args: argparse.Namespace, checkpoints: Path) -> Resuming | None:
        """What `--resume` names; None: start anew.

        After a restart by the launcher, Slurm or Kubernetes it is this run's own newest checkpoint, where there is one.

        Raises:
            ConfigError: nothing is there.
            CheckpointError: it is damaged, or no recipe's.
        """
        place = _place(args.resume, checkpoints)
        if place is None:
            return None
        found = cls(*place, decode(store.peek(*place)))
        found._check()
        return found

    def _check(self) -> None:
        """A script's checkpoint says nothing of the data, and a damaged one without checksums may say anything."""
        config, client = (self.meta.get(key) for key in ("config", "client_state"))
        lacks = [
            key for key in BATCH_KEYS if not isinstance(config, dict) or not isinstance(config.get(key), int)
        ]
        lacks += [key for key in ("data", "tokens") if not isinstance(client, dict) or key not in client]
        if lacks:
            raise CheckpointError(
                f"The checkpoint was not written by a recipe: its meta.json has no {', '.join(lacks)}.",
                where=str(self.directory / (self.tag or latest_tag(self.directory) or "")),
                fix="name one of a recipe's run; a script's own is loaded by that script",
            )

    @property
    def client_state(self) -> Mapping[str, Any]:
        """Of the recipe."""
        found: Mapping[str, Any] = self.meta["client_state"]
        return found


def written_batch(config: Config) -> dict[str, Any]:
    """The batch keys as the JSON has them."""
    return {key: getattr(config, key) for key in BATCH_KEYS}


def keep_batch(
    config: Config, resuming: Resuming, dp_degree: int, wanted: bool | None
) -> tuple[Config, str | None]:
    """The JSON with the accumulation that keeps the checkpoint's global batch on another number of ranks.

    Args:
        wanted: `--keep-batch`; None keeps it where it divides and the JSON's batch keys are what they were.

    Returns:
        (the JSON, a line for people where something changes).

    Raises:
        ConfigError: it is wanted and cannot be done.
    """
    was = {key: int(resuming.meta["config"][key]) for key in BATCH_KEYS}
    written = written_batch(config)
    micro = written[MICRO] if isinstance(written[MICRO], int) else was[MICRO]
    accumulation = written[ACCUMULATION] if isinstance(written[ACCUMULATION], int) else 1
    fixed = isinstance(written[TRAIN], int) or config.elasticity.on
    train = written[TRAIN] if isinstance(written[TRAIN], int) else micro * accumulation * dp_degree
    if config.elasticity.on or train == was[TRAIN]:
        return config, None
    ranks_were = was[TRAIN] // (was[MICRO] * was[ACCUMULATION])
    ranks = f"{_count(dp_degree)} now and {_count(ranks_were)} then"
    divides = not fixed and was[TRAIN] % (micro * dp_degree) == 0
    untouched = resuming.client_state.get("batch_keys", written) == written
    if divides and wanted is not False and (wanted or untouched):
        kept = was[TRAIN] // (micro * dp_degree)
        line = (
            f"batch   {was[TRAIN]} sequences a step, as in the checkpoint: {ACCUMULATION} is {kept} in place of "
            f"{accumulation} ({ranks}); --no-keep-batch leaves it as written"
        )
        return config.model_copy(update={ACCUMULATION: kept}), line
    if wanted:
        reason = (
            f"{TRAIN} {train} is written"
            if fixed
            else f"{was[TRAIN]} is no multiple of {micro} x {dp_degree} ranks"
        )
        raise ConfigError(
            f"the checkpoint's global batch, {was[TRAIN]} sequences, cannot be kept: {reason}",
            where="--keep-batch",
            fix=f"write another {MICRO}, start another number of ranks, or say --no-keep-batch",
        )
    way = "; --keep-batch keeps it" if divides else ""
    return config, (
        f"WARNING a step has {train} sequences, and had {was[TRAIN]} in the checkpoint ({ranks}): the learning "
        f"rate and the number of steps mean something else now{way}"
    )


def _count(ranks: int) -> str:
    return f"{ranks} data-parallel rank{'s' * (ranks > 1)}"


def prepare_directory(args: argparse.Namespace, output_dir: Path) -> None:
    """Keep the results of an earlier run in `output_dir`, or remove them where `--overwrite` says so.

    A run that goes on from a checkpoint of `output_dir` writes beside what is there, and so does one that the launcher
    or Slurm has started again. One process calls this, before the others read the directory.

    Raises:
        ConfigError: an earlier run's checkpoints or model would be replaced, and no flag says that they may be.
    """
    if _is_restart():
        return
    checkpoints, model = output_dir / CHECKPOINTS, output_dir / MODEL
    there = [CHECKPOINTS] * store.has_latest(checkpoints) + [MODEL] * model.is_dir()
    resumes_here = args.resume is not None and _is_inside(
        checkpoints if args.resume == "latest" else args.resume, output_dir
    )
    if not args.overwrite:
        if there and not resumes_here:
            raise ConfigError(
                f"{output_dir} has the results of an earlier run: {' and '.join(there)}",
                where="--output-dir",
                fix="go on from its checkpoint with --resume, replace it with --overwrite, or name another directory",
            )
        return
    if resumes_here:
        raise ConfigError(
            "--overwrite would remove the checkpoint that --resume reads",
            where=f"--output-dir {output_dir}",
            fix="leave out one of the two flags",
        )
    if args.model is not None and _is_inside(args.model, output_dir):
        raise ConfigError(
            f"--overwrite would remove {args.model}, and the run starts from it",
            where=f"--output-dir {output_dir}",
            fix="name another --output-dir",
        )
    # Only what a run has written: the directory may hold other things.
    (checkpoints / LATEST_FILE).unlink(missing_ok=True)
    for path in (*(checkpoints / tag for tag in list_tags(checkpoints)), model):
        shutil.rmtree(path, ignore_errors=True)


def _is_inside(path: str | Path, directory: Path) -> bool:
    return Path(path).expanduser().resolve().is_relative_to(directory.resolve())


def _is_restart() -> bool:
    """Return whether the launcher, Slurm or Kubernetes has started this run before, or may have."""
    return any(int(os.environ.get(name) or 0) > 0 for name in RESTARTS)


def _place(wanted: str | None, checkpoints: Path) -> tuple[Path, str | None] | None:
    if _is_restart() and store.has_latest(checkpoints):
        return checkpoints, None
    if wanted is None:
        return None
    if wanted == "latest":
        if not store.has_latest(checkpoints):
            raise ConfigError(
                f"--resume: {checkpoints} has no checkpoint yet",
                where="--resume latest",
                fix="name the run's --output-dir, or a checkpoint directory: --resume DIR",
            )
        return checkpoints, None
    path = Path(wanted).expanduser()
    for directory in (path, path / "checkpoints"):
        if store.has_latest(directory):
            return directory, None
    if (path / "meta.json").is_file():
        return path.parent, path.name
    raise ConfigError(
        f"--resume: {path} is no checkpoint",
        where=f"--resume {wanted}",
        fix="name a run's output directory, its checkpoints directory, or one checkpoint in it",
    )
