"""train_batch() and eval_batch(), and the source of their microbatches, as in DeepSpeed's pipeline engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from launcher.comm import all_reduce
from launcher.engine import executor
from launcher.engine.batches import forever, without_labels
from launcher.engine.core import EngineCore
from launcher.errors import ConfigError
from launcher.pipeline.executor.batches import LazySequence


class WholeBatches(EngineCore):
    """An engine that runs full batches, with or without stages. Only ranks of the first stage read data."""

    training_dataloader: Any
    _data: Iterator[Any] | None = None
    _batch_fn: Callable[[Any], Any] | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run gradient_accumulation_steps microbatches and one step.

        Returns:
            The mean loss over microbatches and dp, fp32 []; with loss_normalization "tokens", the mean over
            all tokens.
        """
        self.train()
        number = self.gradient_accumulation_steps()
        batches = self._pulled(data_iter, number)
        with self.telemetry.batch(self) as told:
            loss = self.train_microbatches(batches, self._weights(batches, number))
            self.step()
            told.append(self._mean_over_dp(loss.float()))
        return told[0]

    @torch.no_grad()
    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Compute the mean loss over gradient_accumulation_steps microbatches and dp, without gradients. The
        loss is written to the monitors.

        Args:
            data_iter: read only on ranks of the first stage.
            return_logits: return (loss, outputs of the last microbatch); the outputs are None except on the
                last stage.
            compute_loss: False returns the outputs instead of losses, and ignores labels.
            reduce_output: "avg", or None for a list with one value per microbatch.
            bcast_loss: False returns None on all stages but the last.
            num_micro_batches: overrides the number of microbatches.
        """
        training = self.training
        self.eval()
        number = num_micro_batches or self.gradient_accumulation_steps()
        outputs: list[Any] | None = [] if return_logits or not compute_loss else None
        batches = self._pulled(data_iter, number)
        if not compute_loss:
            batches = [without_labels(batch) for batch in batches]
        try:
            weights: Sequence[float] = self._weights(batches, number) if compute_loss else ()
            found, weights = executor.evaluate(self, batches, weights, outputs, with_loss=compute_loss)
        finally:
            self.train(training)
        losses = list(found.float())
        if compute_loss and reduce_output == "avg" and self.counts_tokens:
            losses = [executor.weighted(found, weights).float()]
        if compute_loss and self.telemetry.monitor.enabled:  # the condition is the same on all ranks
            self.telemetry.evaluated(self, float(self._reduced(losses, "avg")))
        told = self.is_last_stage() or (compute_loss and bcast_loss)
        value = self._reduced(losses if compute_loss else outputs or [], reduce_output) if told else None
        return (value, outputs[-1] if outputs else None) if return_logits else value

    @property
    def counts_tokens(self) -> bool:
        return self._config.loss_normalization == "tokens"

    def _weights(self, batches: Sequence[Any], number: int) -> list[float]:
        """Return the weights of a step's microbatches. To count tokens, all microbatches are read first."""
        if not self.counts_tokens:
            return [1 / number] * number
        from launcher.engine.token_weights import learned_tokens, token_weights

        cut = (
            [self.curriculum.cut(batch, self.global_steps) for batch in batches] if self.training else batches
        )
        return token_weights(self, [learned_tokens(batch) for batch in cut])

    def _reduced(self, values: Sequence[Any], how: str | None) -> Any:
        """Return the mean of the values over microbatches and dp, or the list of all values."""
        if how is None:
            return list(values)
        if how != "avg":
            raise ConfigError(
                f"reduce_output is {how!r}", where="engine.eval_batch()", fix='use "avg", or None for a list'
            )
        return self._mean_over_dp(torch.stack(list(values)).float().mean(0)) if values else None

    def _mean_over_dp(self, value: Tensor) -> Tensor:
        """Average a tensor over the data-parallel ranks. Collective."""
        all_reduce(value, self.mesh.dp, "root/loss").wait()
        return value / self.mesh.dp.degree

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Set the iterator that train_batch() reads if it is called without one."""
        self._data = iterator

    def set_dataloader(self, loader: Any) -> None:
        """Set the dataloader that train_batch() reads, epoch after epoch."""
        self.training_dataloader, self._data = loader, None

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Set a function that converts what is read into a batch: (inputs, labels) for a PipelineModule."""
        self._batch_fn = fn

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes may differ from microbatch to microbatch."""

    def is_first_stage(self) -> bool:
        """Return whether this rank is on the first stage, which has the embeddings and reads data."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank is on the last stage, which has the head and computes the loss."""
        return self.runtime.staged.rank_of[-1] == self.stage_id

    @property
    def stage_id(self) -> int:
        """Return the index of this rank's stage."""
        return self.mesh.axes["pp"].rank

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages."""
        return self.mesh.axes["pp"].degree

    def _read(self, data: Iterator[Any] | None) -> Any:
        """Return the next microbatch of `data`, or of the engine's own data."""
        batch = next(data if data is not None else self._own_data())
        batch = batch if self._batch_fn is None else self._batch_fn(batch)
        # Hugging Face collators return mappings that are not dicts
        return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch

    def _pulled(self, data: Iterator[Any] | None, number: int) -> Sequence[Any]:
        """Return the next microbatches as a lazy sequence, empty on ranks that read no data."""
        return LazySequence(number if self.is_first_stage() else 0, lambda _: self._read(data))

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
