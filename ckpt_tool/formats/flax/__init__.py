"""Flax: trees of arrays in MessagePack."""
