"""The sections that keep a run going: `checkpoint`, `fault_tolerance` (replicas that train on without a lost one) and
`replica_check`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from launcher.config.section import Count, Section, WholeNumber, complaint, lower
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config.root import Config


def _any_case(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) and value != "auto" else value


def _writes_something(value: Any) -> Any:
    if value == "mock":
        raise complaint('"mock" writes no checkpoint', "leave it out, and do not call save_checkpoint()")
    return value


class ParallelWriteConfig(Section):
    """The writers of the layers in DeepSpeed's pipelines."""

    without_effect: ClassVar[dict[str, str]] = {
        "pipeline_stage": "every rank always writes its own slice of every tensor",
    }

    pipeline_stage: bool = False
    """DeepSpeed lets the ranks of a pipeline stage share the writing of its layers; here all ranks always do."""


class WriterConfig(Section):
    """DeepSpeed's writers. Here torch.distributed.checkpoint writes; every rank its own file."""

    without_effect: ClassVar[dict[str, str]] = {
        "type": "torch.distributed.checkpoint writes every file",
        "io_buffer_size": "it tunes DeepSpeed's fast writer, and torch.distributed.checkpoint writes here",
        "io_buffer_double": "it tunes DeepSpeed's fast writer, and torch.distributed.checkpoint writes here",
        "io_multiplier": "it tunes DeepSpeed's fast writer, and torch.distributed.checkpoint writes here",
        "data_parallel": "every rank always writes its own slice of every tensor",
    }
    differs: ClassVar[dict[str, str]] = {
        "decoupled": "a thread of each rank writes a copy of the state, over several steps if needed; "
        "DeepSpeed: another process, and the next optimizer step waits for it",
    }

    type: Annotated[Literal["python", "fast"], BeforeValidator(_writes_something)] = "fast"
    """Which of DeepSpeed's writers; they write the same. "mock" is refused: it writes nothing."""

    io_buffer_size: Count = 64 * 1024 * 1024
    """Bytes of the fast writer's buffer."""

    io_buffer_double: bool = True
    """The fast writer has two buffers."""

    io_multiplier: Count = 1
    """Files of each of DeepSpeed's writers."""

    show_statistics: bool = False
    """Rank 0 prints bytes, seconds and MB/s of each save; on node-local storage those of its node."""

    data_parallel: Literal["replica", "socket", "machine"] | None = None
    """Which ranks write what all ranks have alike."""

    decoupled: bool = False
    """save_checkpoint() copies this rank's part of the state to host memory and returns; a thread writes it. The memory
    for that stays. Recipes do so where it is left out and host memory is ample, and copy beside the next forward.
    `latest` moves when all ranks have written. A save that failed raises at the end of an optimizer step, or at the
    next save, load or destroy(), which wait for it; so does a run that ends. A run that is killed meanwhile has
    the checkpoints from before."""


class PeerMemoryConfig(Section):
    """A recipe keeps copies of its state in host memory, on the node that made them and on the next one: after a
    restart it goes on from there, without a disk, also where one node was lost. They lie in /dev/shm, and take up to
    four times what the ranks of a node write into a checkpoint (two steps, of two nodes), and memory-estimate counts
    so much."""

    differs: ClassVar[dict[str, str]] = {"every": "a key of this launcher"}

    every: WholeNumber = 0
    """Optimizer steps between two copies; 0: none."""


