"""The checkpoint that a recipe resumes from, located before the engine exists, and its global batch size."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.checkpoint import store
from launcher.checkpoint.names import META_FILE
from launcher.checkpoint.tags import is_foreign, latest_tag, refuse_unread
from launcher.comm.plain import decode
from launcher.config import Config
from launcher.config.ranks import ACCUMULATION, BATCH_KEYS, MICRO, TRAIN
from launcher.errors import CheckpointError, ConfigError
from launcher.replica import replica_of

if TYPE_CHECKING:
    from launcher.checkpoint.peer_memory import PeerMemory


@dataclass(frozen=True)
class Resuming:
    """A checkpoint to resume from.

    Attributes:
        directory, tag: the location; tag None is the latest checkpoint.
        meta: the metadata saved with it, including `client_state`.
    """

    directory: Path
    tag: str | None
    meta: Mapping[str, Any]

    @classmethod
    def wanted(cls, args: argparse.Namespace, checkpoints: Path, *, own: bool = False) -> Resuming | None:
        """Return the checkpoint that `--resume` names, or None to start from scratch.

        After a restart by the launcher, Slurm or Kubernetes (`own`), return this run's own latest checkpoint.

        Raises:
            ConfigError: there is no checkpoint at that path.
            CheckpointError: the checkpoint is corrupted.
        """
        place = _place(args.resume, checkpoints, own=own)
        if place is None:
            return None
        found = cls(*place, decode(store.peek(*place)))
        found._check()
        return found

    @classmethod
    def in_memory(cls, memory: PeerMemory, checkpoints: Path, *, has_saved: bool) -> Resuming | None:
        """Return the state in the memory of the nodes if it is newer than the one on disk. Collective."""
        on_disk = -1
        with suppress(CheckpointError):  # the checkpoint on disk is corrupted: use the one in memory
            on_disk = int(store.peek(checkpoints, None)["global_steps"]) if has_saved else -1
        found = memory.find(on_disk)
        return None if found is None else cls(memory.directory, found[0], decode(found[1]))

    def _check(self) -> None:
        """Validate the metadata: a corrupted checkpoint without checksums may contain anything."""
        counters = ("global_steps", "global_samples", "micro_steps", "world_size")
        lacks = [key for key in counters if not isinstance(self.meta.get(key), int)]
        lacks += [key for key in ("config", "client_state") if not isinstance(self.meta.get(key), dict)]
        if lacks:
            raise CheckpointError(
                f"meta.json of the checkpoint is damaged: missing {', '.join(lacks)}.",
                where=str(self.directory / (self.tag or latest_tag(self.directory) or "")),
                fix="choose another checkpoint (tag)",
            )

    @property
    def client_state(self) -> Mapping[str, Any]:
        """Return the client state, saved by a recipe or by a script."""
        found: Mapping[str, Any] = self.meta["client_state"]
        return found

    @property
    def is_of_recipe(self) -> bool:
        """Return whether it has the data position; scripts and DeepSpeed only save the number of samples."""
        return all(key in self.client_state for key in ("data", "tokens"))

    @property
    def samples(self) -> int:
        """Return the number of sequences that the run had read, over all ranks."""
        return int(self.meta["global_samples"])

    @property
    def batch(self) -> dict[str, int] | None:
        """Return the batch keys of the saved run, or None if they are unknown. A DeepSpeed config may set
        only two of the three, or "auto"; the others are derived from the counters."""
        said = {key: self.meta["config"].get(key) for key in BATCH_KEYS}
        said = {key: value for key, value in said.items() if isinstance(value, int)}
        if not said and not self.samples:
            return None
        steps = max(1, int(self.meta["global_steps"]))
        accumulation = said.get(ACCUMULATION) or max(1, int(self.meta["micro_steps"]) // steps)
        ranks = max(1, int(self.meta["world_size"]))
        train = said.get(TRAIN) or self.samples // steps or said.get(MICRO, 1) * accumulation * ranks
        train = train * int(self.client_state.get("replicas", 1)) // replica_of()[1]
        micro = said.get(MICRO) or max(1, train // (accumulation * ranks))
        return {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}


def written_batch(config: Config) -> dict[str, Any]:
    """Return the batch keys as written in the config."""
    return {key: getattr(config, key) for key in BATCH_KEYS}


def keep_batch(
    config: Config, resuming: Resuming, dp_degree: int, wanted: bool | None
) -> tuple[Config, str | None]:
    """Return the config with the accumulation steps that keep the checkpoint's global batch size.

    Args:
        wanted: `--keep-batch`; None keeps it if it divides evenly and the config's batch keys are unchanged.

    Returns:
        (config, a line to print if something changes).

    Raises:
        ConfigError: `--keep-batch` was passed, and the batch cannot be kept.
    """
    was = resuming.batch
    if was is None:
        return config, None
    written = written_batch(config)
    micro = written[MICRO] if isinstance(written[MICRO], int) else was[MICRO]
    accumulation = written[ACCUMULATION] if isinstance(written[ACCUMULATION], int) else 1
    fixed = isinstance(written[TRAIN], int) or config.elasticity.on
    train = written[TRAIN] if isinstance(written[TRAIN], int) else micro * accumulation * dp_degree
    if config.elasticity.on or train == was[TRAIN]:
        return config, None
    ranks_were = was[TRAIN] // (was[MICRO] * was[ACCUMULATION])
    ranks = f"{_count(dp_degree)} now, {_count(ranks_were)} in the checkpoint"
    divides = not fixed and was[TRAIN] % (micro * dp_degree) == 0
    untouched = resuming.client_state.get("batch_keys", written) == written
    if divides and wanted is not False and (wanted or untouched):
        kept = was[TRAIN] // (micro * dp_degree)
        line = (
            f"batch   {was[TRAIN]} sequences per step, as in the checkpoint: {ACCUMULATION} is {kept} "
            f"instead of {accumulation} ({ranks}); --no-keep-batch keeps the config value"
        )
        return config.model_copy(update={ACCUMULATION: kept}), line
    if wanted:
        reason = (
            f"the config sets {TRAIN} to {train}"
            if fixed
            else f"{was[TRAIN]} is not a multiple of {micro} x {dp_degree} ranks"
        )
        raise ConfigError(
            f"the checkpoint's global batch, {was[TRAIN]} sequences, cannot be kept: {reason}",
            where="--keep-batch",
            fix=f"use a different {MICRO} or number of ranks, or pass --no-keep-batch",
        )
    way = "; --keep-batch keeps the batch size" if divides else ""
    return config, (
        f"WARNING the global batch is {train} sequences, but was {was[TRAIN]} in the checkpoint "
        f"({ranks}): the learning rate and step count may need to be adjusted{way}"
    )


def _count(ranks: int) -> str:
    return f"{ranks} data-parallel rank{'s' * (ranks > 1)}"


def _place(wanted: str | None, checkpoints: Path, *, own: bool) -> tuple[Path, str | None] | None:
    if own:
        return checkpoints, None
    if wanted is None:
        return None
    if wanted == "latest":
        if not store.has_latest(checkpoints):
            raise ConfigError(
                f"--resume: {checkpoints} has no checkpoint yet",
                where="--resume latest",
                fix="pass the run's --output-dir, or a checkpoint directory: --resume DIR",
            )
        return checkpoints, None
    path = Path(wanted).expanduser()
    for directory in (path, path / "checkpoints"):
        if store.has_latest(directory):
            return directory, None
    if (path / META_FILE).is_file() or is_foreign(path):
        path = path.resolve()
        return path.parent, path.name
    refuse_unread(path)
    raise ConfigError(
        f"--resume: {path} is not a checkpoint",
        where=f"--resume {wanted}",
        fix="pass a run's output directory, its checkpoints directory, or one checkpoint in it",
    )
