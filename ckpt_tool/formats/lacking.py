"""Which file a folder lacks without which no reader knows it: the one that names what the others hold.

Told from the names of the others alone; only to be asked once no reader knows the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tool.formats._split_names import index_beside, missing_names, split_name

__all__ = ["lacking_files"]

# A file that must be there, a pattern of others beside or below its folder (group 1), and one that stands for it.
_NEEDED = (
    (".metadata", re.compile(r"(|.*/)__\d+_\d+\.distcp"), re.compile(r"(|.*/)__\d+\.metadata")),
    ("metadata.json", re.compile(r"((?:.*/)?iter_\d+/)(?:common\.pt|[^/]+\.distcp|[^/]+/\.zarray)"), None),
    (".snapshot_metadata", re.compile(r"()(?:replicated|sharded)/.+"), None),
    ("checkpoint_metadata.json", re.compile(r"(|\d+/)model/.+/model_[^/]+\.safetensors"), None),
    ("manifest.ocdbt", re.compile(r"(|(?:.*/)?)ocdbt\.process_\d+/manifest\.ocdbt"), None),
    ("adapter_model.safetensors", re.compile(r"(|.*/)adapter_config\.json"), re.compile(r"(|.*/)adapter_model\..*")),
)


def lacking_files(paths: Iterable[str]) -> list[str]:
    """Files that are missing, by the names of those that are here.

    >>> lacking_files(["m/__0_0.distcp", "m/__1_0.distcp", "o/.metadata", "o/__0_0.distcp"])
    ['m/.metadata']
    >>> lacking_files(["__0_0.distcp", "__0.metadata"]), lacking_files(["model-00001-of-00002.bin"])
    ([], ['model-00002-of-00002.bin', 'model.bin.index.json'])
    """
    here = sorted(paths)
    found: dict[str, None] = {}
    for name, pattern, instead in _NEEDED:
        folders = dict.fromkeys(match[1] for path in here if (match := pattern.fullmatch(path)) is not None)
        for folder in folders:
            stands = instead is not None and any(
                (match := instead.fullmatch(path)) is not None and match[1] == folder for path in here
            )
            if f"{folder}{name}" not in here and not stands:
                found[f"{folder}{name}"] = None
    numbered = [path for path in here if "/" not in path and split_name(path) is not None]
    for path in missing_names(numbered):
        found[path] = None
    if numbered and index_beside(numbered) not in here:
        found[index_beside(numbered)] = None
    return list(found)
