"""The sections for resilience: `checkpoint`, `fault_tolerance` (replicas) and `replica_check`."""

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
        raise complaint('"mock" writes no checkpoint', "remove it, and do not call save_checkpoint()")
    return value


class ParallelWriteConfig(Section):
    """Parallel writing of layers in DeepSpeed's pipelines."""

    without_effect: ClassVar[dict[str, str]] = {
        "pipeline_stage": "every rank always writes its own slice of every tensor",
    }

    pipeline_stage: bool = False
    """In DeepSpeed, the ranks of a stage can share the writing of its layers; here they always do."""


class WriterConfig(Section):
    """DeepSpeed's writers. Here torch.distributed.checkpoint writes one file per rank."""

    without_effect: ClassVar[dict[str, str]] = {
        "type": "torch.distributed.checkpoint writes every file",
        "io_buffer_size": "it tunes DeepSpeed's fast writer; here torch.distributed.checkpoint writes the files",
        "io_buffer_double": "it tunes DeepSpeed's fast writer; here torch.distributed.checkpoint writes the files",
        "io_multiplier": "it tunes DeepSpeed's fast writer; here torch.distributed.checkpoint writes the files",
        "data_parallel": "every rank always writes its own slice of every tensor",
    }
    differs: ClassVar[dict[str, str]] = {
        "decoupled": "a thread of each rank writes a copy of the state, over several steps if needed; "
        "DeepSpeed uses another process, and the next optimizer step waits for it",
    }

    type: Annotated[Literal["python", "fast"], BeforeValidator(_writes_something)] = "fast"
    """DeepSpeed's writer; all writers produce the same files. "mock" is refused: it writes nothing."""

    io_buffer_size: Count = 64 * 1024 * 1024
    """Bytes of the fast writer's buffer."""

    io_buffer_double: bool = True
    """The fast writer has two buffers."""

    io_multiplier: Count = 1
    """Files per DeepSpeed writer."""

    show_statistics: bool = False
    """Rank 0 prints bytes, seconds and MB/s of each save; with node-local storage, those of its node."""

    data_parallel: Literal["replica", "socket", "machine"] | None = None
    """The ranks that write replicated state."""

    decoupled: bool = False
    """Asynchronous saves: save_checkpoint() copies this rank's part of the state to host memory and returns,
    and a thread writes it. The host memory stays allocated. If this key is not set and there is ample host
    memory, recipes enable it and overlap the copy with the next forward. `latest` is updated when all ranks
    have written. A failed save raises at the end of an optimizer step, or at the next save, load or
    destroy(), which wait for it; so does the end of the run. A run that is killed during a save keeps the
    earlier checkpoints."""


class PeerMemoryConfig(Section):
    """In-memory checkpoints: a recipe keeps copies of each node's state in the host memory of that node and
    of the next one. After a restart it resumes from them without reading a disk, even if one node was lost.
    They are stored in /dev/shm and take up to four times what the ranks of a node write to a checkpoint (two
    steps, of two nodes); memory-estimate includes them."""

    differs: ClassVar[dict[str, str]] = {"every": "a key of this launcher"}

    every: WholeNumber = 0
    """Optimizer steps between two copies; 0: off."""


class CheckpointConfig(Section):
    """Checkpoints. They are independent of the topology, regardless of these keys."""

    without_effect: ClassVar[dict[str, str]] = {
        "load_universal": "every checkpoint, also DeepSpeed's own and universal ones, loads on any number of ranks "
        "at any stage",
        "checkpoint_serialization": "torch.distributed.checkpoint writes the files and has only one format",
    }
    differs: ClassVar[dict[str, str]] = {
        "keep_last": "a key of this launcher",
        "keep_every": "a key of this launcher",
        "peer_memory": "a key of this launcher",
        "tag_validation": "if tags differ, all ranks save under rank 0's; in DeepSpeed, each saves under its own",
        "use_node_local_storage": "such a checkpoint can be loaded only on the same ranks of the same nodes",
    }

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_any_case)] = "Warn"
    """If ranks pass different tags to one save, rank 0's is used. "Ignore" does so silently, "Warn" logs a
    warning, "Fail" raises on all ranks and saves nothing. Case-insensitive."""

    load_universal: bool = False
    """DeepSpeed needs it to load on other topologies; here every checkpoint loads on any."""

    use_node_local_storage: bool = False
    """Each node has its own checkpoint directory. It contains what the ranks of the node need, with its own
    metadata, and is complete when all nodes have written. Nodes are distinguished by GROUP_RANK, or by their
    host names."""

    parallel_write: ParallelWriteConfig = Field(default_factory=ParallelWriteConfig.model_construct)
    """Parallel writing of layers in DeepSpeed's pipelines."""

    keep_last: Count | None = None
    """Number of checkpoints to keep; older ones are deleted once a newer one is complete. Only checkpoints
    that save_checkpoint() named itself, global_step<N>, are deleted, and never the one that `latest` names.
    Null: keep all."""

    keep_every: Count | None = None
    """Keep checkpoints whose step is a multiple of this, regardless of `keep_last`."""

    peer_memory: PeerMemoryConfig = Field(default_factory=PeerMemoryConfig.model_construct)
    """In-memory checkpoints."""

    checkpoint_serialization: bool = True
    """torch.save's zip format in DeepSpeed."""

    writer: WriterConfig = Field(default_factory=WriterConfig.model_construct)
    """How files are written."""


