"""Which file a folder lacks without which no reader knows it: the one that names what the others hold.

It is not there, by the names of the others, or it is no such file, by its first and last bytes. Only to be asked once
no reader knows the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from ckpt_tool.formats._split_names import index_beside, missing_names, split_name
from ckpt_tool.formats.base import Source
from ckpt_tool.numerals import numeral
from ckpt_tool.storage.store import Listing

__all__ = ["empty_metadata", "lacking_files", "unreadable_files"]

_MAX_JSON_NBYTES = 16 << 20
_WITHOUT_INDEX = ".gguf"
# A file that must be there, a pattern of others beside or below its folder (group 1), and one that stands for it.
_NEEDED = (
    (".metadata", re.compile(r"(|.*/)__\d+_\d+\.distcp"), re.compile(r"(|.*/)__\d+\.metadata")),
    ("metadata.json", re.compile(r"((?:.*/)?iter_\d+/)(?:common\.pt|[^/]+\.distcp|[^/]+/\.zarray)"), None),
    ("metadata.pkl", re.compile(rf"(|.*/)[A-Za-z0-9-]+_{numeral()}\.safetensors"), None),
    ("ckpt_layout.json", re.compile(r"(|.*/)rank_\d{5,}\.safetensors"), None),
    ("metadata.pkl", re.compile(r"(|.*/)metadata\.pkl"), None),
    ("_CHECKPOINT_METADATA", re.compile(r"(|.*/)[^/]+/_METADATA"), re.compile(r"(|.*/)[^/]+/_CHECKPOINT_METADATA")),
    (".snapshot_metadata", re.compile(r"()(?:replicated|sharded)/.+"), None),
    ("checkpoint_metadata.json", re.compile(r"(|\d+/)model/.+/model_[^/]+\.safetensors"), None),
    ("manifest.ocdbt", re.compile(r"(|(?:.*/)?)ocdbt\.process_\d+/manifest\.ocdbt"), None),
    ("adapter_model.safetensors", re.compile(r"(|.*/)adapter_config\.json"), re.compile(r"(|.*/)adapter_model\..*")),
)
_METADATA = re.compile(
    rf"(?:.*/)?(?:\.metadata|__{numeral()}\.metadata|\.snapshot_metadata|_CHECKPOINT_METADATA|_METADATA|manifest\.ocdbt"
    r"|metadata\.(?:json|pkl)|checkpoint_metadata\.json|ckpt_layout\.json|.+\.index\.json)"
)
_MAY_BE_EMPTY = (".distcp", ".lock")
"""What a rank that has nothing to write leaves, and what marks a folder."""


def lacking_files(paths: Iterable[str]) -> list[str]:
    """Files that are missing, by the names of those that are here.

    >>> lacking_files(["m/__0_0.distcp", "m/__1_0.distcp", "o/.metadata", "o/__0_0.distcp"])
    ['m/.metadata']
    >>> lacking_files(["__0_0.distcp", "__0.metadata"]), lacking_files(["model-00001-of-00002.bin"])
    ([], ['model-00002-of-00002.bin', 'model.bin.index.json'])
    """
    here = sorted(paths)
    found = dict.fromkeys(path for path in _needed(here) if path not in here)
    numbered = [path for path in here if "/" not in path and split_name(path) is not None]
    for path in missing_names(numbered):
        found[path] = None
    if numbered and index_beside(numbered) not in here and not numbered[0].endswith(_WITHOUT_INDEX):
        found[index_beside(numbered)] = None
    return list(found)


def unreadable_files(source: Source) -> list[str]:
    """Such files that are there and hold no JSON, or no whole pickle, whichever they should, and all empty ones.

    A request or two each.
    """
    here = sorted(source.listing.sizes)
    needed = [path for path in _needed(here) if path in source.listing and not _is_whole(source, path)]
    empty = [path for path in here if not source.listing.nbytes(path) and not path.endswith(_MAY_BE_EMPTY)]
    return list(dict.fromkeys((*needed, *empty)))


def empty_metadata(listing: Listing) -> list[str]:
    """Files without a byte that should say what all others hold.

    >>> empty_metadata(Listing("", {"model/.metadata": 0, "model/__0_0.distcp": 0}))
    ['model/.metadata']
    """
    return [path for path in listing.paths if not listing.nbytes(path) and _METADATA.fullmatch(path)]


def _needed(here: Sequence[str]) -> Iterator[str]:
    """Files that those which are here call for, whether or not they are here too."""
    for name, pattern, instead in _NEEDED:
        folders = dict.fromkeys(match[1] for path in here if (match := pattern.fullmatch(path)) is not None)
        for folder in folders:
            stands = instead is not None and any(
                (match := instead.fullmatch(path)) is not None and match[1] == folder for path in here
            )
            if not stands:
                yield f"{folder}{name}"


def _is_whole(source: Source, path: str) -> bool:
    nbytes = source.listing.nbytes(path)
    if path.endswith((".metadata", ".pkl")):  # protocol 2 and later: PROTO to STOP
        read = source.store.read
        return nbytes > 2 and (read(path, 0, 1), read(path, nbytes - 1, 1)) == (b"\x80", b".")
    if path.endswith(".json") and nbytes <= _MAX_JSON_NBYTES:
        try:
            json.loads(source.store.read(path, 0, nbytes))
        except (ValueError, RecursionError):
            return False
    return nbytes > 0
