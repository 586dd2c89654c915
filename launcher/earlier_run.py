"""Handling of an earlier run's results in the output directory: refuse, resume from, or remove them.

A run records its name in the directory before it trains (`FILE`). A restart can therefore tell its own
results from those of an earlier run, even if the first attempt died before it trained.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from launcher.checkpoint.names import LATEST_FILE, META_FILE, OLD, TMP
from launcher.errors import ConfigError

CHECKPOINTS, MODEL = "checkpoints", "model"
"""Directories of a run's results, inside its output directory."""
FILE = ".run"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")
_FIGURES = ("metrics.jsonl", "summary.json", "loss.png", "schedule.json", "config.json", "flags.json")


def check(args: argparse.Namespace, output_dir: Path) -> None:
    """Raise if this run would replace the results of an earlier one without a flag. Changes nothing.

    Args:
        args: A recipe's flags.

    Raises:
        ConfigError: The directory has results that the run neither resumes from nor may overwrite, or the run
            would overwrite files that it reads.
    """
    if is_restart(output_dir):
        return
    resumes = _resumes_here(args, output_dir)
    there = _results(output_dir)
    if there and not (resumes or args.overwrite):
        raise ConfigError(
            f"{output_dir} contains the results of an earlier run: {' and '.join(there)}",
            where="--output-dir",
            fix="resume with --resume, replace the results with --overwrite, or choose another directory",
        )
    if not args.overwrite:
        return
    if resumes:
        raise ConfigError(
            "--overwrite would remove the checkpoint that --resume reads",
            where=f"--output-dir {output_dir}",
            fix="remove one of the two flags",
        )
    for flag in ("model", "tokenizer"):
        named = getattr(args, flag)
        if named is not None and any(_is_inside(named, output_dir / name) for name in (CHECKPOINTS, MODEL)):
            raise ConfigError(
                f"--overwrite would remove {named}, which the run reads",
                where=f"--{flag} {named}",
                fix="choose another --output-dir",
            )


def take_over(args: argparse.Namespace, output_dir: Path) -> None:
    """Delete what `--overwrite` replaces, and record the run. Called last, by one process."""
    if is_restart(output_dir):
        return
    if args.overwrite:
        _remove(output_dir)
    note = json.dumps({"run": _run(), "latest": _saved_at(output_dir)})
    (output_dir / FILE).write_text(note)


def is_restart(output_dir: Path) -> bool:
    """Return whether this is a restart (launcher, Slurm, Kubernetes) of a run begun in this directory."""
    again = any(
        os.environ.get(name, "0") not in ("", "0") for name in ("LAUNCHER_ATTEMPT", "SLURM_RESTART_COUNT")
    )
    again = again or "LAUNCHER_RUN_KEY" in os.environ
    return again and _noted(output_dir).get("run") == _run()


def has_saved(output_dir: Path) -> bool:
    """Return whether `latest` is a checkpoint that an earlier attempt of this run saved."""
    return is_restart(output_dir) and _saved_at(output_dir) not in (None, _noted(output_dir).get("latest"))


def _run() -> str:
    """Return the name of the run, the same for all attempts: from a manifest, the Slurm job, or `launch`."""
    slurm = os.environ.get("SLURM_JOB_ID")
    return os.environ.get("LAUNCHER_RUN_KEY") or (
        f"slurm {slurm}" if slurm else os.environ.get("LAUNCHER_RUN", "")
    )


def _noted(output_dir: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        noted = json.loads((output_dir / FILE).read_text())
        return noted if isinstance(noted, dict) else {}
    return {}


def _saved_at(output_dir: Path) -> int | None:
    """Return the mtime of `latest` in ns, or None if it does not exist."""
    try:
        return (output_dir / CHECKPOINTS / LATEST_FILE).stat().st_mtime_ns
    except OSError:
        return None


def _results(output_dir: Path) -> list[str]:
    """Return the results that exist. A directory's name is not enough: it may be the user's own."""
    checkpoints = _saved_at(output_dir) is not None or any(
        not path.name.startswith(TMP) for path in _saved(output_dir / CHECKPOINTS)
    )
    model = (output_dir / MODEL / "config.json").is_file() and (output_dir / "summary.json").is_file()
    return [CHECKPOINTS] * checkpoints + [MODEL] * model


def _resumes_here(args: argparse.Namespace, output_dir: Path) -> bool:
    return args.resume is not None and (args.resume == "latest" or _is_inside(args.resume, output_dir))


def _is_inside(path: str | Path, directory: Path) -> bool:
    return Path(path).expanduser().resolve().is_relative_to(directory.resolve())


def _saved(checkpoints: Path) -> Iterator[Path]:
    """Yield the checkpoint directories, finished or not; `latest` may be missing."""
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if path.is_dir() and ((path / META_FILE).is_file() or path.name.startswith((TMP, OLD))):
            yield path


def _remove(output_dir: Path) -> None:
    """Delete only the files that a run writes: the directories may hold other files."""
    checkpoints = output_dir / CHECKPOINTS
    (checkpoints / LATEST_FILE).unlink(missing_ok=True)  # first: `latest` must not name a half-removed one
    for path in list(_saved(checkpoints)):
        shutil.rmtree(path)
    for pattern in _WEIGHTS:
        for path in (output_dir / MODEL).glob(pattern):
            path.unlink()
    for name in _FIGURES:
        (output_dir / name).unlink(missing_ok=True)
