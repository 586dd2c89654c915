"""Where train_batch() and eval_batch() get their microbatches; DeepSpeed's names for a model in stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from launcher.comm import Mesh
from launcher.config import Config
from launcher.engine.batches import forever
from launcher.errors import ConfigError
from launcher.pipeline.executor.runtime import Runtime


class DataMixin:
    """The data of an engine, and its place in the pipeline. Only ranks of the first stage read."""

    mesh: Mesh
    runtime: Runtime | None
    training_dataloader: Any
    _config: Config
    _data: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """What train_batch() reads when it gets no iterator of its own."""
        self._data = iterator

    def set_dataloader(self, loader: Any) -> None:
        """The same of a loader, which is read again and again."""
        self.training_dataloader, self._data = loader, None

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Turns what is read into a batch: (inputs, labels) for a row of layers."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Nothing to do: shapes may differ from microbatch to microbatch."""

    def is_first_stage(self) -> bool:
        """Whether this rank has the embeddings, and reads data."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank has the head, and computes the loss."""
        return self.runtime is None or self.runtime.staged.rank_of[-1] == self.stage_id

    @property
    def stage_id(self) -> int:
        """This rank's stage."""
        return self.mesh.axes["pp"].rank

    @property
    def num_stages(self) -> int:
        """Stages that the model is cut into."""
        return self.mesh.axes["pp"].degree

    def _read(self, data: Iterator[Any] | None) -> Any:
        """The next microbatch of `data`, or of what the engine has."""
        batch = next(data if data is not None else self._own_data())
        return batch if self._batch_fn is None else self._batch_fn(batch)

    def _pulled(self, data: Iterator[Any] | None, number: int) -> list[Any]:
        """The next microbatches; nothing on ranks that read no data."""
        return [self._read(data) for _ in range(number)] if self.is_first_stage() else []

    def _own_data(self) -> Iterator[Any]:
        if self._data is not None:
            return self._data
        if self.training_dataloader is None:
            raise ConfigError(
                "train_batch() has no data", fix="pass an iterator, or initialize(training_data=...)"
            )
        sampling = self._config.data_efficiency.sampling
        self._data = forever(self.training_dataloader, sampling.num_epochs if sampling else None)
        return self._data
