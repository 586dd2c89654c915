"""`checkpoint`: how `Engine.save_checkpoint` writes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from launcher.config.section import Count, Section, complaint


def _any_case(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) and value != "auto" else value


def _writes_something(value: Any) -> Any:
    if value == "mock":
        raise complaint('"mock" writes no checkpoint', "leave it out, and do not call save_checkpoint()")
    return value


class ParallelWriteConfig(Section):
    """Who writes which layers in DeepSpeed's pipelines."""

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
        "decoupled": "a thread of each rank writes a copy of the state, for several steps if need be; "
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
    """save_checkpoint() copies this rank's part of the state to host memory and returns; a thread writes it.
    `latest` moves when all ranks have written. A save that failed raises at the end of an optimizer step, or at the
    next save, load or destroy(), which wait for it; so does a run that ends. A run that is killed meanwhile has
    the checkpoints from before."""


class CheckpointConfig(Section):
    """Checkpoints are topology-free whatever is written here."""

    without_effect: ClassVar[dict[str, str]] = {
        "load_universal": "every checkpoint loads on any number of ranks at any stage; DeepSpeed's own are not read",
        "checkpoint_serialization": "the files are of torch.distributed.checkpoint, which has one format",
    }
    differs: ClassVar[dict[str, str]] = {
        "tag_validation": "ranks that disagree all save under rank 0's tag; in DeepSpeed each saves under its own",
        "use_node_local_storage": "such a checkpoint loads on the same ranks of the same nodes only",
    }

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_any_case)] = "Warn"
    """When ranks name different tags for one save, rank 0's counts. "Ignore" says nothing, "Warn" warns, "Fail"
    raises on all ranks and saves nothing. Upper and lower case are alike."""

    load_universal: bool = False
    """DeepSpeed needs it to load on other topologies; here every checkpoint does."""

    use_node_local_storage: bool = False
    """The directory of checkpoints is another one on each node. Each holds what the ranks of its node need, with
    metadata of its own, and is complete when all nodes have written. Nodes are told apart by GROUP_RANK, or by
    their host names."""

    parallel_write: ParallelWriteConfig = Field(default_factory=ParallelWriteConfig.model_construct)
    """Who writes which layers in DeepSpeed's pipelines."""

    checkpoint_serialization: bool = True
    """torch.save's zip format in DeepSpeed."""

    writer: WriterConfig = Field(default_factory=WriterConfig.model_construct)
    """How files are written."""
