"""`zero.Init` and `zero.GatheredParameters`: DeepSpeed's two context managers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from launcher.zero.features.partitioned import is_partitioned, partitioned_of
from launcher.zero.model import ZeroModel, live_models


class Init:
    """Build a model without its memory: `with zero.Init(): model = Model(...)`.

    Modules are built on meta; `launcher.initialize` then makes their values unit by unit, straight into shards, so no
    rank ever holds the whole model. Values depend on the seed and the names of modules only. They come from Hugging
    Face's `_init_weights` or from `reset_parameters()`; a module with neither is an error that names it.

    Args:
        module: an existing module; it is left as it is, for initialize() shards any model.
        enabled: false makes this do nothing.
        dtype: default dtype inside; the JSON decides the dtype of training.
        config_dict_or_path, config, others: accepted for DeepSpeed's callers; the JSON is read by initialize().
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        self.module, self.enabled, self.dtype = module, enabled, dtype
        self._stack = ExitStack()

    def __enter__(self) -> Init:
        if self.enabled:
            self._stack.enter_context(torch.device("meta"))
            if self.dtype is not None:
                self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


@contextmanager
def GatheredParameters(
    params: Tensor | Iterable[Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gather whole parameters inside the `with`, at every stage. A collective: every rank must enter it. Forwards
    inside use them as they are, and free none.

    Where layers are split over tensor-parallel ranks, each rank sees its own part whole, and `modifier_rank` is a
    data-parallel rank. Where the model is cut into stages, each stage enters it for parameters of its own.

    Args:
        params: a parameter, or any iterable of them; the units they lie in are gathered.
        modifier_rank: keep the edits of this rank and send them to all. None: edits to sharded parameters are lost.
        fwd_module: not needed.
        enabled: false makes this do nothing.

    Raises:
        ElsewhereError: one is on another pipeline stage.
    """
    with ExitStack() as stack:
        if enabled:
            wanted = [params] if isinstance(params, Tensor) else list(params)
            for partitioned in dict.fromkeys(partitioned_of(p) for p in wanted if is_partitioned(p)):
                stack.enter_context(partitioned.gathered(modifier_rank))
            for model, own in _by_model(wanted):
                stack.enter_context(model.gathered(own, modifier_rank))
        yield


def _by_model(parameters: list[Tensor]) -> Iterator[tuple[ZeroModel, list[Tensor]]]:
    for model in live_models():
        own = [p for p in parameters if model.slot_of(p) is not None]
        if own:
            yield model, own
