"""Torch files of one target: which of them has each box of the request, and what stands around the payload of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from ckpt_tool.formats._torch_file.written import WrittenFile
from ckpt_tool.formats.base import Segment
from ckpt_tool.manifest.model import FileEntry
from ckpt_tool.manifest.tables import IntArray

__all__ = ["WrittenFiles"]


class WrittenFiles:
    """Files in the order in which the target lists them."""

    def __init__(self, files: Iterable[WrittenFile]) -> None:
        self.files = tuple(files)

    def entries(self) -> list[FileEntry]:
        """Path and size of each file."""
        return [FileEntry(file.path, file.zip.nbytes) for file in self.files]

    def places(self, n_boxes: int) -> tuple[IntArray, IntArray]:
        """``(file int64[n_boxes], byte int64[n_boxes])`` of each row of the request; byte -1 where no file has it."""
        number, byte = np.zeros(n_boxes, dtype=np.int64), np.full(n_boxes, -1, dtype=np.int64)
        for row, file in enumerate(self.files):
            placed, starts = file.placed_rows()
            number[placed], byte[placed] = row, starts
        return number, byte

    def segments(self) -> list[Segment]:
        """All but payload, with 0 for checksums, which stands for "not recorded"."""
        return [segment for file in self.files for segment in (*file.heads(), *file.tail_without_checksums())]

    def seal(self, crc32s: npt.NDArray[np.uint32]) -> Iterator[Segment]:
        """The ends of all files again, given the CRC-32 of each row of the request."""
        listed = crc32s.tolist()
        return (segment for file in self.files for segment in file.tail(listed))
