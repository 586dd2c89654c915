"""The loss and logits of a causal LM with a split head, whose forward has this rank's logits only.

loss              computed on the split logits (`loss.py`), which the model passes to `model.loss_function`
outputs.logits    after a loss in training mode: a guard, as gathering would undo the memory savings
                  without labels, or in eval mode: gathered, the same on all ranks

A model that uses its logits in any other way needs a head whose output is gathered (`wants_gathered_head`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils import ModelOutput

from launcher.comm import Axis
from launcher.errors import ConfigError, LauncherError, SplitLogitsError
from launcher.tensor.functions import gather_along
from launcher.tensor.layers import SplitModule, VocabularyHead
from launcher.tensor.loss import causal_lm_loss
from launcher.tensor.split_model import wants_loss_only

_PER_VOCABULARY = ("z_loss_coefficient", "unpadded_vocab_size")
_METADATA_ONLY = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}
_GATHER = "set tensor_parallel.vocab_parallel_lm_head to false"


def wants_gathered_head(model: PreTrainedModel) -> str | None:
    """Return why the model's forward needs the gathered output of the head; None: it may stay split."""
    name = type(model).__name__
    if "forward" in vars(model):
        return f"the forward of this {name} was replaced"
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return f"{name}.forward does not call loss_function"
    if model.loss_function is not ForCausalLMLoss:
        return f"the loss of {name} is not ForCausalLMLoss"
    for key in _PER_VOCABULARY:
        if getattr(model.config, key, None):
            return f"{key} of its config makes {name}.forward use the full logits"
    if not model.config.return_dict:
        return f"the outputs of {name} are tuples: config.return_dict is false"
    return None


def forward_is_replaced(model: nn.Module) -> bool:
    """Return whether other code replaced the model's forward, on the object or on its class (TRL's and Liger's
    fused losses): it may multiply by the weight of the head itself."""
    if "forward" in vars(model):
        return True
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    code = getattr(inspect.unwrap(vars(owner)["forward"]), "__code__", None)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return code is not None and file is not None and code.co_filename != file


def split_head(model: PreTrainedModel, axis: Axis, sizes: Sequence[int]) -> None:
    """Make the model compute its loss on split logits, and gather or guard the logits in its outputs. Its
    head must be split already: the model's forward gets this rank's columns, which it may scale or cap.

    Args:
        axis: the axis over which the head is split.
        sizes: number of vocabulary ids of every rank, in rank order; some may be 0.

    Raises:
        LauncherError: the model needs a gathered head.
    """
    reason = wants_gathered_head(model)
    if reason is not None:
        raise LauncherError(
            f"vocabulary-parallel logits are not supported: {reason}", fix="gather the output of the head"
        )
    head = SplitHead(type(model).__name__, axis, sizes)
    model.loss_function = head.loss
    model.split_head = head  # type: ignore[assignment]
    model.__class__ = _with_split_head(type(model))


def keep_logits_split(model: nn.Module, axis: Axis, head: nn.Module | None, wanted: bool | None) -> None:
    """Compute the loss of a model on split logits, where possible.

    Args:
        head: the model's output head, split over the vocabulary or not.
        wanted: None: split where possible; True: raise if it is not possible; False: gather the logits.

    Raises:
        ConfigError: split logits are wanted and not possible.
    """
    if not isinstance(head, VocabularyHead):
        adapted = isinstance(head, SplitModule) and head.split.inner
        why: str | None = f"its head {'has adapters' if adapted else 'is not split over the vocabulary'}"
    elif not isinstance(model, PreTrainedModel):
        why = "it is not a transformers model"
    else:
        why = wants_gathered_head(model)
    if wanted and why is not None:
        raise ConfigError(
            f"the loss of {type(model).__name__} cannot be computed on split logits: {why}",
            where="tensor_parallel.vocab_parallel_lm_head",
            fix="remove the key to gather the logits",
        )
    if why is None and wanted is not False and isinstance(head, VocabularyHead):
        assert head.split.gathers is not None and isinstance(model, PreTrainedModel)
        sizes, head.split.gathers = head.split.gathers[0], None
        split_head(model, axis, sizes)


def gather_logits(logits: Tensor) -> Tensor:
    """Return the whole logits of `outputs.logits`, [..., vocabulary], with autograd. Every rank of the tp
    axis must call it. The gradient of the result must be the same on all ranks, as it is for a loss of the
    whole logits."""
    return logits.head.gather(logits.local) if isinstance(logits, SplitLogits) else logits


