"""First values of flat buffers: each rank takes what it keeps, and modules get their parameters back."""

from __future__ import annotations

from launcher.comm import broadcast
from launcher.zero.flat import FlatBuffer
from launcher.zero.slot import ParamReader


def fill(flat: FlatBuffer, read: ParamReader, *, from_rank_zero: bool) -> None:
    """Take the parameters' values, in whatever dtype `read` has them, and show the parameters to the module.

    Args:
        read: gives the values; only what this rank keeps is asked for.
        from_rank_zero: broadcast rank 0's values, for models that each rank built on its own.
    """
    if from_rank_zero and flat.axes.dp.degree > 1:
        read = _broadcast_first(flat, read)
    keep, params = flat.new_params()
    flat.copy_in(read, keep, params)
    if flat.own_master:
        flat.copy_in(read, flat.owned, flat.new_master())
    if flat.packed is not None:
        flat.packed.pack()
    flat.rest(changed=True)
    for slot in flat.slots:
        flat.make_leaf(slot)
    if flat.full is not None:
        flat.attach()
    else:
        flat.detach()


def _broadcast_first(flat: FlatBuffer, read: ParamReader) -> ParamReader:
    values = {
        slot.name: read(slot.name, 0, slot.numel).to(flat.pool.device, copy=True) for slot in flat.slots
    }
    for value in values.values():
        broadcast(value, flat.axes.dp, f"{flat.name}/init").wait()
    return lambda name, start, stop: values[name][start:stop]
