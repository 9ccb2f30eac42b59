"""A stray is a file beside the checkpoint's own that nothing refers to. Knows names and sizes; reads nothing."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tool.checks.companions import side_files
from ckpt_tool.checks.extents import some_names
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.sizes import counted
from ckpt_tool.storage.altered_names import is_unfinished
from ckpt_tool.storage.store import Listing

__all__ = ["other_files", "stray_findings"]

_NOT_ALL_HERE = ".aria2"
"""Ends the name of a list of what is not fetched yet of a file that has its length from the start, in zeros."""
# Files that describe a checkpoint without being part of its data.
_COMPANION_SUFFIXES = (
    ".metadata", ".json", ".jsonl", ".md", ".txt", ".model", ".jinja", ".py", ".yaml", ".yml", ".toml", ".lock", ".log",
    ".gitattributes", ".gitignore", ".spm", ".tiktoken", ".done", ".complete", ".arrow", "metadata.pkl",
    ".zarray", ".zattrs", ".zgroup", ".zmetadata", ".ocdbt", "_CHECKPOINT_METADATA", "_METADATA", "_sharding",
    ".snapshot_metadata", "latest", "latest_universal",
)  # fmt: skip


def stray_findings(manifest: Manifest, listing: Listing) -> Iterator[Finding]:
    """Files that neither a tensor nor an object lies in: leftovers, look-alikes of the checkpoint's files, the rest.

    Where the user named a single file, only that one is looked at.
    """
    used, kinds = _used(manifest)
    known = {*used, *_left_out(manifest), *side_files(manifest, listing)}
    for path in listing.paths:
        if path in known:
            continue
        nbytes = listing.sizes[path]
        place = FileRange(path, 0, nbytes)
        if path.endswith(_NOT_ALL_HERE) and path.removesuffix(_NOT_ALL_HERE) in used:
            name = path.removesuffix(_NOT_ALL_HERE)
            said = f"{path} tells that the download of {name} has not ended: parts of it are zeros; start it again"
            yield Finding("unfinished-file", Severity.ERROR, said, where=FileRange(name, 0, 0))
        elif is_unfinished(path):
            said = f"{path} ({counted(nbytes, 'byte')}) is what an interrupted save or download leaves"
            yield Finding("unfinished-file", Severity.WARNING, said, where=place)
        elif (_folder(path), _suffix(path)) not in kinds:
            continue  # told together below, or a companion
        elif nbytes == 0:
            said = f"{path} is empty and nothing refers to it: its writer had nothing to save, or what it saved is lost"
            yield Finding("empty-file", Severity.WARNING, said, where=place)
        else:
            said = (
                f"{path} ({counted(nbytes, 'byte')}) looks like one of the checkpoint's files, but nothing refers to it"
            )
            yield Finding("stray-file", Severity.WARNING, said, where=place)
    others = other_files(manifest, listing)
    if others:
        hold, were = ("holds", "was") if len(others) == 1 else ("hold", "were")
        said = f"{counted(len(others), 'other file')} {hold} nothing of this checkpoint and {were} not checked"
        yield Finding("other-files", Severity.INFO, f"{said}: {some_names(others)}")


def other_files(manifest: Manifest, listing: Listing) -> tuple[str, ...]:
    """Files that are no part of the checkpoint, nor look like one, nor describe it, nor are checked beside it."""
    used, kinds = _used(manifest)
    used.update(side_files(manifest, listing))
    others = _left_out(manifest)
    return tuple(
        path
        for path in listing.paths
        if path in others
        or (
            not (path in used or (_folder(path), _suffix(path)) in kinds)
            and not (is_unfinished(path) or path.endswith(_COMPANION_SUFFIXES))
        )
    )


def _left_out(manifest: Manifest) -> set[str]:
    """Files that the reader left out because they hold the tensors once more: a variant of them, shards joined."""
    return set(map(str, manifest.info.get("left_out") or ()))


def _used(manifest: Manifest) -> tuple[set[str], set[tuple[str, str]]]:
    """Files that a tensor or an object lies in, and where they are and how they end."""
    used = {entry.path if entry.part is None else entry.part.path for entry in manifest.files}
    used |= {blob.where.path for blob in manifest.blobs if blob.where is not None}
    return used, {(_folder(path), _suffix(path)) for path in used if _suffix(path) not in _COMPANION_SUFFIXES}


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _suffix(path: str) -> str:
    name = path.rpartition("/")[2]
    return f".{name.rpartition('.')[2]}" if "." in name else ""
