"""An extent is the byte range of a chunk, compared here with the files that are really there.

Knows the manifest and the listing; reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ckpt_tool.geometry.columns import BoolArray, Int64Array
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, some_of
from ckpt_tool.storage.store import Listing

__all__ = ["Extents", "chunk_nbytes", "extent_findings", "length_findings", "loss_findings", "measure", "some_names"]

_MISSING, _UNKNOWN = -1, np.iinfo(np.int64).max
_LENGTHS_SHOWN = 1000


@dataclass(frozen=True, eq=False)
class Extents:
    """Which bytes of the manifest exist."""

    file_nbytes: Int64Array  # int64[n_files]
    """Real size, -1 for a missing file, the largest integer for decoded content of unknown size."""
    has_chunk: BoolArray  # bool[n_chunks]
    """All bytes of the chunk (of its container item, while unresolved) are there."""
    has_blob: BoolArray  # bool[n_blobs]


def measure(manifest: Manifest, listing: Listing) -> Extents:
    """Compare every byte range of the manifest with the listing; vectorised over chunks."""
    sizes = []
    for entry in manifest.files:
        if entry.codec is None:
            sizes.append(listing.sizes.get(entry.path, _MISSING))
        elif entry.part is None or listing.sizes.get(entry.part.path, _MISSING) < entry.part.end:
            sizes.append(_MISSING)
        else:
            sizes.append(entry.nbytes if entry.nbytes >= 0 else _UNKNOWN)
    file_nbytes = np.array(sizes, dtype=np.int64)
    chunks = manifest.chunks
    has_chunk = np.zeros(len(chunks), dtype=np.bool_)
    if len(chunks):
        available = file_nbytes[chunks.file]
        # Written so that no sum can overflow: offsets come out of files that may lie.
        has_chunk = (chunks.offset >= 0) & (chunks.length >= 0) & (chunks.length <= available)
        has_chunk &= chunks.offset <= available - np.where(has_chunk, chunks.length, 0)
    has_blob = np.array(
        [b.where is None or b.where.end <= listing.sizes.get(b.where.path, _MISSING) for b in manifest.blobs],
        dtype=np.bool_,
    )
    return Extents(file_nbytes, has_chunk, has_blob)


def extent_findings(manifest: Manifest, listing: Listing, extents: Extents) -> Iterator[Finding]:
    """One finding for each file that is missing, empty or too short for what the manifest puts into it."""
    chunks, files = manifest.chunks, manifest.files
    lost = np.flatnonzero(~extents.has_chunk)
    order = lost[np.argsort(chunks.file[lost], kind="stable")]
    homes = [entry.path if entry.part is None else entry.part.path for entry in files]
    rows_by_path: dict[str, list[int]] = {}
    for row in order.tolist():
        rows_by_path.setdefault(homes[chunks.file[row]], []).append(row)
    objects_by_path: dict[str, list[int]] = {}
    for number in np.flatnonzero(~extents.has_blob).tolist():
        where = manifest.blobs[number].where
        if where is not None:
            objects_by_path.setdefault(where.path, []).append(number)
    for path in sorted(rows_by_path.keys() | objects_by_path.keys()):
        rows, objects = rows_by_path.get(path, []), objects_by_path.get(path, [])
        names = _names(manifest, rows, objects)
        held = f"{counted(len(rows), 'chunk')} of {counted(len(set(chunks.tensor[rows].tolist())), 'tensor')}"
        if objects:
            held += f" and {counted(len(objects), 'object')}"
        if path not in listing:
            said = f"{path} is missing; it holds {held}: {some_names(names)}"
            yield Finding("missing-file", Severity.ERROR, said, names[0], FileRange(path, 0, 0))
            continue
        nbytes = listing.sizes[path]
        end = _furthest_end(manifest, rows, objects)
        place = FileRange(path, nbytes, max(end - nbytes, 0))
        if nbytes == 0:
            said = (
                f"{path} is empty, expected at least {counted(end, 'byte')}; it should hold {held}: {some_names(names)}"
            )
            yield Finding("empty-file", Severity.ERROR, said, names[0], place)
        elif end > nbytes:
            said = (
                f"{path} has {counted(nbytes, 'byte')}, expected at least {end:,} ({end - nbytes:,} missing); cut off "
                f"are {held}: {some_names(names)}"
            )
            yield Finding("truncated-file", Severity.ERROR, said, names[0], place)
        else:
            said = f"{path} has {counted(nbytes, 'byte')}, and {held} lie before its start: {some_names(names)}"
            yield Finding("bad-extent", Severity.ERROR, said, names[0], FileRange(path, 0, nbytes))


def loss_findings(manifest: Manifest, extents: Extents) -> Iterator[Finding]:
    """One finding for each tensor that misses elements because their bytes are not there, replicas considered."""
    if extents.has_chunk.all():
        return
    chunks, tensors = manifest.chunks, manifest.tensors
    first = exact_duplicates(chunks.offsets, chunks.sizes, chunks.tensor.astype(np.int64))
    is_held = np.zeros(len(chunks), dtype=np.bool_)
    is_held[first[extents.has_chunk]] = True
    lost = np.flatnonzero((first == np.arange(len(first))) & ~is_held & (chunks.volume > 0))
    elements = np.zeros(len(tensors), dtype=np.int64)
    np.add.at(elements, chunks.tensor[lost], chunks.volume[lost])
    _, one_each = np.unique(chunks.tensor[lost], return_index=True)
    for row in lost[np.sort(one_each)].tolist():
        tensor = int(chunks.tensor[row])
        record = chunks.record(row, tensors, manifest.files)
        n, numel = int(elements[tensor]), int(tensors.numel[tensor])
        verb = "has" if n == 1 else "have"
        said = (
            f"{n:,} of {counted(numel, 'element')} ({n / max(numel, 1):.1%}) {verb} no bytes left, the first lost box "
            f"is {record.box} in {record.where.path}"
        )
        yield Finding("lost-data", Severity.ERROR, said, record.fqn, record.where)


def chunk_nbytes(manifest: Manifest, rows: Int64Array) -> Int64Array:
    """``int64[n]``: bytes from the first to the last element of chunks, by their sizes, strides and dtype."""
    chunks = manifest.chunks
    bits = manifest.tensors.bits[chunks.tensor[rows]]
    volume = chunks.volume[rows]
    elements = volume
    if chunks.strides is not None:
        steps = np.abs(chunks.strides[rows]) * np.maximum(chunks.sizes[rows] - 1, 0)
        elements = np.where(volume > 0, steps.sum(axis=1) + 1, 0)
    nbytes: Int64Array = (elements * bits + 7) // 8
    return nbytes


def length_findings(manifest: Manifest) -> Iterator[Finding]:
    """Chunks whose byte length is not what dtype and sizes need; container items that are too small for their box."""
    chunks = manifest.chunks
    needed = chunk_nbytes(manifest, np.arange(len(chunks), dtype=np.int64))
    is_item = (chunks.flags & ChunkFlag.UNRESOLVED) != 0
    is_coded = np.array([entry.codec is not None for entry in manifest.files], dtype=np.bool_)
    coded = is_coded[chunks.file] if len(is_coded) else np.zeros(len(chunks), dtype=np.bool_)
    wrong = np.flatnonzero(np.where(is_item, (chunks.length < needed) & ~coded, chunks.length != needed))
    for row in wrong[:_LENGTHS_SHOWN].tolist():
        record = chunks.record(row, manifest.tensors, manifest.files)
        dtype = manifest.tensors.dtypes[chunks.tensor[row]].name
        at_least = "at least " if is_item[row] else ""
        said = (
            f"box {record.box} of {dtype} has {counted(record.where.length, 'byte')} in {record.where.path}, expected "
            f"{at_least}{int(needed[row]):,}"
        )
        yield Finding("length-mismatch", Severity.ERROR, said, record.fqn, record.where)
    if len(wrong) > _LENGTHS_SHOWN:
        said = f"{counted(len(wrong) - _LENGTHS_SHOWN, 'more chunk', 'have')} a wrong byte length"
        yield Finding("length-mismatch", Severity.ERROR, said)


def some_names(names: Sequence[str], shown: int = 3) -> str:
    """The first few names, and how many more there are.

    >>> some_names(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    """
    return some_of([repr(name) for name in names[:shown]], shown, n=len(names))


def _names(manifest: Manifest, rows: list[int], objects: list[int]) -> list[str]:
    fqns = [manifest.tensors.fqns[tensor] for tensor in manifest.chunks.tensor[rows].tolist()]
    return list(dict.fromkeys([*fqns, *(manifest.blobs[number].fqn for number in objects)]))


def _furthest_end(manifest: Manifest, rows: list[int], objects: list[int]) -> int:
    """One past the last byte wanted; that of the encoded part where content is compressed."""
    ends = [0]
    for row in rows:
        entry = manifest.files.entries[manifest.chunks.file[row]]
        end = int(manifest.chunks.offset[row]) + int(manifest.chunks.length[row])
        ends.append(end if entry.part is None else entry.part.end)
    ends += [where.end for number in objects if (where := manifest.blobs[number].where) is not None]
    return max(ends)
