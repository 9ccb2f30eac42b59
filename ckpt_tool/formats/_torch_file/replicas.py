"""Replicas by assumption are compared: first by the checksums that the zips record, else by their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ckpt_tool.checksum import crc32
from ckpt_tool.formats._torch_file.headers import plain_zips, resolve, storage_records
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkTable
from ckpt_tool.sizes import counted

__all__ = ["replica_findings"]


def replica_findings(source: Source, manifest: Manifest, fqns: Sequence[str]) -> Iterator[Finding]:
    """Tensors of ``fqns`` whose copies differ.

    Costs the directory and local headers of each file; payload is read only of copies that are a part of their storage,
    or have no recorded CRC.
    """
    if not fqns:
        return
    chunks = resolve(source, manifest, np.arange(len(manifest.chunks), dtype=np.int64))
    recorded = {
        (record.where.path, record.where.offset, record.where.length): record.crc32
        for entry in plain_zips(manifest)
        for record in storage_records(source, entry.path)
        if record.crc32
    }
    for fqn in fqns:
        rows = chunks.rows_of(manifest.tensor_id(fqn)).tolist()
        values: dict[object, list[int]] = {}
        for row in rows:
            values.setdefault(_fingerprint(source, manifest, chunks, row, recorded), []).append(row)
        if len(values) > 1:
            first, second = list(values.values())[:2]
            meta = manifest.tensor(fqn)
            where = manifest.chunks.record(second[0], manifest.tensors, manifest.files).where
            yield Finding(
                "different-replicas",
                Severity.WARNING if meta.section == "other" else Severity.ERROR,
                f"{fqn!r}: same key, different bytes, no placement: {counted(len(values), 'distinct value')} in "
                f"{len(rows):,} "
                f"files, such as those of rank {int(chunks.rank[first[0]])} and rank {int(chunks.rank[second[0]])}",
                fqn=fqn,
                where=where,
            )


def _fingerprint(
    source: Source,
    manifest: Manifest,
    chunks: ChunkTable,
    row: int,
    recorded: dict[tuple[str, int, int], int],
) -> object:
    """Equal for copies with the same elements, as far as strides and flags are the same too."""
    record = chunks.record(row, manifest.tensors, manifest.files)
    where: FileRange = record.where
    found = recorded.get((where.path, where.offset, where.length))
    if found is None or record.strides is not None:
        found = crc32(source.store.read(where.path, where.offset, where.length))
    return found, record.strides, record.flags
