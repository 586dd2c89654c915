"""The context of a recipe's run: flags, config, device, output directory, and the rank that prints."""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

from launcher import earlier_run, owner
from launcher.cluster.secret import without_secrets
from launcher.comm import init_distributed, pick_device
from launcher.comm.plain import broadcast_from_first
from launcher.config import Config, load
from launcher.config.fault_tolerance import of_replica
from launcher.config.ranks import mesh_lines
from launcher.config.resolve import complete, flags_for_json, micro_batch_of
from launcher.earlier_run import CHECKPOINTS, MODEL
from launcher.engine import Engine, report
from launcher.errors import ConfigError
from launcher.monitor.summary import write_json
from launcher.replica import replica_of
from launcher.resuming import Resuming, keep_batch, written_batch

if TYPE_CHECKING:
    from launcher.checkpoint.peer_memory import PeerMemory


@dataclass
class Run:
    """A run of a recipe, created by `Run.start`.

    Args:
        args: the recipe's flags.
        config: the config as written; the engine has the resolved one.
        output_dir: the directory that all output is written to.
        device: the device of this rank.
        console: prints on rank 0 only.
    """

    args: argparse.Namespace
    config: Config
    output_dir: Path
    device: torch.device
    console: Console
    rank: int = field(default=0)
    replica: int = field(default=0)
    """Index of this replica (`fault_tolerance`); `rank` is the rank within the replica."""
    replicas: int = field(default=1)
    terminated: list[int] = field(default_factory=list)
    """SIGTERMs received, when the launcher leaves time for a last checkpoint (`--term_grace`)."""
    has_saved: bool = False
    """Whether an earlier attempt of this run saved a checkpoint."""
    resuming: Resuming | None = None
    """The checkpoint that the run resumes from."""
    batch_keys: dict[str, Any] = field(default_factory=dict)
    """The batch keys of the config, as written."""
    memory: PeerMemory | None = None
    """Storage for in-memory copies of the state (`checkpoint.peer_memory`)."""
    ownership: owner.Ownership | None = None
    """Ownership of the output directory, on rank 0; None if the agent of `launch` owns it."""

    @classmethod
    def start(cls, args: argparse.Namespace) -> Run:
        """Initialize torch.distributed, set the seeds, and take the output directory.

        Raises:
            ConfigError: no config was given, or it is invalid.
        """
        source = os.environ.get("LAUNCHER_CONFIG")
        if source is None:
            raise ConfigError(
                "missing --config", fix="start the recipe through `launch --config ds_config.json`"
            )
        device = pick_device(args.device or os.environ.get("LAUNCHER_DEVICE", "auto"))
        init_distributed(device)
        rank = dist.get_rank()
        config = of_replica(complete(load(source), flags_for_json(args)))
        replica, replicas = replica_of()
        # Dropout differs between ranks, except within a group that processes the same sequences. Weights and
        # data have their own seeds.
        seed = args.seed + (replica * dist.get_world_size() + rank) // config.tensor_parallel.degree
        random.seed(seed)
        torch.manual_seed(seed)
        output = Path(os.environ.get("LAUNCHER_OUTPUT_DIR") or args.output_dir or "runs/run")
        output.mkdir(parents=True, exist_ok=True)
        run = cls(args, config, output, device, Console(quiet=rank != 0, soft_wrap=True), rank)
        run.replica, run.replicas = replica, replicas
        run._own_directory()
        run._look_at_checkpoint()
        if "LAUNCHER_TERM_GRACE" in os.environ:
            signal.signal(signal.SIGTERM, lambda number, _: run.terminated.append(number))
        return run

    def _own_directory(self) -> None:
        """Take the output directory on rank 0 for all ranks, unless the agent that started them owns it.

        Raises:
            ConfigError: on all ranks: another run owns it, or it has results that no flag allows to replace.
        """
        problem: tuple[str, str | None, str | None] | None = None
        saved = False
        if self.rank == 0:
            try:
                if not (self.replica or owner.is_held(self.output_dir, os.environ.get("LAUNCHER_RUN", ""))):
                    self.ownership = owner.take(self.output_dir, "", self.say)
                if not self.replica:
                    earlier_run.check(self.args, self.output_dir)
                saved = earlier_run.has_saved(self.output_dir)
            except ConfigError as error:
                problem = error.what, error.where, error.fix
        told, self.has_saved = broadcast_from_first((problem, saved))
        if told is not None:
            what, where, fix = told
            raise ConfigError(what, where=where, fix=fix)

    def take_over(self) -> None:
        """On rank 0, delete what `--overwrite` replaces and record this run. Every rank must call it."""
        if self.rank == self.replica == 0:
            earlier_run.take_over(self.args, self.output_dir)
        dist.barrier()

    def _look_at_checkpoint(self) -> None:
        """Find the checkpoint to resume from, and adopt its batch size, before the engine is created."""
        self.batch_keys = written_batch(self.config)
        self.resuming = self._in_memory() or Resuming.wanted(self.args, self.checkpoints, own=self.has_saved)
        if self.resuming is not None:
            dp_degree = self.config.dp_degree(dist.get_world_size())
            self.config, line = keep_batch(self.config, self.resuming, dp_degree, self.args.keep_batch)
            if line:
                self.say(line)

    def look_again(self) -> None:
        """Find the checkpoint again when replicas begin: others may have saved one in the meantime."""
        self.has_saved = broadcast_from_first(earlier_run.has_saved(self.output_dir))
        self.resuming = Resuming.wanted(self.args, self.checkpoints, own=self.has_saved)

    def _in_memory(self) -> Resuming | None:
        """Return the state in the memory of the nodes if it is newer than the one on disk. Collective."""
        every = self.config.checkpoint.peer_memory.every
        if not every:
            return None
        from launcher.checkpoint.peer_memory import PeerMemory

        self.memory = PeerMemory.of_run()
        if self.memory is None:
            self.say(
                "WARNING checkpoint.peer_memory is disabled: /dev/shm is not available to the agents "
                "of `launch`"
            )
            return None
        nodes = "each node and the next" if self.memory.keeps_copies else "the only node"
        self.say(f"memory  a copy of the state every {every} steps, in the memory of {nodes}")
        return Resuming.in_memory(self.memory, self.checkpoints, has_saved=self.has_saved)

    def check_ownership(self) -> None:
        """Raise `ConfigError` if another run has taken over the output directory."""
        if self.ownership is not None:
            self.ownership.check()

    def give_back(self) -> None:
        """Release the output directory; exiting the process does so, too."""
        if self.ownership is not None:
            self.ownership.give_back()

    def say(self, text: str) -> None:
        """Print a line, once for all ranks."""
        self.console.print(text, highlight=False, markup=False)

    def stop_requested(self) -> bool:
        """Return whether any rank received SIGTERM; all then save a checkpoint. Every rank must call it."""
        if "LAUNCHER_TERM_GRACE" not in os.environ:
            return False
        told = torch.tensor(float(bool(self.terminated)))
        dist.all_reduce(told)
        return bool(told)

    @property
    def checkpoints(self) -> Path:
        return self.output_dir / CHECKPOINTS

    @property
    def model_dir(self) -> Path:
        """Return the directory of the final weights, in Hugging Face format."""
        return self.output_dir / MODEL

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]] | None:
        """Return the param groups for `--decay`, or None if all parameters form one group."""
        if self.args.decay == "all":
            return None
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [
            {"params": [parameter for parameter in parameters if parameter.dim() > 1]},
            {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
        ]

    def auto_values(
        self, *, lr: float, total_steps: int, micro_batch: int, weight_decay: float = 0.0
    ) -> dict[str, Any]:
        """Return values for the `"auto"` keys of the config that the recipe sets and no flag does.

        Args:
            micro_batch: sequences per microbatch; reduced if `--batch-size` is not a multiple of it.
        """
        values: dict[str, Any] = {
            "optimizer.params.lr": lr,
            "optimizer.params.weight_decay": weight_decay,
            "scheduler.params.total_num_steps": total_steps,
            "scheduler.params.total_steps": total_steps,
            "scheduler.params.T_max": total_steps,
            "scheduler.params.warmup_num_steps": max(2, total_steps // 20),
        }
        dp_degree = self.config.dp_degree(dist.get_world_size())
        values["train_micro_batch_size_per_gpu"] = micro_batch_of(self.config, dp_degree, micro_batch)
        return values

    def total_steps(self, sequences: int, *, default: int, micro_batch: int) -> int:
        """Return the number of optimizer steps that `--max-steps` or `--epochs` requests.

        Args:
            sequences: number of sequences in the data set.
            default: returned if neither flag is set.
            micro_batch: as in `auto_values`.
        """
        if self.args.max_steps is not None:
            return int(self.args.max_steps)
        if self.args.epochs is None:
            return default
        auto = self.auto_values(lr=1.0, total_steps=1, micro_batch=micro_batch)
        dp_degree = self.config.dp_degree(dist.get_world_size())
        batch = int(str(self.config.resolve(dp_degree=dp_degree, auto=auto).train_batch_size)) * self.replicas
        return max(1, int(self.args.epochs * (sequences // batch)))

    def describe(self, engine: Engine, model: str, data: str) -> None:
        """Print what will run, with every "auto" and surprising default resolved. Every rank must call it."""
        parameters, trained = report.parameters(engine), report.parameters(engine, trained=True)
        of_these = "" if trained == parameters else f", {trained:,} of them trained"
        self.say(f"model   {model}: {parameters:,} parameters{of_these}")
        self.say(f"data    {data}")
        self.say(f"ranks   {report.ranks(engine)}")
        mesh = mesh_lines(engine.mesh.degrees, socket.gethostname())
        for i, line in enumerate(mesh):
            self.say(f"{'' if i else 'mesh':8}{line}")
        self.say(f"batch   {report.batch(engine)}")
        if self.replicas > 1:
            whole = engine.train_batch_size() * self.replicas
            self.say(f"replica {self.replica} of {self.replicas}; global batch of all replicas: {whole}")
        for auto in engine.resolved.resolved_autos:
            self.say(f"chosen  {auto.path} = {auto.value} ({auto.why})")
        for note in engine.resolved.notes:
            self.say(f"note    {note}")
        self.say(f"output  {self.output_dir}")

    def write_config(self, resolved: dict[str, Any]) -> None:
        """Write the resolved config and the recipe's flags, without secrets: others may read the files."""
        if self.rank == self.replica == 0:
            write_json(self.output_dir / "config.json", without_secrets(resolved))
            write_json(self.output_dir / "flags.json", without_secrets(vars(self.args)))
