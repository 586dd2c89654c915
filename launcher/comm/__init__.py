"""Communication between ranks: the mesh, its axes, and the collectives that all packages use."""

from launcher.comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from launcher.comm.log import log_summary
from launcher.comm.mesh import Axis, Mesh
from launcher.comm.observe import Timing, observe_collectives
from launcher.comm.pending import Pending
from launcher.comm.record import CollectiveRecord, record_collectives
from launcher.comm.setup import init_distributed, pick_device

__all__ = [
    "Axis",
    "CollectiveRecord",
    "Mesh",
    "Pending",
    "Timing",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "init_distributed",
    "log_summary",
    "observe_collectives",
    "pick_device",
    "record_collectives",
    "reduce_scatter",
]
