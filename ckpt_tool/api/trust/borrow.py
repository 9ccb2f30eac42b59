"""What a damaged checkpoint lacks and another step of the same run has: files that describe the others.

Payload is never borrowed. A description is taken where it is missing here, and what speaks for it is said.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.errors import CkptError, FormatError, StorageError
from ckpt_tool.formats._dcp.metadata import METADATA_NAME, load_metadata
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.dcp.borrowed import borrowed_metadata
from ckpt_tool.records import dataclass
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Listing
from ckpt_tool.storage.virtual.beside import Beside
from ckpt_tool.storage.virtual.subfolder import Subfolder, sublisting

__all__ = ["Borrowed", "borrowed"]

# What says how a checkpoint is laid out; values in it that change from step to step are not saved as this one's.
_DESCRIBING = ("common.pt", "metadata.json", "config.json", "params.json", "adapter_config.json")
_INDEX_SUFFIX = ".index.json"
_MAX_NBYTES = 256 << 20


@dataclass(frozen=True)
class Borrowed:
    """A source with what was borrowed beside it."""

    source: Source
    files: tuple[str, ...]
    notes: tuple[str, ...]
    known: Mapping[str, str]
    """What the other step has, by name: type and shape of a tensor, the kind of an object."""
    of_another_step: frozenset[str]
    """Borrowed files whose values are those of another step."""


def borrowed(source: Source, like: str | os.PathLike[str]) -> Borrowed:
    """``source`` with the descriptions that it lacks, out of the checkpoint at ``like``.

    Raises:
        NotFound: ``like`` is no checkpoint.
        FormatError: the two do not have the same structure.
    """
    url = os.fspath(like)
    with open_checkpoint(like) as lender:
        manifest = lender.manifest
        known = {meta.fqn: f"{meta.dtype.name}{list(meta.shape)}" for meta in manifest.tensors}
        known |= {blob.fqn: f"an object ({blob.kind})" for blob in manifest.blobs}
        new: dict[str, bytes] = {}
        notes: list[str] = []
        for path, nbytes in lender.source.listing.sizes.items():
            folder, _, name = path.rpartition("/")
            if nbytes > _MAX_NBYTES:
                continue
            if name == METADATA_NAME and not _is_readable(source, path):
                inside = source
                if folder:
                    inside = Source(Subfolder(source.store, folder), sublisting(source.listing, folder))
                found = borrowed_metadata(inside, lender.source.read_whole(path), f"{url.rstrip('/')}/{path}")
                new[path] = found.content
                notes += found.notes
            elif path not in source.listing and (name in _DESCRIBING or name.endswith(_INDEX_SUFFIX)):
                new[path] = lender.source.read_whole(path)
                notes.append(f"{path} is that of {url}")
    if not new:
        notes.append(f"nothing is borrowed from {url}: all that describes a checkpoint is here")
    listing = source.listing
    sizes = dict(sorted((listing.sizes | {path: len(data) for path, data in new.items()}).items()))
    joined = Listing(listing.url, sizes, listing.entry, listing.modified, listing.empty, listing.links, listing.tags)
    store = Beside(source.store, MemoryStore(new), frozenset(new), joined)
    files = tuple(sorted(new))
    others = frozenset(path for path in files if path.rpartition("/")[2] == "common.pt")
    return Borrowed(replace(source, store=store, listing=joined), files, tuple(notes), known, others)


def _is_readable(source: Source, path: str) -> bool:
    """Whether there is a metadata file that can be read."""
    if path not in source.listing:
        return False
    try:
        load_metadata(source.read_whole(path), path)
    except StorageError:
        raise
    except (CkptError, FormatError):
        return False
    return True
