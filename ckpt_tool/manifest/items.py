"""An item is a stretch of a file that metadata places: a tensor's piece, an object, or something that holds nothing.

Of files in which nothing but items lies, each byte has an owner; what belongs to no item belongs to nobody. Knows no
format; what is between the parts of a container, only its own format can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.manifest.model import FileRange
from ckpt_tool.manifest.tables import ChunkTable, FileTable, IntArray
from ckpt_tool.records import dataclass

__all__ = ["ItemTable"]


@dataclass(frozen=True, eq=False)
class ItemTable:
    """Items that chunks and objects do not show as they are: without elements, cut into boxes, headers of files."""

    is_full: npt.NDArray[np.bool_]  # bool[n_files], rows of the file table; rows behind the last one are not full
    """Files in which nothing but items lies, those of chunks and objects among them."""
    file: IntArray  # int64[n], row of the file table
    offset: IntArray  # int64[n]
    length: IntArray  # int64[n]

    @classmethod
    def of_full(cls, n_files: int) -> ItemTable:
        """No item yet, of files that hold nothing else."""
        none = np.zeros(0, dtype=np.int64)
        return cls(np.ones(n_files, dtype=np.bool_), none, none, none)

    @classmethod
    def joined(cls, parts: Sequence[tuple[ItemTable | None, int]]) -> ItemTable | None:
        """Tables of parts with so many files each, one behind another; None where no part has one."""
        if all(table is None for table, _ in parts):
            return None
        is_full: list[npt.NDArray[np.bool_]] = []
        columns: list[tuple[IntArray, IntArray, IntArray]] = []
        n_before = 0
        for table, n_files in parts:
            known = np.zeros(n_files, dtype=np.bool_)
            if table is not None:
                known[: len(table.is_full)] = table.is_full
                columns.append((table.file + n_before, table.offset, table.length))
            is_full.append(known)
            n_before += n_files
        return cls(np.concatenate(is_full), *(np.concatenate(column) for column in zip(*columns, strict=True)))

    def with_chunks(self, chunks: ChunkTable) -> ItemTable:
        """These, and the ranges of chunks, which are going to be cut."""
        return self.with_rows(chunks.file, chunks.offset, chunks.length)

    def with_ranges(self, ranges: Iterable[FileRange], files: FileTable) -> ItemTable:
        """These, and ranges of files; those of files that are not in the table are passed over."""
        rows = [(files.index[r.path], r.offset, r.length) for r in ranges if r.path in files.index]
        return self.with_rows(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)

    def without_full(self, rows: Iterable[int]) -> ItemTable:
        """These, some files being containers after all."""
        is_full = self.is_full.copy()
        is_full[list(rows)] = False
        return ItemTable(is_full, self.file, self.offset, self.length)

    def take_files(self, rows: IntArray) -> ItemTable:
        """Those of some files, ascending, which are all that is left."""
        is_full = np.zeros(len(rows), dtype=np.bool_)
        is_known = rows < len(self.is_full)
        is_full[is_known] = self.is_full[rows[is_known]]
        own = np.flatnonzero(np.isin(self.file, rows))
        return ItemTable(is_full, np.searchsorted(rows, self.file[own]), self.offset[own], self.length[own])

    def ranges(self, files: FileTable) -> list[FileRange]:
        """As records; the encoded bytes of compressed ones."""
        entries = files.entries
        rows = zip(self.file.tolist(), self.offset.tolist(), self.length.tolist(), strict=True)
        return [entries[f].part or FileRange(entries[f].path, offset, length) for f, offset, length in rows]

    def with_rows(self, file: npt.NDArray[Any], offset: IntArray, length: IntArray) -> ItemTable:
        """These, and rows of files, first bytes and lengths."""
        return ItemTable(
            self.is_full,
            np.concatenate([self.file, file.astype(np.int64)]),
            np.concatenate([self.offset, offset]),
            np.concatenate([self.length, length]),
        )
