"""CUDA ranks by torch.distributed's own collectives, which are NCCL's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm.pending import Pending
from launcher.comm.transport import Transport

# torch 2.13 renamed these two; older versions know only the second name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class NcclTransport(Transport):
    """The ranks of two process groups of the same ranks.

    Args:
        group: for gathers, and what goes forward.
        reductions: for the rest. NCCL needs all ranks to start the collectives of a group in one order, and under
            ZeRO-3 a gather on demand may come before a reduction here and after it there. A pipeline sends both ways
            at once.
    """

    def __init__(self, group: dist.ProcessGroup, reductions: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group, self.reductions = group, reductions

    def __str__(self) -> str:
        return ""  # a run says "nccl" already

    def all_gather(self, full: Tensor, within: slice) -> Pending:
        slices = self.slices(full, within)
        if slices[0].numel() * self.degree != full.numel():
            return self.all_gather_slices(slices)
        return Pending([_all_gather(full, slices[self.rank], group=self.group, async_op=True)])

    def all_gather_slices(self, slices: list[Tensor]) -> Pending:
        return Pending([dist.all_gather(slices, slices[self.rank], group=self.group, async_op=True)])

    def reduce_scatter(self, full: Tensor, out: Tensor, within: slice, *, accumulate: bool) -> Pending:
        direct = not accumulate and out.dtype == full.dtype
        result = out if direct else torch.empty(out.numel(), dtype=full.dtype, device=full.device)
        if self.degree * out.numel() == full.numel():
            work = _reduce_scatter(result, full, group=self.reductions, async_op=True)
        else:
            work = dist.reduce_scatter(
                result, self.slices(full, within), group=self.reductions, async_op=True
            )
        if direct:
            return Pending([work])
        return Pending([work], lambda: out.add_(result) if accumulate else out.copy_(result))

    def all_reduce(self, buffer: Tensor) -> Pending:
        return Pending([dist.all_reduce(buffer, group=self.reductions, async_op=True)])

    def broadcast(self, buffer: Tensor, source: int) -> Pending:
        return Pending([dist.broadcast(buffer, group=self.group, group_src=source, async_op=True)])

    def all_to_all(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Pending:
        mine = outgoing[self.rank].new_empty(0)  # NCCL would copy this rank's own entry
        out = [mine if rank == self.rank else part for rank, part in enumerate(outgoing)]
        into = [mine if rank == self.rank else part for rank, part in enumerate(incoming)]
        return Pending([dist.all_to_all(into, out, group=self.reductions, async_op=True)])

    def send(self, tensor: Tensor, to: int, *, back: bool) -> Pending:
        return Pending([self._way(back).send([tensor], to, 0)])

    def receive(self, tensor: Tensor, source: int, *, back: bool) -> Pending:
        return Pending([self._way(back).recv([tensor], source, 0)])

    def _way(self, back: bool) -> dist.ProcessGroup:
        return self.reductions if back else self.group
