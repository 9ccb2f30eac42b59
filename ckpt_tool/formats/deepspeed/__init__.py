"""Checkpoints of DeepSpeed: ZeRO partitions, pipeline layers, experts, tensor-parallel shards, and universal ones."""
