"""Copies are boxes that several ranks wrote in a save without collectives, each into its own file.

With collectives one rank writes what all say they have alike. Without, each writes what it has, and a tensor that is
every rank's own (PyTorch issues 120356 and 146566) looks like one that all share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from ckpt_tool.formats._dcp.checks import checksums, item_of
from ckpt_tool.formats._replicas import replica_findings
from ckpt_tool.formats.base import Checksum, Source
from ckpt_tool.formats.dcp.resolve import resolve
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.subset import only_tensors

__all__ = ["copy_findings"]


def copy_findings(source: Source, manifest: Manifest, fqns: Sequence[str]) -> Iterator[Finding]:
    """Tensors of ``fqns`` whose copies differ: ``different-replicas``.

    Costs the ends of their items, where the zips have checksums; the bytes where they have none, or other ones.
    """
    if not fqns:
        return
    taken = only_tensors(manifest, [manifest.tensor_id(fqn) for fqn in fqns])
    only = taken.replace(blobs=(), items=None)
    chunks = resolve(source, only, np.arange(len(only.chunks), dtype=np.int64))
    yield from replica_findings(source, only, chunks, _recorded(source, only))


def _recorded(source: Source, manifest: Manifest) -> dict[int, int]:
    """By row, the checksum of a chunk that is all of its storage."""
    places = [item_of(manifest, row) for row in range(len(manifest.chunks))]
    items = sorted((where.path, where.offset, row) for row, where in enumerate(places))
    nbytes = (manifest.chunks.volume * manifest.tensors.bits[manifest.chunks.tensor] + 7) // 8
    found: dict[int, int] = {}
    for told in checksums(source, manifest):
        if isinstance(told, Checksum) and told.fqn is not None:
            *_, row = items[bisect_right(items, (told.where.path, told.where.offset, len(items))) - 1]
            if told.where.length == nbytes[row]:
                found[row] = told.crc32
    return found
