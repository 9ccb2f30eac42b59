"""Windows: pieces of local files where the system keeps them, mapped for as long as somebody looks at them.

What is mapped is not copied into a buffer first. For copies of a process only, see `storage.mapped`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.model import Pieces
from ckpt_tool.records import dataclass
from ckpt_tool.storage.mapped import mapped
from ckpt_tool.storage.store import Store

__all__ = ["Window", "open_windows"]

_LEAST_MAPPED_BYTES = 256 << 10
"""Less is read: a mapping costs as much as copying so many bytes. Gaps up to here are mapped over."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Bytes of a file, and the pieces that lie in them."""

    path: str
    begin: int
    """First byte in the file."""
    data: npt.NDArray[np.uint8]
    pieces: list[tuple[int, int, int]]
    """Row, first byte in the file and the one behind the last, in the order of the file."""

    def piece(self, at: int, past: int) -> npt.NDArray[np.uint8]:
        """The bytes ``[at, past)`` of the file."""
        return self.data[at - self.begin : past - self.begin]


def open_windows(store: Store, paths: Sequence[str], pieces: Pieces, rows: IntArray) -> Iterator[Window]:
    """Windows under some pieces of files, neighbours in one; of those that are short or cannot be mapped there is none.

    Args:
        store: has the files.
        paths: of the files that the pieces' rows mean.
        pieces: what is in files.
        rows: which of them.
    """
    if not len(rows):
        return
    row = rows[np.lexsort((pieces.file_offset[rows], pieces.file[rows]))]
    file, start = pieces.file[row], pieces.file_offset[row]
    stop = start + pieces.length[row]
    is_next = (file[1:] == file[:-1]) & (start[1:] <= stop[:-1] + _LEAST_MAPPED_BYTES)
    bounds = np.concatenate([[0], np.flatnonzero(~is_next) + 1, [len(row)]])
    for low, high in pairwise(bounds.tolist()):
        begin, end = int(start[low]), int(stop[low:high].max(initial=0))
        data = mapped(store, paths[file[low]], begin, end) if end - begin >= _LEAST_MAPPED_BYTES else None
        if data is not None:
            found = zip(*(column[low:high].tolist() for column in (row, start, stop)), strict=True)
            yield Window(paths[file[low]], begin, data, list(found))
