"""The check that ranks that are one copy of the model get the same inputs: those along cp and tp.

Looked at in two ways, neither of which costs time:

- the first forwards of training, and all of evaluation, are compared before any layer sees the inputs, by a collective
  of two numbers each. That finds a sampler over all ranks, also where shapes differ, which the layers' own collectives
  would not survive;
- every step after that is compared by one number more in the collective of the gradients' norm, before weights change.
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
FIRST = 3  # forwards of training that are compared at once
_BITS = 31  # of a digest: sums of it over all ranks are exact in fp64
_MASK = (1 << _BITS) - 1
_ODD = 2_654_435_761
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CutBy(Enum):
    """The place where sequences are cut for the ranks of cp."""

    HOOKS = "hooks"  # of the model: every rank of cp is called with the same whole batch
    LOADER = "loader"  # each rank gets its slice of a batch: DeepSpeed's UlyssesSPDataLoaderAdapter
    SCRIPT = "script"  # and the model exchanges tokens by itself: DeepSpeed's DistributedAttention

    def same_inputs(self, mesh: Mesh) -> Axis:
        """Return the ranks that get the same inputs. Every rank must call it."""
        return mesh.joined("cp", "tp") if self is CutBy.HOOKS else mesh.axes["tp"]


class SameInputs:
    """Compares the inputs of an engine along cp and tp.

    Args:
        axis: both as one.
        device: of this rank.
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
        """Look at the inputs of every forward of the whole model, whoever calls it."""

        def before_forward(called: nn.Module, args: Any, keywords: Any) -> None:
            self.look((args, keywords), training=called.training and torch.is_grad_enabled())

        return module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True)

    def look(self, inputs: Any, *, training: bool) -> None:
        """Look at the inputs. Every rank of the axis calls it before the forward of `inputs`, as often as the others.

        Raises:
            LauncherError: on every rank of the axis: they differ, and this is one of the first forwards, or evaluates.
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
        """Return fp64 [1], [0] without tp: adds up to 0 over all ranks if every tp group had the same inputs in this
        step."""
        if not self.active:
            return torch.zeros(0, dtype=torch.float64, device=self.device)
        factor = self.axis.degree - 1 if self.axis.rank == 0 else -1
        return (self._step.double() * factor).reshape(1)

    def judge(self, total: Tensor, step: int) -> None:
        """Begin another step.

        Args:
            total: the sum of `share` over all ranks.
            step: the number of this one, for people.

        Raises:
            LauncherError: on every rank: in some group they differed.
        """
        if not self.active:
            return
        mine, self._step = self._step, torch.zeros_like(self._step)
        if float(total) != 0:
            self._compare(mine, f"step {step}")
            raise _different("other ranks of this run that are one copy of the model", f"step {step}")

    def _compare(self, mine: Tensor, where: str) -> None:
        every = mine.new_zeros(self.axis.degree)
        every[self.axis.rank] = mine
        all_gather(every, self.axis, TAG).wait()
        digests, ranks = every.tolist(), dist.get_process_group_ranks(self.axis.group)
        others = [str(rank) for rank, found in zip(ranks, digests, strict=True) if found != digests[0]]
        if others:
            few = ", ".join(others[:8]) + (", ..." if len(others) > 8 else "")
            raise _different(f"{self.axis.members} are one {self._kind} group: {few} and {ranks[0]}", where)


def digest(inputs: Any, device: torch.device, *, embeddings: bool = False) -> Tensor:
    """Return int64 [], of 31 bits: of the shapes and dtypes of all tensors in a nest, and of the values of those of
    whole numbers; of all where there are none such, for what ranks compute themselves may be rounded in other ways.

    Args:
        embeddings: those of `inputs_embeds`, too: ranks that share a sequence would mix two.
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
        f"{who} got different inputs, though they compute parts of one model",
        where=where,
        fix="all ranks that share the layers or the sequences of one model need the same batches, and a sampler over "
        "all ranks, the default of DistributedSampler, gives each its own: write "
        "DistributedSampler(data, num_replicas=engine.mesh.dp.degree, "
        "rank=engine.mesh.dp.rank), or pass initialize(training_data=...). Data that is random (augmentation, noise) "
        "needs a seed that these ranks share",
    )