class FaultToleranceConfig(Section):
    """Fault tolerance: a recipe's ranks form replicas that train together but do not depend on each other.
    When a rank dies, its replica is restarted while the others continue (torchft; FT-HSDP, arXiv:2602.00277).

    ZeRO, tensor parallelism and pipeline stages are confined to a replica. Before each step, gradients are
    averaged over the replicas, weighted by tokens. While a replica is missing, the mean is over the remaining
    ones. A replica that returns copies the state of another. The batch keys count the ranks of all replicas.
    """

    differs: ClassVar[dict[str, str]] = {
        "replicas": "a key of this launcher",
        "timeout_s": "a key of this launcher",
    }

    replicas: Count = 1
    """Number of replicas that the ranks are divided into."""

    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that replicas wait for one that hangs before they continue without it."""


class ReplicaCheckConfig(Section):
    """Compare replicated values bit for bit across ranks.

    This detects memory and processor faults, and scripts that change weights on some ranks only, and
    names the ranks and the parameters. The compared values are the parameters at stages 0 to 2, and those
    that stage 3 does not shard; at stage 0, and between the groups of MiCS, the optimizer state too. Sharded
    state has no replica: `resting` and `replay_every` detect faults in it. Offloaded state is not checked.
    """

    differs: ClassVar[dict[str, str]] = {
        "every": "a key of this launcher",
        "action": "a key of this launcher",
        "resting": "a key of this launcher",
        "replay_every": "a key of this launcher",
    }

    every: WholeNumber = 100
    """Optimizer steps between two checks; 0: off. A check reads the compared values once, and sends one
    number for each."""

    action: Annotated[Literal["stop", "warn"], BeforeValidator(lower)] = "stop"
    """"stop" raises on all ranks before the step. "warn" continues; use it for stage 0 on processors of
    different types, which may round differently."""

    resting: bool = False
    """Take checksums of this rank's shard, master weights and optimizer state after each step, and verify
    them before the next one. This reads them twice per step."""

    replay_every: WholeNumber = 0
    """Optimizer steps between two replays. A replayed step computes its microbatches twice, with torch's
    deterministic operations: the gradients of each rank, and their sums, must be bitwise equal. 0: off. The
    model must be deterministic. Steps of a script that calls forward and backward itself are not replayed."""


def of_replica(config: Config) -> Config:
    """Return the configuration of one replica, with its part of the global batch.

    Raises:
        ConfigError: the batch cannot be divided.
    """
    replicas = config.fault_tolerance.replicas
    if replicas == 1:
        return config
    batch = config.train_batch_size
    if not isinstance(batch, int):
        return config
    if batch % replicas:
        raise ConfigError(
            f"train_batch_size {batch} is not a multiple of fault_tolerance.replicas {replicas}",
            where=config.where("train_batch_size"),
            fix=f"write {batch // replicas * replicas or replicas}, or remove it",
        )
    return config.model_copy(update={"train_batch_size": batch // replicas})


def check_replicas_are_started(config: Config) -> None:
    """Raise `ConfigError` if this process is not a rank of a replica."""
    from launcher.replica import REPLICAS

    if REPLICAS not in os.environ:
        raise ConfigError(
            "fault_tolerance.replicas needs a recipe started with `launch`; this process was not",
            where=config.where("fault_tolerance.replicas"),
            fix="run `launch --config DS.json pretrain ...`, or remove fault_tolerance",
        )
