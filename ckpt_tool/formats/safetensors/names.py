"""File names of safetensors checkpoints, and what each says about its place among its siblings."""

from __future__ import annotations

import re

from ckpt_tool.storage.store import Listing

__all__ = [
    "ADAPTER",
    "INDEX_SUFFIX",
    "RANK_FILE",
    "SHARD_FILE",
    "SUFFIX",
    "index_paths",
    "plain_paths",
    "rank_file",
]

SUFFIX = ".safetensors"
ADAPTER = "adapter_model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

# torch/distributed/checkpoint/_hf_utils.py, SHARDED_FILE_NAME (torch 2.13).
SHARD_FILE = re.compile(r"(?:.*/)?shard-(?P<shard>\d{5,})-model-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")
RANK_FILE = re.compile(r"rank_(?P<rank>\d{5,})\.safetensors")


def rank_file(rank: int) -> str:
    """Name of one rank's file.

    >>> rank_file(3)
    'rank_00003.safetensors'
    """
    return f"rank_{rank:05d}{SUFFIX}"


def plain_paths(listing: Listing) -> tuple[str, ...]:
    """Files at the top that hold whole tensors: neither torch's shards nor rank files; only the one that was named.

    An adapter beside other files is a checkpoint of its own (PEFT 0.21, ``save_pretrained``).
    """
    paths = listing.match("*" + SUFFIX)
    plain = tuple(p for p in paths if not SHARD_FILE.fullmatch(p) and not RANK_FILE.fullmatch(p))
    return tuple(p for p in plain if p != ADAPTER) or plain


def index_paths(listing: Listing) -> tuple[str, ...]:
    """Index files at the top; only the one that was named."""
    from ckpt_tool.formats._split_names import index_names  # for readers alone: names are asked for by writers too

    return index_names(listing.paths, "safetensors")
