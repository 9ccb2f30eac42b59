"""Replicas are boxes of a tensor that several ranks stored: they must be equal, and here they are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ckpt_tool.checksum import crc32
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import SECTIONS, ChunkTable
from ckpt_tool.sizes import counted

__all__ = ["COPIES", "MAX_COPY_NBYTES", "replica_findings"]

COPIES = "copies_of_ranks"
"""Where a manifest's ``info`` lists tensors of which several ranks stored one box: conversions compare these first."""

MAX_COPY_NBYTES = 1 << 18
"""How large copies are that a conversion reads for it: norms and biases, not what expert-parallel ranks have alike."""
_OTHER = SECTIONS.index("other")


def replica_findings(
    source: Source, manifest: Manifest, chunks: ChunkTable, recorded: Mapping[int, int] | None = None
) -> Iterator[Finding]:
    """Boxes that ranks stored with different content; a warning for state that is neither model nor optimizer.

    Costs the bytes of every box that more than one rank stored, one request each, unless equal checksums are recorded;
    one box at a time is held.

    Args:
        source: reads the files.
        manifest: what ``chunks`` belong to.
        chunks: resolved.
        recorded: by row of ``chunks``, the CRC-32 of its stored bytes.
    """
    known = recorded or {}
    columns = (*chunks.sizes.T, *chunks.offsets.T, chunks.tensor)
    order = np.lexsort(columns) if len(chunks) else np.zeros(0, dtype=np.int64)
    keys = np.column_stack([chunks.tensor, chunks.offsets, chunks.sizes])[order]
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    for group in np.split(order, np.flatnonzero(is_new)[1:]):
        if len(group) < 2 or len({known.get(row, -1 - row) for row in group.tolist()}) == 1:
            continue
        values: dict[int, int] = {}
        for row in group.tolist():
            values.setdefault(_crc(source, manifest, chunks, row), row)
        if len(values) > 1:
            first, second = list(values.values())[:2]
            record = chunks.record(second, manifest.tensors, manifest.files)
            is_other = manifest.tensors.section[chunks.tensor[second]] == _OTHER
            yield Finding(
                "different-replicas",
                Severity.WARNING if is_other else Severity.ERROR,
                f"{record.fqn!r} {record.box}: {counted(len(group), 'rank', 'hold')} it, with {len(values):,} "
                f"different contents, such as rank {int(chunks.rank[first])} and rank {int(chunks.rank[second])}",
                fqn=record.fqn,
                where=record.where,
            )


def _crc(source: Source, manifest: Manifest, chunks: ChunkTable, row: int) -> int:
    """CRC-32 of a box's elements, row by row."""
    record = chunks.record(row, manifest.tensors, manifest.files)
    data = source.store.read(record.where.path, record.where.offset, record.where.length)
    if record.strides is None:
        return crc32(data)
    width = manifest.tensors.dtypes[chunks.tensor[row]].itemsize
    strides = (*(stride * width for stride in record.strides), 1)
    raw = np.frombuffer(data, dtype=np.uint8)
    elements = np.lib.stride_tricks.as_strided(raw, (*record.box.sizes, width), strides)
    return crc32(elements.tobytes())
