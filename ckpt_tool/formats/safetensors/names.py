"""File names of safetensors checkpoints, and what each says about its place among its siblings."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tool.storage.store import Listing

__all__ = [
    "INDEX_SUFFIX",
    "NUMBERED",
    "RANK_FILE",
    "SHARD_FILE",
    "SUFFIX",
    "index_paths",
    "missing_numbers",
    "plain_paths",
    "rank_file",
]

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

# torch/distributed/checkpoint/_hf_utils.py, SHARDED_FILE_NAME (torch 2.13).
SHARD_FILE = re.compile(r"(?:.*/)?shard-(?P<shard>\d{5,})-model-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")
RANK_FILE = re.compile(r"rank_(?P<rank>\d{5,})\.safetensors")
NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors")


def rank_file(rank: int) -> str:
    """Name of one rank's file.

    >>> rank_file(3)
    'rank_00003.safetensors'
    """
    return f"rank_{rank:05d}{SUFFIX}"


def plain_paths(listing: Listing) -> tuple[str, ...]:
    """Files at the top that hold whole tensors: neither torch's shards nor rank files; only the one that was named."""
    paths = listing.match("*" + SUFFIX)
    return tuple(p for p in paths if not SHARD_FILE.fullmatch(p) and not RANK_FILE.fullmatch(p))


def index_paths(listing: Listing) -> tuple[str, ...]:
    """Index files at the top; only the one that was named."""
    return listing.match("*" + INDEX_SUFFIX)


def missing_numbers(numbers: Iterable[int], count: int, limit: int = 100) -> list[int]:
    """The first ``limit`` of 1 to ``count`` that are not among ``numbers``.

    >>> missing_numbers([1, 3], 4)
    [2, 4]
    """
    present = set(numbers)
    missing: list[int] = []
    for number in range(1, min(count, len(present) + limit) + 1):
        if number not in present and len(missing) < limit:
            missing.append(number)
    return missing
