"""Checkpoints that DeepSpeed wrote, read as if they were launcher's: on any topology, without DeepSpeed.

A file of DeepSpeed's holds flat parts of parameters. Here each part becomes boxes of a logical tensor, which
torch.distributed.checkpoint cuts anew for the ranks that load. Nothing is converted, and no code of the files runs.
"""
