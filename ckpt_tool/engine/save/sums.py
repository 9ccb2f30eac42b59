"""Checksums of boxes on their way to the files: of the packed bytes, and what each box adds to its tensor's digest.

The latter is put together from the CRC-32s of the runs that a box has in its tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32, crc32_combine, crc32s
from ckpt_tool.engine.save.columns import HeldState
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.runs import ByteRuns, byte_runs, contiguous_strides
from ckpt_tool.manifest.digest import crc32_of_zeros, folded_form
from ckpt_tool.records import dataclass

__all__ = ["BoxPlace", "BoxSums", "are_cheap", "places_of"]

_FEW_RUNS = 10_000
_LONG_NBYTES = 1024
"""A run costs a quarter of a microsecond, in which a rank writes some 150 bytes: at this length a tenth of the time."""


@dataclass(frozen=True, slots=True)
class BoxPlace:
    """Where the bytes of a box lie in its tensor's row-major bytes."""

    runs: ByteRuns
    total: int
    """Bytes of the tensor."""


def places_of(held: HeldState) -> list[BoxPlace]:
    """The places of boxes; a Python step for each, made once for a structure."""
    shapes = held.names.shapes
    strides = [contiguous_strides(shape) for shape in shapes]
    bits = [kind.bits for kind in held.names.kinds]
    totals = [int(np.prod(shape, dtype=np.int64)) * width // 8 for shape, width in zip(shapes, bits, strict=True)]
    columns = (held.tensor.tolist(), held.offsets.tolist(), held.sizes.tolist())
    found = []
    for tensor, offsets, sizes in zip(*columns, strict=True):
        ndim = len(shapes[tensor])
        box = Box(tuple(offsets[:ndim]), tuple(sizes[:ndim]))
        found.append(BoxPlace(byte_runs(box, strides[tensor], bits[tensor]), totals[tensor]))
    return found


def are_cheap(places: Sequence[BoxPlace]) -> bool:
    """Whether sums of these boxes cost little beside writing them: few runs, or long ones."""
    n_runs = sum(place.runs.n_runs for place in places if place.runs.n_runs > 1)
    nbytes = sum(place.runs.n_runs * place.runs.nbytes for place in places)
    return n_runs <= _FEW_RUNS or nbytes >= n_runs * _LONG_NBYTES


class BoxSums:
    """Sums of the boxes of one rank, whose bytes come in order, box by box."""

    def __init__(self, n: int, places: Sequence[BoxPlace] | None) -> None:
        self.crc32s = [0] * n
        """Of packed bytes, once all have come."""
        self._places = places
        self._linear = np.zeros(n, dtype=np.uint32)
        self._at = 0
        self._runs: npt.NDArray[np.uint32] | None = None

    def add(self, row: int, piece: memoryview, *, is_last: bool) -> None:
        """Take in the next bytes of a box."""
        place = None if self._places is None else self._places[row]
        if place is None or place.runs.n_runs < 2:
            self.crc32s[row] = crc32(piece, self.crc32s[row])
            if is_last and place is not None and place.runs.n_runs:
                self._end(row, place, np.array([self.crc32s[row]], dtype=np.uint32))
            return
        if self._runs is None:
            self._at, self._runs = 0, np.zeros(place.runs.n_runs, dtype=np.uint32)
        self.crc32s[row] = crc32(piece, self.crc32s[row])  # a second pass is cheaper than to fold the runs once more
        self._at = _add_runs(self._runs, piece, self._at, place.runs.nbytes)
        if is_last:
            self._end(row, place, self._runs)
            self._runs = None

    def linear(self) -> bytes:
        """``<u4`` for each box: its share of the linear form of its tensor's CRC-32."""
        return self._linear.astype("<u4").tobytes()

    def _end(self, row: int, place: BoxPlace, crc32s: npt.NDArray[np.uint32]) -> None:
        runs = place.runs
        form = folded_form(crc32s ^ np.uint32(crc32_of_zeros(runs.nbytes)), runs.counts, runs.steps)
        self._linear[row] = crc32_combine(form, 0, place.total - runs.start - runs.span)


def _add_runs(runs: npt.NDArray[np.uint32], piece: memoryview, at: int, length: int) -> int:
    """Take the next bytes of equal runs in, ``at`` bytes of which have come; returns how many have come then."""
    number, inside = divmod(at, length)
    begin, end = 0, piece.nbytes
    if inside:
        begin = min(length - inside, end)
        runs[number] = crc32(piece[:begin], int(runs[number]))
        number += 1
    n_whole = (end - begin) // length
    whole = begin + n_whole * length
    runs[number : number + n_whole] = crc32s(piece[begin:whole], length)
    if whole < end:
        runs[number + n_whole] = crc32(piece[whole:end], int(runs[number + n_whole]))
    return at + end
