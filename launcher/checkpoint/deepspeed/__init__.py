"""Reads DeepSpeed checkpoints as if they were launcher's: on any topology, without DeepSpeed.

DeepSpeed's files contain flat shards of parameters. Each shard is mapped to boxes of a logical tensor, which
torch.distributed.checkpoint reshards for the ranks that load. Nothing is converted, and no code is run.
"""
