"""Process launch, monitoring and shutdown for the ranks of a run, on one machine or many.

The front end (`frontend.py`) owns a run and controls an agent (`agent.py`) on each node; the agent starts the
ranks of its node through `local.py`. Only `replica_group.py`, which runs in the ranks, imports torch.
"""
