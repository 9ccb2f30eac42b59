"""Whether a folder, or a single file of one, is a DCP checkpoint, and what it lacks when it is not."""

from __future__ import annotations

import re

from ckpt_tool.formats._dcp.metadata import METADATA_NAME, foreign_root, rank_metadata
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.storage.urls import join_url

__all__ = ["metadata_paths", "probe"]

HEAD_NBYTES = 256
"""Enough of a pickle to name its root object."""
_PART = re.compile(r"__\d+(_\d+\.distcp|\.metadata)|\.metadata(\.tmp)?")


def metadata_paths(source: Source) -> tuple[str, ...]:
    """Metadata files at the top: ``.metadata`` alone if it is there, else those of the ranks, by rank."""
    if METADATA_NAME in source.listing:
        return (METADATA_NAME,)
    ranks = {path: rank for path in source.listing.sizes if (rank := rank_metadata(path)) is not None}
    return tuple(sorted(ranks, key=lambda path: ranks[path]))


def probe(source: Source) -> Probe:
    """How sure it is; one request for the first bytes of a metadata file, none when there is no such file."""
    listing = source.listing
    entry = listing.entry
    if entry is not None:
        if not _PART.fullmatch(entry):
            return Probe(0.0, f"{entry!r} is not the name of a file of a DCP checkpoint")
        if entry == METADATA_NAME and foreign_root(source.head(entry, HEAD_NBYTES)) is not None:
            return Probe(0.0, f"{entry} is {foreign_root(source.head(entry, HEAD_NBYTES))}, not DCP metadata")
        return Probe(0.4, f"{entry!r} is one file of a DCP checkpoint; name its folder instead: {listing.url}")
    found = metadata_paths(source)
    if found:
        foreign = foreign_root(source.head(found[0], HEAD_NBYTES))
        if foreign is not None:
            return Probe(0.0, f"{found[0]} is {foreign}, not DCP metadata")
        many = f" and {len(found) - 1:,} more of other ranks" if len(found) > 1 else ""
        return Probe(0.9, f"{found[0]}{many} is DCP metadata")
    if listing.match("*.distcp"):
        n_files = len(listing.match("*.distcp"))
        cause = (
            "its save did not finish" if ".metadata.tmp" in listing else "its save did not finish, or it was not copied"
        )
        return Probe(0.0, f"{n_files:,} .distcp files but no {METADATA_NAME}: {cause}")
    below = [path for path in listing.sizes if path.rpartition("/")[2] == METADATA_NAME]
    if below:
        folders = ", ".join(join_url(listing.url, path.rpartition("/")[0]) for path in sorted(below)[:3])
        return Probe(0.0, f"no {METADATA_NAME} at the top, but {len(below):,} below: {folders}")
    return Probe(0.0, f"no {METADATA_NAME} and no __0.metadata")
