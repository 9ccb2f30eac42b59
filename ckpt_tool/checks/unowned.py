"""Bytes without an owner lie in a file that holds nothing but items, and in none of these.

The file is longer than its last item, a stretch was written twice, or metadata lacks an entry. Knows ranges only; reads
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.columns import BoolArray, Int64Array
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkTable
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing

__all__ = ["unowned_findings"]

_MAX_ALIGNMENT = 4096
"""Writers pad to the sectors and pages of devices, no further."""
_SHOWN = 1000


def unowned_findings(
    manifest: Manifest, listing: Listing, has_chunk: BoolArray, resolved: ChunkTable
) -> Iterator[Finding]:
    """Stretches that belong to no item, of files of which the reader lists all items; cost: one sort.

    What fills a file up to the next multiple of a power of two is padding.

    Args:
        manifest: as the reader gave it.
        listing: what is really there.
        has_chunk: which of its chunks are there.
        resolved: these, with the places of their payload, which may reach beyond the item that metadata tells (blobs of
            safetensors in DCP).
    """
    if manifest.items is None:
        return
    real, judged = _real_files(manifest, listing)
    if not judged.any():
        return
    nbytes = np.where(judged, real, 0)
    base = np.cumsum(nbytes) - nbytes  # all files as one line of bytes
    parts = list(_places(manifest, manifest.chunks.take(np.flatnonzero(has_chunk)), resolved))
    file, start, length = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    own = np.flatnonzero(judged[file] & (start >= 0) & (length > 0))
    file, start, length = file[own], start[own], length[own]
    start = np.minimum(start, nbytes[file])
    stop = start + np.minimum(length, nbytes[file] - start)
    ends = np.append(base[judged] + nbytes[judged], 0)  # marks without length, which part the files
    first = np.concatenate([base[file] + start, ends])
    last = np.concatenate([base[file] + stop, ends])
    order = np.argsort(first, kind="stable")
    reach = np.maximum.accumulate(last[order])[:-1]
    following = first[order][1:]
    gaps = np.flatnonzero(following > reach)
    owner = np.flatnonzero(judged)
    of_gap = owner[np.searchsorted(base[owner] + nbytes[owner], reach[gaps], side="right")]
    begin, end = reach[gaps] - base[of_gap], following[gaps] - base[of_gap]
    is_padding = end - begin < np.minimum(end & -end, _MAX_ALIGNMENT)
    yield from _told(manifest, nbytes, of_gap[~is_padding], begin[~is_padding], end[~is_padding])


def _real_files(manifest: Manifest, listing: Listing) -> tuple[Int64Array, BoolArray]:
    """Size of each file, and which are there and hold items alone."""
    known = np.zeros(len(manifest.files), dtype=np.bool_)
    if manifest.items is not None:
        known[: len(manifest.items.is_full)] = manifest.items.is_full
    is_plain = np.array([entry.codec is None for entry in manifest.files], dtype=np.bool_)
    sizes = np.array([listing.sizes.get(path, 0) for path in manifest.files.paths], dtype=np.int64)
    return sizes, known & is_plain & (sizes > 0)


Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _places(manifest: Manifest, there: ChunkTable, resolved: ChunkTable) -> Iterator[Rows]:
    """File, first byte and length of everything that has an owner."""
    items, index = manifest.items, manifest.files.index
    if items is not None:
        yield items.file, items.offset, items.length
    yield manifest.chunks.file.astype(np.int64), manifest.chunks.offset, manifest.chunks.length  # cut ones too
    start = np.minimum(there.offset, resolved.offset)
    end = np.maximum(there.offset + there.length, resolved.offset + resolved.length)
    yield there.file.astype(np.int64), start, end - start
    ranges = [blob.where for blob in manifest.blobs if blob.where is not None]
    ranges += [entry.part for entry in manifest.files if entry.part is not None]
    rows = [(index[where.path], where.offset, where.length) for where in ranges if where.path in index]
    file, offset, length = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    yield file, offset, length


def _told(
    manifest: Manifest, nbytes: Int64Array, files: Int64Array, begin: Int64Array, end: Int64Array
) -> Iterator[Finding]:
    for row, start, stop in zip(files[:_SHOWN].tolist(), begin[:_SHOWN].tolist(), end[:_SHOWN].tolist(), strict=True):
        path, n = manifest.files.paths[row], counted(stop - start, "byte")
        if stop == nbytes[row]:
            said = f"{path} goes on for {n} behind its last item, which ends at byte {start:,}: nothing refers there"
        else:
            said = f"no item holds {n} of {path} from byte {start:,} on, and nothing refers there"
        yield Finding("unowned-bytes", Severity.WARNING, said, where=FileRange(path, start, stop - start))
    if len(files) > _SHOWN:
        left = int((end[_SHOWN:] - begin[_SHOWN:]).sum())
        said = f"{counted(len(files) - _SHOWN, 'more stretch')} ({counted(left, 'byte')}) belong to no item"
        yield Finding("unowned-bytes", Severity.WARNING, said)
