"""Starting, watching and ending the ranks of a run, on one machine or many.

The front end (`frontend.py`) owns a run and talks to an agent (`agent.py`) on each node; the ranks of a node are
`local.py`'s. Nothing here imports torch.
"""
