"""Two sets of tables of one checkpoint become one: tensors, chunks and files one behind the other."""

from __future__ import annotations

import numpy as np

from ckpt_tool.manifest.merge import stacked_chunks
from ckpt_tool.manifest.model import FileEntry
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable

__all__ = ["joined", "with_folder"]

Tables = tuple[TensorTable, ChunkTable, FileTable]


def joined(first: Tables, second: Tables) -> Tables:
    """The union; files of the same path are one.

    Raises:
        FormatError: a tensor is in both.
    """
    if not len(second[0]):
        return first
    tensors = TensorTable.from_records([*first[0], *second[0]])
    entries = [*first[2]]
    index = dict(first[2].index)
    for entry in second[2]:
        if entry.path not in index:
            index[entry.path] = len(entries)
            entries.append(entry)
    files = np.array([index[path] for path in second[2].paths], dtype=np.int32)
    width = tensors.shape.shape[1]
    one, other = first[1], second[1]
    other = other.replace(tensor=(other.tensor + len(first[0])).astype(np.int32), file=files[other.file])
    chunks = stacked_chunks([one, other], width)
    return tensors, chunks, FileTable(tuple(entries))


def with_folder(files: FileTable, folder: str) -> FileTable:
    """``files`` with ``folder`` in front of their paths; the table itself for the empty name."""
    if not folder:
        return files
    moved = []
    for entry in files:
        part = entry.part
        if part is not None:
            part = type(part)(f"{folder}/{part.path}", part.offset, part.length)
        moved.append(FileEntry(f"{folder}/{entry.path}", entry.nbytes, entry.codec, part))
    return FileTable(tuple(moved))
