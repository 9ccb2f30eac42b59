"""A confirmation reads the bytes that a guess is about and says whether it holds: of all of them, or of a sample.

Everything is read in blocks of bounded size and given up at the first block that speaks against the guess. Boxes are in
global coordinates; elements are raw bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckpt_tool.compare.probes import Numbers, Probe, as_numbers, probe_positions
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.geometry.flat import flat_boxes
from ckpt_tool.geometry.join import Boxes
from ckpt_tool.plan.tiles import cut_tiles
from ckpt_tool.records import dataclass

__all__ = ["BoxSource", "Confirmer", "Place", "Verdict"]

Bits = npt.NDArray[Any]
_MARKED_ROWS = 4
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class BoxSource(Protocol):
    """Reads boxes of one side's tensors."""

    def read(self, row: int, box: Box) -> Bits:
        """The raw elements of a box of the tensor at ``row``, contiguous and the caller's own."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of one side."""

    source: BoxSource
    row: int
    shape: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.itemsize

    def read(self, box: Box) -> Bits:
        """The raw elements of a box."""
        return self.source.read(self.row, box)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What reading said of a guess."""

    holds: bool
    is_whole: bool = True
    """Whether every byte was looked at."""

    def __bool__(self) -> bool:
        return self.holds


class Confirmer:
    """Holds guesses against the bytes, with buffers of at most ``budget_bytes`` in all."""

    def __init__(self, budget_bytes: int) -> None:
        self._block_bytes = max(budget_bytes // 8, 4096)
        self._whole_bytes = budget_bytes // 4

    def elementwise(self, a: Place, b: Place, fits: Callable[[Bits, Bits], bool]) -> Verdict:
        """Whether ``fits`` holds of equal boxes of two tensors of one shape; looks at all bytes."""
        return Verdict(all(fits(a.read(box), b.read(box)) for box in self._boxes(Box.whole(b.shape), b.itemsize)))

    def zero(self, place: Place, box: Box) -> Verdict:
        """Whether a box holds nothing but zero bytes; looks at all of them."""
        boxes = self._boxes(box, place.itemsize)
        return Verdict(not any(place.read(part).reshape(-1).view(np.uint8).any() for part in boxes))

    def rows(self, a: Place, b: Place, order: Int64Array) -> Verdict:
        """Whether row ``i`` of B is row ``order[i]`` of A, as matrices; of tensors too large for memory 16 rows."""
        width = b.shape[-1] if len(b.shape) > 1 else 1
        if max(a.nbytes, b.nbytes) <= self._whole_bytes:
            one, other = (place.read(Box.whole(place.shape)).reshape(-1, width) for place in (a, b))
            step = max(self._block_bytes // max(width * b.itemsize, 1), 1)
            starts = range(0, len(other), step)
            return Verdict(all(_equal(one[order[at : at + step]], other[at : at + step]) for at in starts))
        picked = probe_positions(len(order)).tolist()
        holds = all(_equal(a.read(_row_box(int(order[i]), a.shape)), b.read(_row_box(i, b.shape))) for i in picked)
        return Verdict(holds, is_whole=False)

    def columns(self, a: Place, b: Place, order: Int64Array) -> Verdict:
        """Whether column ``j`` of matrix B is column ``order[j]`` of A; looks at all bytes, whole rows at a time."""
        n_rows, width = b.shape
        step = max(self._block_bytes // max(width * b.itemsize, 1), 1)
        boxes = (Box((at, 0), (min(step, n_rows - at), width)) for at in range(0, n_rows, step))
        return Verdict(all(_equal(np.ascontiguousarray(a.read(box)[:, order]), b.read(box)) for box in boxes))

    def column_marks(self, a: Place, b: Place) -> tuple[Numbers, Numbers] | None:
        """A number for each column of two matrices, made of a few rows; None where the first rows tell them apart."""
        marks = np.zeros((2, b.shape[1]), dtype=np.uint64)
        for number, row in enumerate(probe_positions(b.shape[0]).tolist()[:_MARKED_ROWS]):
            for side, place in enumerate((a, b)):
                found = as_numbers(place.read(_row_box(row, place.shape)).reshape(-1))
                if found is None:
                    return None
                marks[side] = marks[side] * _FACTOR + found
            if not number and not np.array_equal(np.sort(marks[0]), np.sort(marks[1])):
                return None
        return marks[0], marks[1]

    def probe(self, a: Place, b: Place) -> Probe:
        """Samples of two tensors of one shape, which are read for them."""
        probe = Probe(b.shape)
        for box in self._boxes(Box.whole(b.shape), b.itemsize):
            one, other = a.read(box), b.read(box)
            probe.add(one, other, box.offsets, box.sizes, same=False)
            probe.sign(one, other, box.offsets, box.sizes)
        return probe

    def transposed(self, a: Place, b: Place) -> Verdict:
        """Whether a matrix is the other one transposed; of matrices too large for memory the first rows of B."""
        is_whole = max(a.nbytes, b.nbytes) <= self._whole_bytes
        n_rows = b.shape[0] if is_whole else max(self._block_bytes // max(b.shape[1] * b.itemsize, 1), 1)
        rows = b.read(Box((0, 0), (n_rows, b.shape[1])))
        columns = a.read(Box((0, 0), (a.shape[0], n_rows)))
        return Verdict(_equal(np.ascontiguousarray(columns.T), rows), is_whole=is_whole)

    def reshaped(self, a: Place, b: Place) -> Verdict:
        """Whether two tensors of other shapes hold the same elements in row-major order; looks at all."""
        numel = prod(a.shape)
        step = max(self._block_bytes // max(a.itemsize, 1), 1)
        return Verdict(
            all(
                _equal(_flat(a, at, min(at + step, numel)), _flat(b, at, min(at + step, numel)))
                for at in range(0, numel, step)
            )
        )

    def shifted(self, a: Place, b: Place, shift: int) -> Verdict:
        """Whether element ``i + shift`` of B is element ``i`` of A, in row-major order, where both have one."""
        numel = prod(a.shape)
        step = max(self._block_bytes // max(a.itemsize, 1), 1)
        low, high = max(0, -shift), min(numel, numel - shift)
        spans = [(at, min(at + step, high)) for at in range(low, high, step)]
        return Verdict(all(_equal(_flat(a, p, q), _flat(b, p + shift, q + shift)) for p, q in spans))

    def _boxes(self, region: Box, itemsize: int) -> Iterator[Box]:
        """Boxes of at most a block that cover a region."""
        if not region.volume:
            return
        columns = Boxes(
            np.zeros(1, dtype=np.int64),
            np.array([region.offsets], dtype=np.int64).reshape(1, -1),
            np.array([region.sizes], dtype=np.int64).reshape(1, -1),
        )
        bits = np.array([itemsize * 8], dtype=np.int64)
        cut = cut_tiles(columns, bits=bits, max_tile_bytes=self._block_bytes, whole=np.zeros(1, dtype=np.int64))
        for offsets, sizes in zip(cut.offsets.tolist(), cut.sizes.tolist(), strict=True):
            yield Box(tuple(offsets), tuple(sizes))


def _equal(a: Bits, b: Bits) -> bool:
    return a.size == b.size and a.tobytes() == b.tobytes()


def _row_box(row: int, shape: tuple[int, ...]) -> Box:
    """The box of one row of the matrix that a tensor is seen as."""
    leading, behind = (shape[:-1], shape[-1:]) if len(shape) > 1 else (shape, ())
    index = tuple(int(i) for i in np.unravel_index(row, leading))
    return Box((*index, *(0 for _ in behind)), (*(1 for _ in index), *behind))


def _flat(place: Place, start: int, stop: int) -> Bits:
    """Elements ``start`` to ``stop`` in row-major order."""
    parts = [place.read(box).reshape(-1) for box in flat_boxes(start, stop, place.shape)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)