class SplitHead:
    """The split head of a model: computes its loss, and gathers or guards its logits.

    Args:
        model: class name of the model, for messages.
        axis, sizes: as in `split_head`.
    """

    def __init__(self, model: str, axis: Axis, sizes: Sequence[int]) -> None:
        self.model, self.axis, self.sizes = model, axis, list(sizes)
        self.start, self.width = sum(sizes[: axis.rank]), sizes[axis.rank]
        self.vocabulary = sum(sizes)
        self.loss_computed = False

    def loss(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss on split logits, as the model's `loss_function`."""
        self._check(logits, "to its loss")
        self.loss_computed = True
        kwargs |= {"axis": self.axis, "start": self.start, "vocabulary": self.vocabulary}
        return causal_lm_loss(logits, *args, **kwargs)

    def gather(self, local: Tensor) -> Tensor:
        """Gather [..., width] into [..., vocabulary]."""
        return gather_along(local, self.axis, -1, "head", self.sizes)

    def finish(self, outputs: object, training: bool) -> ModelOutput:
        """Return the outputs of the model's forward, with their logits gathered or replaced by the guard."""
        if not isinstance(outputs, ModelOutput) or "logits" not in outputs:
            raise LauncherError(
                f"the head of {self.model} is split, but its forward returned {type(outputs).__name__} "
                "without logits",
                fix=_GATHER,
            )
        if outputs.get("loss") is not None and not self.loss_computed:
            raise LauncherError(
                f"{self.model} computed its own loss, on the logits of only {self.width} of "
                f"{self.vocabulary} vocabulary ids",
                where=f"{self.model}.forward",
                fix=f"{_GATHER}, or call self.loss_function in forward",
            )
        local: Tensor = outputs["logits"]
        self._check(local, "into its outputs")
        guarded = self.loss_computed and (training or wants_loss_only.get())
        outputs["logits"] = SplitLogits(self, local) if guarded else self.gather(local)
        return outputs

    def _check(self, logits: Tensor, where: str) -> None:
        if logits.shape[-1] != self.width:
            raise LauncherError(
                f"the head of {self.model} computes {self.width} columns, but its forward passed "
                f"{logits.shape[-1]} {where}",
                where=f"{self.model}.forward",
                fix=_GATHER,
            )


_classes: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def _with_split_head(own: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass whose forward ends in `SplitHead.finish`: not a hook, because some callers call
    forward directly. It has the name of `own`, because the class name is written into config.json."""
    original: Callable[..., Any] = own.forward

    @wraps(original)  # transformers inspects the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        head: SplitHead = self.split_head
        head.loss_computed = False
        as_tuple = kwargs.get("return_dict") is False
        if as_tuple:
            kwargs["return_dict"] = True
        outputs = head.finish(original(self, *args, **kwargs), self.training)
        return outputs.to_tuple() if as_tuple else outputs

    if own not in _classes:
        names = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
        _classes[own] = type(own.__name__, (own,), names)
    return _classes[own]


class SplitLogits(torch.Tensor):
    """Placeholder for `outputs.logits` after a loss on split logits. It has the shape and dtype of the whole
    logits; reading its values raises an error.

    Args:
        head: the split head of the model.
        local: this rank's columns.
    """

    head: SplitHead
    local: Tensor

    @staticmethod
    def __new__(cls, head: SplitHead, local: Tensor) -> SplitLogits:
        shape = (*local.shape[:-1], head.vocabulary)
        guard = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        guard.head, guard.local = head, local
        return guard

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA_ONLY:
            return cls(args[0].head, args[0].local)

        def refuse(value: Any) -> None:
            if isinstance(value, SplitLogits):
                value._refuse(str(func))

        tree_map(refuse, (args, kwargs))

    # torch does not dispatch these methods of tensor subclasses to __torch_dispatch__:

    def tolist(self) -> Any:
        self._refuse("tolist()")

    def numpy(self, **keywords: Any) -> Any:
        self._refuse("numpy()")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._refuse("a copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse("saving them")

    def _refuse(self, who: str) -> None:
        head = self.head
        raise SplitLogitsError(
            f"{who} needs the logits of {head.model} (shape {tuple(self.shape)}); in training they "
            f"stay split over the vocabulary: this rank has {head.width} of {head.vocabulary} columns",
            where="outputs.logits",
            fix="call the model without labels, or in eval mode; or call "
            "launcher.tensor.head.gather_logits(outputs.logits), on every rank",
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"SplitLogits({self.head.model}, shape={tuple(self.shape)}, dtype={self.dtype})"