class CheckpointConfig(Section):
    """Checkpoints are topology-free whatever is written here."""

    without_effect: ClassVar[dict[str, str]] = {
        "load_universal": "every checkpoint loads on any number of ranks at any stage: DeepSpeed's own, and those in "
        "its universal layout, too",
        "checkpoint_serialization": "torch.distributed.checkpoint writes the files, and has one format",
    }
    differs: ClassVar[dict[str, str]] = {
        "keep_last": "a key of this launcher",
        "keep_every": "a key of this launcher",
        "peer_memory": "a key of this launcher",
        "tag_validation": "ranks that disagree all save under rank 0's tag; in DeepSpeed each saves under its own",
        "use_node_local_storage": "such a checkpoint loads only on the same ranks of the same nodes",
    }

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_any_case)] = "Warn"
    """When ranks name different tags for one save, rank 0's counts. "Ignore" says nothing, "Warn" warns, "Fail"
    raises on all ranks and saves nothing. Upper and lower case are alike."""

    load_universal: bool = False
    """DeepSpeed needs it to load on other topologies; here every checkpoint does."""

    use_node_local_storage: bool = False
    """Each node has its own directory of checkpoints. It holds what the ranks of the node need, with its own
    metadata, and is complete when all nodes have written. Nodes are distinguished by GROUP_RANK, or by
    their host names."""

    parallel_write: ParallelWriteConfig = Field(default_factory=ParallelWriteConfig.model_construct)
    """Who writes which layers in DeepSpeed's pipelines."""

    keep_last: Count | None = None
    """So many of the newest checkpoints stay; older ones are deleted when a newer one is complete. Those alone that
    save_checkpoint() named itself, global_step<N>, are deleted; never the one that `latest` names. Null: all stay."""

    keep_every: Count | None = None
    """Checkpoints whose step is a multiple of it stay, whatever `keep_last` says."""

    peer_memory: PeerMemoryConfig = Field(default_factory=PeerMemoryConfig.model_construct)
    """Copies in the memory of the nodes."""

    checkpoint_serialization: bool = True
    """torch.save's zip format in DeepSpeed."""

    writer: WriterConfig = Field(default_factory=WriterConfig.model_construct)
    """How files are written."""


class FaultToleranceConfig(Section):
    """A recipe's ranks form replicas, which train together and can do without each other: when a rank dies, its replica
    is started again, and the others go on meanwhile (torchft; FT-HSDP, arXiv:2602.00277).

    ZeRO, tensor parallelism and pipeline stages lie inside a replica. Between replicas the mean of gradients is taken
    before each step, weighted by tokens. Where a replica is away, the mean is over those that are left. One that comes
    back copies the state of another. The batch keys count the ranks of all replicas."""

    differs: ClassVar[dict[str, str]] = {
        "replicas": "a key of this launcher",
        "timeout_s": "a key of this launcher",
    }

    replicas: Count = 1
    """Into how many the ranks are divided."""

    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that replicas wait for one that neither answers nor ends, before they go on without it."""


class ReplicaCheckConfig(Section):
    """Compare, bit for bit, the values that several ranks hold alike: a fault of memory or of a processor, or a
    script that changes weights on some ranks only, is found, and the ranks and parameters are named.

    These are parameters at stages 0 to 2, and those that stage 3 keeps whole; at stage 0, and in the groups of MiCS,
    the optimizer's state, too. What is sharded has no replica: `resting` and `replay_every` find faults in it. What is
    offloaded is not looked at.
    """

    differs: ClassVar[dict[str, str]] = {
        "every": "a key of this launcher",
        "action": "a key of this launcher",
        "resting": "a key of this launcher",
        "replay_every": "a key of this launcher",
    }

    every: WholeNumber = 100
    """Optimizer steps between two checks; 0: none. A check reads what is compared once, and sends a number for each."""

    action: Annotated[Literal["stop", "warn"], BeforeValidator(lower)] = "stop"
    """"stop" raises on all ranks before the step is made. "warn" goes on: for stage 0 on processors of several kinds,
    which may round differently."""

    resting: bool = False
    """Checksums of this rank's shard, master weights and optimizer state are taken after each step, and compared before
    the next one. They are read twice a step for it."""

    replay_every: WholeNumber = 0
    """Optimizer steps between two whose microbatches are computed twice, with torch's deterministic operations: the
    gradients that each rank computes, and their sums, must have the same bits. 0: none. The model must be
    deterministic. A script that calls forward and backward by itself is not replayed."""


def of_replica(config: Config) -> Config:
    """Return what one of the replicas trains with: its part of the global batch.

    Raises:
        ConfigError: it cannot be divided.
    """
    replicas = config.fault_tolerance.replicas
    if replicas == 1:
        return config
    batch = config.train_batch_size
    if not isinstance(batch, int):
        return config
    if batch % replicas:
        raise ConfigError(
            f"train_batch_size {batch} is not a multiple of {replicas} replicas",
            where=config.where("train_batch_size"),
            fix=f"write {batch // replicas * replicas or replicas}, or leave it out",
        )
    return config.model_copy(update={"train_batch_size": batch // replicas})


def check_replicas_are_started(config: Config) -> None:
    """Raise `ConfigError` where this process is not a rank of one of them."""
    from launcher.replica import REPLICAS

    if REPLICAS not in os.environ:
        raise ConfigError(
            "replicas are started by `launch`, for its recipes: this process is none",
            where=config.where("fault_tolerance.replicas"),
            fix="launch --config DS.json pretrain ..., or leave fault_tolerance out",
        )
