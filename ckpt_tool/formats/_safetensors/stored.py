"""What the readers of this folder share: headers fetched in few requests, and the way from stored boxes to columns.

A *stored box* is one entry of one file with its place in the global tensor. Which place that is, each reader knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._collector import collector_paused
from ckpt_tool.formats._safetensors.header import PEER_MAX_HEADER_NBYTES, Entry, Header, header_nbytes, parse_header
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileEntry, FileRange, KeyPath, TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable, pad_shapes
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing

__all__ = [
    "FIRST_READ_NBYTES",
    "StoredBox",
    "header_findings",
    "header_notes",
    "read_headers",
    "tables",
    "whole_box",
]

FIRST_READ_NBYTES = 64 << 10
"""Read of each file at once; holds the header of some 500 tensors. A longer one costs a second request."""

_FILES_AT_ONCE = 256  # bounds the memory that first reads take


def read_headers(source: Source, paths: Sequence[str]) -> list[Header]:
    """The header of each file: one request per file, two where it is longer than `FIRST_READ_NBYTES`.

    In a salvage a file may be cut behind its header.

    Raises:
        FormatError: a file contradicts the format.
    """
    headers: list[Header] = []
    with collector_paused():
        for start in range(0, len(paths), _FILES_AT_ONCE):
            headers += _read_batch(source, paths[start : start + _FILES_AT_ONCE])
    return headers


def _read_batch(source: Source, paths: Sequence[str]) -> Iterator[Header]:
    sizes = [source.listing.nbytes(path) for path in paths]
    if len(paths) == 1:
        heads = [source.head(paths[0], FIRST_READ_NBYTES)]
    else:
        firsts = [FileRange(p, 0, min(n, FIRST_READ_NBYTES)) for p, n in zip(paths, sizes, strict=True)]
        heads = source.store.fetch(firsts)
    rests = []
    for path, size, head in zip(paths, sizes, heads, strict=True):
        missing = header_nbytes(head, size, path) - len(head)
        if missing > 0:
            rests.append(FileRange(path, len(head), missing))
    tails = dict(zip((r.path for r in rests), source.store.fetch(rests), strict=True)) if rests else {}
    for path, size, head in zip(paths, sizes, heads, strict=True):
        yield parse_header(head + tails.pop(path, b""), size, path, is_cut=source.is_salvage)


class StoredBox(NamedTuple):
    """One entry of one file, and the region of the global tensor that it holds."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    """Of the global tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: int
    """Row in the list of files."""
    offset: int
    length: int
    rank: int = -1
    path: KeyPath | None = None
    """Keys from the root, None for ``(fqn,)``."""
    section: str | None = None
    """None to tell it from the name."""


def whole_box(entry: Entry, header: Header, file: int) -> StoredBox:
    """The box of an entry that is a whole tensor."""
    return StoredBox(
        entry.name,
        entry.dtype,
        entry.shape,
        (0,) * len(entry.shape),
        entry.shape,
        file,
        header.data_start + entry.start,
        entry.nbytes,
    )


def tables(
    boxes: Iterable[StoredBox], paths: Sequence[str], listing: Listing
) -> tuple[TensorTable, ChunkTable, FileTable]:
    """Columns of ``boxes``: a tensor for each name in order of first sight, a chunk for each box that is not empty.

    Raises:
        FormatError: two boxes of one name disagree about its dtype or global shape; both files are named.
    """
    with collector_paused():
        return _tables(boxes, paths, listing)


def _tables(
    boxes: Iterable[StoredBox], paths: Sequence[str], listing: Listing
) -> tuple[TensorTable, ChunkTable, FileTable]:
    metas: dict[str, TensorMeta] = {}
    ids: dict[str, int] = {}
    homes: list[int] = []
    rows: list[StoredBox] = []
    for box in boxes:
        meta = metas.get(box.fqn)
        if meta is None:
            path = (box.fqn,) if box.path is None else box.path
            section = box.section or section_of(path, box.fqn)
            metas[box.fqn] = TensorMeta(box.fqn, box.dtype, box.shape, section, path)
            ids[box.fqn] = len(homes)
            homes.append(box.file)
        elif (meta.dtype, meta.shape) != (box.dtype, box.shape):
            raise FormatError(
                f"{box.fqn!r} is {box.dtype.name}{list(box.shape)} here, but {meta.dtype.name}{list(meta.shape)} in "
                f"{paths[homes[ids[box.fqn]]]}",
                where=paths[box.file],
            )
        if box.length:
            rows.append(box)
    tensors = TensorTable.from_records(metas.values())
    width = tensors.shape.shape[1]
    chunks = ChunkTable.from_columns(
        tensor=[ids[b.fqn] for b in rows],
        offsets=pad_shapes([b.offsets for b in rows], width, 0),
        sizes=pad_shapes([b.sizes for b in rows], width, 1),
        file=[b.file for b in rows],
        offset=[b.offset for b in rows],
        length=[b.length for b in rows],
        rank=[b.rank for b in rows],
    )
    return tensors, chunks, FileTable(tuple(FileEntry(path, listing.nbytes(path)) for path in paths))


def header_notes(paths: Sequence[str], headers: Sequence[Header]) -> list[str]:
    """What a person should know about the files themselves."""
    return [f.message for f in header_findings(paths, headers)]


def header_findings(paths: Sequence[str], headers: Sequence[Header]) -> Iterator[Finding]:
    """Faults of single files that leave every tensor readable."""
    for path, header in zip(paths, headers, strict=True):
        if header.data_start - 8 > PEER_MAX_HEADER_NBYTES:
            yield Finding(
                "large-header",
                Severity.WARNING,
                f"{path} has a header of {counted(header.data_start - 8, 'byte')}; the reference reader refuses more "
                f"than {PEER_MAX_HEADER_NBYTES:,} (100 MB)",
                where=FileRange(path, 0, header.data_start),
            )
        by_name = {e.name: e for e in header.entries} if header.aliases else {}
        for first, second in header.aliases:
            entry = by_name[second]
            yield Finding(
                "shared-bytes",
                Severity.ERROR,
                f"{path}: {second!r} has the same bytes as {first!r}, which the format forbids; the reference reader "
                "refuses the file",
                fqn=second,
                where=FileRange(path, header.data_start + entry.start, entry.nbytes),
            )
