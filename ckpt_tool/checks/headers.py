"""A payload header is what a container says beside a tensor's bytes; here it is compared with the metadata.

The comparison itself is each reader's (``resolve``); here one bad chunk is kept from hiding the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ckpt_tool.checks.places import packed_columns
from ckpt_tool.errors import CkptError, StorageError, UnsafePickle, Unsupported
from ckpt_tool.formats.base import Reader, Source
from ckpt_tool.geometry.columns import BoolArray, Int64Array
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, IntArray
from ckpt_tool.sizes import counted

__all__ = ["finding_of", "is_resolved", "resolve_all", "restricted"]

_ROWS_AT_ONCE = 16_384
_MAX_FAULTS = 1000
"""After so many bad chunks the rest is not looked at: something larger is wrong."""


def finding_of(error: CkptError, kind: str, fqn: str | None = None) -> Finding:
    """An error of one part of the checkpoint as a finding about it."""
    if isinstance(error, Unsupported):
        return Finding(f"{kind}-unsupported", Severity.WARNING, f"{error}, so it was not checked", fqn)
    return Finding("unsafe-pickle" if isinstance(error, UnsafePickle) else kind, Severity.ERROR, str(error), fqn)


def restricted(manifest: Manifest, has_chunk: BoolArray, has_blob: BoolArray) -> Manifest:
    """The manifest without chunks and objects whose bytes are not there; files keep their rows."""
    blobs = tuple(blob for blob, is_there in zip(manifest.blobs, has_blob.tolist(), strict=True) if is_there)
    chunks = manifest.chunks if has_chunk.all() else manifest.chunks.take(np.flatnonzero(has_chunk))
    return manifest.replace(chunks=chunks, blobs=blobs)


def resolve_all(reader: Reader, source: Source, manifest: Manifest) -> tuple[Manifest, list[Finding]]:
    """The manifest with every chunk resolved whose header can be read, and a finding for each other one.

    Chunks that fail stay unresolved. Cost: that of ``Reader.resolve``, and where a chunk fails some twenty times its
    slice's logarithm besides.

    Raises:
        StorageError: the storage failed.
    """
    chunks = manifest.chunks
    rows = np.flatnonzero(chunks.flags & ChunkFlag.UNRESOLVED)
    findings: list[Finding] = []
    done: list[tuple[IntArray, ChunkTable]] = []
    pending: list[IntArray] = [rows[i : i + _ROWS_AT_ONCE] for i in range(0, len(rows), _ROWS_AT_ONCE)][::-1]
    while pending:
        part = pending.pop()
        small = manifest.replace(chunks=chunks.take(part))
        try:
            done.append((part, reader.resolve(source, small, np.arange(len(part), dtype=np.int64))))
        except StorageError:
            raise
        except CkptError as error:
            if len(part) > 1:
                middle = len(part) // 2
                pending += [part[middle:], part[:middle]]
                continue
            record = chunks.record(int(part[0]), manifest.tensors, manifest.files)
            where = manifest.files.entries[int(chunks.file[part[0]])].part or record.where
            found = finding_of(error, "item-mismatch", record.fqn)
            findings.append(Finding(found.kind, found.severity, found.message, record.fqn, where))
            if len(findings) >= _MAX_FAULTS:
                n_left = sum(map(len, pending))
                said = f"{counted(n_left, 'more chunk', 'were')} not looked at after {len(findings):,} bad ones"
                findings.append(Finding("item-mismatch", Severity.ERROR, said))
                break
    return manifest.replace(chunks=_merged(chunks, done)), findings


def _merged(chunks: ChunkTable, done: Iterable[tuple[Int64Array, ChunkTable]]) -> ChunkTable:
    """``chunks`` with some rows replaced."""
    parts = list(done)
    if not parts:
        return chunks
    rows = np.concatenate([part for part, _ in parts])
    columns = {}
    for name in ("offset", "length", "flags", "file"):
        column = getattr(chunks, name).copy()
        column[rows] = np.concatenate([getattr(table, name) for _, table in parts])
        columns[name] = column
    if any(table.strides is not None for _, table in parts) or chunks.strides is not None:
        strides = packed_columns(chunks.sizes) if chunks.strides is None else chunks.strides.copy()
        strides[rows] = np.concatenate(
            [packed_columns(table.sizes) if table.strides is None else table.strides for _, table in parts]
        )
        columns["strides"] = strides
    return chunks.replace(**columns)


def is_resolved(manifest: Manifest) -> BoolArray:
    """bool[n_chunks]: whether the payload's place is known."""
    resolved: BoolArray = (manifest.chunks.flags & ChunkFlag.UNRESOLVED) == 0
    return resolved
