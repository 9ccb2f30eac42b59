"""The files of a checkpoint: which item of which rank each one holds, as metadata records it or else by its name.

Without an entry in ``metadata.pkl`` an item's files are ``<item>_<rank>.pt``, or at any path that the writer's program
chose; then the suffix tells what they are, and the name the item: what stands before the rank, without folders. What
belongs to an item that can be resharded and cannot be itself is in ``<item>_values`` where it was written here.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from ckpt_tool.formats.torch_checkpointing.metadata import METADATA_NAME, SERIALIZATIONS, Saved
from ckpt_tool.numerals import numeral
from ckpt_tool.records import dataclass, field
from ckpt_tool.storage.store import Listing

__all__ = ["VALUES", "FileSet", "StoredFile", "find_files", "ranks_by_item", "ranks_by_name"]

VALUES = "_values"
"""Added to the name of an item that has tensors to reshard, for what cannot be: an item's files are placed as one."""
TORCH, SAFETENSORS, JSON, RAW = SERIALIZATIONS
_RANK = numeral(most=7)
_DEFAULT_ITEM = re.compile(r"[A-Za-z0-9_-]+")
_RANKED = re.compile(rf"(.+)_({_RANK})")
_MISSPELT = re.compile(r"(.+)_0[0-9]{1,6}")
_BY_SUFFIX = {"pt": TORCH, "safetensors": SAFETENSORS, "json": JSON}
_MAX_RAW_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file."""

    path: str
    item: str
    rank: int | None
    """None where the name tells none."""
    serialization: str
    is_recorded: bool
    """Whether ``metadata.pkl`` lists it, and so the placement of its tensors."""


@dataclass(slots=True)
class FileSet:
    """All files that matter, and what is amiss with the others."""

    files: list[StoredFile] = field(default_factory=list)
    """By item in order of first appearance, then by rank."""
    missing: list[str] = field(default_factory=list)
    """Recorded files that are not there, although tensors lie in them."""
    strays: list[str] = field(default_factory=list)
    """Files of ranks beyond the world size, as a dead attempt leaves them, or that spell a rank as no writer does."""
    left_out: list[str] = field(default_factory=list)
    """Raw files too large to be an object."""


def ranks_by_item(paths: Collection[str]) -> dict[str, set[int]]:
    """Ranks of the files with default names, by item.

    >>> ranks_by_item(["model_0.pt", "model_1.pt", "notes.txt"])
    {'model': {0, 1}}
    """
    named = ranks_by_name(paths).items()
    return {item: ranks for (item, suffix), ranks in named if suffix == "pt" and _DEFAULT_ITEM.fullmatch(item)}


def ranks_by_name(paths: Collection[str]) -> dict[tuple[str, str], set[int]]:
    """Ranks of files whose suffix tells what they are, by what stands before the rank, folders too, and by suffix.

    >>> ranks_by_name(["meta/meta_0.json", "meta/meta_2.json", "blob_1.bin"])
    {('meta/meta', 'json'): {0, 2}}
    """
    found: dict[tuple[str, str], set[int]] = {}
    for path in paths:
        stem, _, suffix = path.rpartition(".")
        match = _RANKED.fullmatch(stem) if suffix in _BY_SUFFIX else None
        if match is not None:
            found.setdefault((match[1], suffix), set()).add(int(match[2]))
    return found


def find_files(listing: Listing, saved: Saved | None) -> FileSet:
    """Recorded files first, then what else is there; hidden files are left alone."""
    found = FileSet()
    taken = {METADATA_NAME}
    names: set[tuple[str, int | None, str]] = set()
    for item, recorded in (saved.items if saved else {}).items():
        holders = {rank for groups in recorded.groups.values() for group in groups for rank in group.ranks}
        for rank, layout in sorted(recorded.layouts.items()):
            taken.add(layout.path)
            if layout.path in listing:
                names.add((item, rank, layout.serialization))
                found.files.append(StoredFile(layout.path, item, rank, layout.serialization, is_recorded=True))
            elif rank in holders:
                found.missing.append(layout.path)
    others: list[StoredFile] = []
    stems = {path.rpartition("/")[2].rpartition(".")[0] for path in listing.sizes}
    for path in sorted(listing.sizes):
        if path in taken or any(part.startswith(".") for part in path.split("/")):
            continue
        stem, _, suffix = path.rpartition("/")[2].rpartition(".")
        serialization = _BY_SUFFIX.get(suffix, RAW)
        match = _RANKED.fullmatch(stem)
        named_rank = int(match[2]) if match else None
        misspelt = _MISSPELT.fullmatch(stem)
        is_beyond = saved is not None and named_rank is not None and named_rank >= saved.world_size
        if is_beyond or (misspelt is not None and f"{misspelt[1]}_0" in stems):
            found.strays.append(path)
        elif serialization == RAW and listing.nbytes(path) > _MAX_RAW_NBYTES:
            found.left_out.append(path)
        else:
            item = match[1] if match else stem or suffix
            if saved is not None and item.removesuffix(VALUES) in saved.items:
                item = item.removesuffix(VALUES)
            key = (item, named_rank, serialization)
            if key in names:
                item = path
            names.add(key)
            others.append(StoredFile(path, item, named_rank, serialization, is_recorded=False))
    found.files += sorted(others, key=lambda file: (file.item, -1 if file.rank is None else file.rank, file.path))
    return found
