"""The check that the ranks of one model replica, along cp and tp, get the same inputs.

There are two checks, both with negligible cost:

- the first forwards of training, and all forwards of evaluation, are compared before the first layer runs, by
  a collective of one number per rank. This detects a sampler over all ranks, even if shapes differ, which
  would break the collectives in the layers;
- every later step is compared by one additional number in the all-reduce of the gradient norm, before weights
  change.
"""

from __future__ import annotations

import zlib
from collections import Counter
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves_with_path
from torch.utils.hooks import RemovableHandle

from launcher.comm import Axis, Mesh, all_gather
from launcher.errors import LauncherError

TAG = "root/inputs"
EMBEDDINGS = "inputs_embeds"
FIRST = 3  # training forwards that are compared immediately
_BITS = 31  # bits of a digest, so that sums over all ranks are exact in fp64
_MASK = (1 << _BITS) - 1
_ODD = 2_654_435_761
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CutBy(Enum):
    """The component that splits sequences for the ranks of cp."""

    HOOKS = "hooks"  # hooks of the model: every rank of cp is called with the same full batch
    LOADER = "loader"  # the loader gives each rank its slice: DeepSpeed's UlyssesSPDataLoaderAdapter
    SCRIPT = "script"  # the script; the model exchanges tokens itself: DeepSpeed's DistributedAttention

    def same_inputs(self, mesh: Mesh) -> Axis:
        """Return the axis of the ranks that get the same inputs. Every rank must call it."""
        return mesh.joined("cp", "tp") if self is CutBy.HOOKS else mesh.axes["tp"]


class SameInputs:
    """Compares the inputs of an engine along cp and tp.

    Args:
        axis: cp and tp joined.
        device: the device of this rank.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self.active = axis.group is not None
        self._looked: Counter[bool] = Counter()
        self._step = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def _kind(self) -> str:
        names = {"tp": "tensor-parallel", "cp": "context-parallel"}
        return names.get(self.axis.name, "model-parallel")

    def follow(self, module: nn.Module) -> RemovableHandle:
        """Check the inputs of every forward of the model, with a hook."""

        def before_forward(called: nn.Module, args: Any, keywords: Any) -> None:
            self.look((args, keywords), training=called.training and torch.is_grad_enabled())

        return module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True)

    def look(self, inputs: Any, *, training: bool) -> None:
        """Check the inputs of a forward. Every rank of the axis must call it before each forward.

        Raises:
            LauncherError: on every rank of the axis: the inputs differ, in one of the first forwards or in
                evaluation.
        """
        if not self.active:
            return
        mine = digest(inputs, self.device, embeddings=self.axis.name != "tp")
        if training:
            self._step = (self._step * 31 + mine) & _MASK
        self._looked[training] += 1
        if not training or self._looked[training] <= FIRST:
            kind = "forward" if training else "evaluation"
            self._compare(mine, f"{kind} number {self._looked[training]}")

    def share(self) -> Tensor:
        """Return this rank's term, fp64 [1], or [0] if not active. The terms sum to 0 over all ranks if every
        group had the same inputs in this step."""
        if not self.active:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        factor = self.axis.degree - 1 if self.axis.rank == 0 else -1
        return (self._step.double() * factor).reshape(1)

    def judge(self, total: Tensor, step: int) -> None:
        """Raise if inputs differed in this step, and reset for the next one.

        Args:
            total: the sum of `share` over all ranks.
            step: the number of this step, for the message.

        Raises:
            LauncherError: on every rank: the inputs differed in some group.
        """
        if not self.active:
            return
        mine, self._step = self._step, torch.zeros_like(self._step)
        if float(total) != 0:
            self._compare(mine, f"step {step}")
            raise _different("some ranks that belong to the same model replica", f"step {step}")

    def _compare(self, mine: Tensor, where: str) -> None:
        every = mine.new_zeros(self.axis.degree)
        every[self.axis.rank] = mine
        all_gather(every, self.axis, TAG).wait()
        digests, ranks = every.tolist(), dist.get_process_group_ranks(self.axis.group)
        others = [str(rank) for rank, found in zip(ranks, digests, strict=True) if found != digests[0]]
        if others:
            few = ", ".join(others[:8]) + (", ..." if len(others) > 8 else "")
            raise _different(
                f"{self.axis.members} form one {self._kind} group: ranks {few} and {ranks[0]}", where
            )


def digest(inputs: Any, device: torch.device, *, embeddings: bool = False) -> Tensor:
    """Return a 31-bit digest, int64 [], of the shapes and dtypes of all tensors in a nested structure, and of
    their values.

    Only the values of integer tensors count, because ranks may round floating-point values differently. If
    there are no integer tensors, all values count.

    Args:
        embeddings: include the values of `inputs_embeds`: ranks that share a sequence would mix two
            sequences.
    """
    named = [(path, leaf) for path, leaf in tree_leaves_with_path(inputs) if isinstance(leaf, Tensor)]
    leaves = [leaf.detach() for _, leaf in named]
    looks = zlib.crc32(repr([(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves]).encode())
    found = torch.full((), looks & _MASK, dtype=torch.int64, device=device)
    exact = [
        leaf.detach()
        for path, leaf in named
        if not (leaf.is_floating_point() or leaf.is_complex())
        or (embeddings and getattr(path[-1], "key", None) == EMBEDDINGS)
    ]
    for leaf in exact or leaves:
        real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        values = real.to(device).contiguous().view(-1).view(_WHOLE[real.element_size()]).long()
        places = torch.arange(1, values.numel() + 1, device=device) * _ODD
        found = (found * 31 + ((values + 1) * (places ^ (places >> 15))).sum()) & _MASK
    return found


def _different(who: str, where: str) -> LauncherError:
    return LauncherError(
        f"{who} received different inputs, but must receive the same",
        where=where,
        fix="pass the same batches to all ranks of a model-parallel group (tp, cp and pp). "
        "DistributedSampler splits the data over all ranks by default: use "
        "DistributedSampler(data, num_replicas=engine.mesh.dp.degree, rank=engine.mesh.dp.rank), "
        "or pass initialize(training_data=...). Random data (augmentation, noise) needs the same "
        "seed on these ranks",
    )
