"""`zero.Init` and `zero.GatheredParameters`, DeepSpeed's two context managers."""

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
    """Builds a model without allocating its memory: `with zero.Init(): model = Model(...)`.

    Modules are built on meta. `launcher.initialize` then initialises them unit by unit, straight into shards,
    so no rank ever holds the whole model. The values depend only on the seed and the module names. They come
    from Hugging Face's `_init_weights` or from `reset_parameters()`; a module with neither raises an error
    that names it.

    Args:
        module: an existing module, which is not changed, because initialize() shards any model.
        enabled: false makes this do nothing.
        dtype: the default dtype inside the `with`; the training dtype is set in the JSON config.
        config_dict_or_path, config, others: accepted for compatibility with DeepSpeed; initialize() reads the
            JSON config.
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
    """Gather full parameters inside the `with`, at every stage. A collective: every rank must enter it.
    Forwards inside the `with` use the gathered parameters and do not free them.

    If layers are split over tensor-parallel ranks, each rank gathers its own part, and `modifier_rank` is a
    data-parallel rank. If the model is split into pipeline stages, each stage enters it with its own
    parameters.

    Args:
        params: a parameter, or an iterable of parameters; their whole units are gathered.
        modifier_rank: the rank whose edits are kept and broadcast. None: edits of sharded parameters are
            lost.
        fwd_module: ignored.
        enabled: false makes this do nothing.

    Raises:
        ElsewhereError: a parameter belongs to another pipeline stage.
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
