"""Starting, watching and ending the ranks of a run.

This version starts the ranks of one machine (`local.py`). The place is kept for several: the hostfile
with its include and exclude filters, the runners (ssh, pdsh, slurm, mpi), the front end that owns a run,
and the agent of each node, which will call `local.py` as the command line does now.

Nothing here imports torch before a run is really started.
"""
