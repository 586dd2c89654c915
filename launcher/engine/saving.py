"""Saving and loading with DeepSpeed's methods: checkpoints, and unsharded weights.

The modules for this are imported on the first call, because evaluation runs often save nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from launcher.comm.plain import gather_plain
from launcher.errors import ArgumentsError, ConfigError
from launcher.models.safetensors_format import SINGLE_FILE

if TYPE_CHECKING:
    from launcher.engine.engine import Engine

logger = logging.getLogger("launcher")


class CheckpointMixin:
    """The part of an Engine that reads and writes files. Every rank must call its methods."""

    global_steps: int
    fp32_script = False  # write zero_to_fp32.py next to checkpoints, as DeepSpeed does

    def _engine(self) -> Engine:
        return cast("Engine", self)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint that any number of ranks, at any stage, can load. Every rank must call it.

        With an asynchronous schedule only the newest weights are saved; the delay restarts after loading.

        Args:
            save_dir: the checkpoint directory, shared by all ranks (per node with
                checkpoint.use_node_local_storage). If ranks pass different names, as scripts with generated
                names do, rank 0's is used.
            tag: name of this checkpoint; default: global_step<N>.
            client_state: JSON-serializable state of the caller; rank 0's is saved.
            save_latest: make this the checkpoint that is loaded without a tag.
            exclude_frozen_parameters: do not save them; pass this to load_checkpoint(), too.

        Raises:
            ConfigError: save_dir is empty.
        """
        from launcher.checkpoint.fp32 import write_script
        from launcher.engine.state import save_state

        directory = self._common(_directory(save_dir))
        save_state(
            self._engine(),
            directory,
            f"global_step{self.global_steps}" if tag is None else str(tag),
            client_state or {},
            exclude_frozen=exclude_frozen_parameters,
            latest=save_latest,
        )
        if self.fp32_script and self._engine().local_rank == 0:
            write_script(directory)
        return True

    def _common(self, directory: Path) -> Path:
        """Return the directory of rank 0, unless each node has its own. Collective."""
        if self._engine().use_node_local_storage():
            return directory
        named = gather_plain(str(directory))
        if len(set(named)) > 1 and self._engine().global_rank == 0:
            other = next(rank for rank, name in enumerate(named) if name != named[0])
            logger.warning(
                "save_checkpoint(): rank 0 passed %s, but rank %d passed %s. A checkpoint is one "
                "directory: using the one of rank 0",
                named[0], other, named[other],
            )  # fmt: skip
        return Path(named[0])

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
        *,
        exclude_frozen_parameters: bool = False,
        allow_model_changes: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint from `save_checkpoint`, on any topology. Every rank must call it.

        Args:
            load_dir, tag: the checkpoint to load; without a tag, the latest.
            load_module_strict: the checkpoint must have exactly the parameters of this model. False loads
                those with matching names.
            load_optimizer_states, load_lr_scheduler_states: False keeps the current states.
            load_module_only: load only the weights.
            custom_load_fn: not supported, because weights are sharded while they are loaded.
            exclude_frozen_parameters: frozen parameters keep their values, and may be missing in the checkpoint.
            allow_model_changes: load the checkpoint even if the model's config changes the computation: head
                counts, rope, norms. By default that is an error, for Hugging Face models and with
                load_module_strict.

        Returns:
            (path of the checkpoint, client state); (None, {}) when the directory has no `latest`.

        Raises:
            CheckpointError: on every rank: the checkpoint does not fit this engine, or is corrupted.
        """
        from launcher.engine.state import load_state

        if custom_load_fn is not None:
            raise ArgumentsError(
                "custom_load_fn is not called: no rank has the whole model while a checkpoint is loaded",
                where="load_checkpoint()",
                fix="pass load_module_strict=False to load the parameters with matching names, or "
                "change values inside deepspeed.zero.GatheredParameters after it",
            )
        if (versions := self._engine().versions) is not None:
            versions.forget()  # older weights are not in a checkpoint
        return load_state(
            self._engine(),
            Path(load_dir),
            None if tag is None else str(tag),
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            frozen=not exclude_frozen_parameters,
            allow_model_changes=allow_model_changes,
        )

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = SINGLE_FILE,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights in the model's dtype, at every stage. Every rank must call it.

        By default this writes HF safetensors with one unit in memory at a time. Experts are written one by
        one under their names on the Hub, for other programs. DeepSpeed's default name is pytorch_model.bin,
        and at stage 3 it requires a key of the config.

        Args:
            save_dir: the directory for from_pretrained.
            save_filename: model.safetensors, which is split into numbered files for large models. A name
                without this suffix, such as pytorch_model.bin, selects torch.save with the model's own names;
                rank 0 then holds the whole model in memory.
            exclude_frozen_parameters: write only trained parameters.
        """
        from launcher.engine.whole import export_model, export_pickle

        engine, directory = self._engine(), Path(save_dir)
        if save_filename == SINGLE_FILE:
            export_model(engine, directory, exclude_frozen_parameters)
        elif save_filename.endswith(".safetensors"):
            raise ConfigError(
                f"save_filename {save_filename!r}: safetensors files have a fixed name, and large "
                "models are split into several files",
                where="save_16bit_model()",
                fix=f"omit it; from_pretrained reads {SINGLE_FILE}",
            )
        else:
            export_pickle(engine, directory / save_filename, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor] | None:
        """Return the full module.state_dict() on rank 0's CPU, None elsewhere. Every rank must call it."""
        from launcher.engine.whole import whole_state_dict

        return whole_state_dict(self._engine(), exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict


def _directory(given: str | Path | None) -> Path:
    if not given or not str(given):
        raise ConfigError(
            f"save_dir is {given!r}",
            where="save_checkpoint()",
            fix="pass a directory that all ranks can access",
        )
    return Path(given)
