"""A digest is a small value of a tensor's content that no cut, order or container of its bytes changes.

The digest of a tensor is a sum of parts, one for each run of its row-major bytes, and the parts of disjoint runs add up
in any order: a file, a rank or a thread sums the runs that it has, and the sums are added. Two kinds:

- ``crc32``, always: the CRC-32 of the tensor's row-major bytes, as zlib computes it. A part is what the run adds to the
  CRC's linear form, shifted by the bytes behind it. It costs what reading costs, and any other program can check it; it
  finds every burst of up to 32 bits and misses one of 4 billion other changes.
- ``wide``, on request: two sums modulo 2^64 of the tensor's 32-bit words, each multiplied by a weight of its place. It
  is for comparing many tensors, where one of 4 billion is too often, and takes three times as long.

Type and shape are part of the digest, because neither sum sees them. Both guard against accidents; neither is a
signature: who wants to can make another tensor of the same digest. Knows no file and no layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32, crc32_combine
from ckpt_tool.errors import CoverageError
from ckpt_tool.records import dataclass

__all__ = [
    "ContentDigest",
    "Part",
    "content_digest",
    "crc32_of_zeros",
    "folded_form",
    "linear_forms",
    "run_part",
    "shifted_crc32s",
    "wide_sums",
]

_ONES = 0xFFFFFFFF
_WORDS_PER_ROW = 4096
"""Words that share a row weight."""
_MASK = (1 << 64) - 1
_FEW = 512
"""So many values are shifted one by one: columns cost half a millisecond whatever their length."""


@dataclass(frozen=True, slots=True)
class ContentDigest:
    """What is kept of a tensor; equal exactly when type, shape and sums are."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int
    """Of the tensor's row-major bytes, little endian."""
    wide: int | None = None
    """128 bits, None where it was not asked for."""

    def matches(self, other: ContentDigest) -> bool:
        """Whether nothing that both have differs."""
        is_alike = (self.dtype, self.shape, self.crc32) == (other.dtype, other.shape, other.crc32)
        return is_alike and (self.wide is None or other.wide is None or self.wide == other.wide)


@dataclass(frozen=True, slots=True)
class Part:
    """The sum over some runs of a tensor's row-major bytes; ``Part()`` is that over none."""

    nbytes: int = 0
    """Bytes summed."""
    linear: int = 0
    """Their share of the CRC-32's linear form."""
    lanes: tuple[int, int] = (0, 0)
    """Their share of the two wide sums."""

    def __add__(self, other: Part) -> Part:
        """The sum over the runs of both, which must be disjoint."""
        first, second = ((a + b) & _MASK for a, b in zip(self.lanes, other.lanes, strict=True))
        return Part(self.nbytes + other.nbytes, self.linear ^ other.linear, (first, second))


def content_digest(part: Part, dtype: str, shape: Sequence[int], nbytes: int, *, wide: bool) -> ContentDigest:
    """The digest of a tensor of ``nbytes`` bytes, from the sum over all of them.

    Raises:
        CoverageError: the runs that were summed do not add up to the tensor.
    """
    if part.nbytes != nbytes:
        raise CoverageError(f"a digest needs all of the tensor's bytes, expected {nbytes:,}, got {part.nbytes:,}")
    value = part.linear ^ crc32_of_zeros(nbytes)
    both = (part.lanes[0] << 64) | part.lanes[1]
    return ContentDigest(dtype, tuple(shape), value, both if wide else None)


def crc32_of_zeros(nbytes: int) -> int:
    """The CRC-32 of so many zero bytes.

    >>> import zlib
    >>> crc32_of_zeros(1000) == zlib.crc32(bytes(1000))
    True
    """
    return crc32_combine(_ONES, 0, nbytes) ^ _ONES


def run_part(data: npt.NDArray[np.uint8], offset: int, total_nbytes: int, *, wide: bool) -> Part:
    """The part of one run.

    >>> import zlib
    >>> text = np.frombuffer(b"hello world!", dtype=np.uint8)
    >>> both = run_part(text[7:], 7, 12, wide=False) + run_part(text[:7], 0, 12, wide=False)
    >>> content_digest(both, "uint8", (12,), 12, wide=False).crc32 == zlib.crc32(b"hello world!")
    True

    Args:
        data: uint8[n], contiguous.
        offset: of its first byte in the tensor's row-major bytes.
        total_nbytes: of the tensor.
        wide: whether the wide sums are taken.
    """
    form = linear_forms(np.array([crc32(data.data)], dtype=np.uint32), [len(data)], [total_nbytes - offset - len(data)])
    return Part(len(data), int(form[0]), wide_sums(data, offset) if wide else (0, 0))


def linear_forms(
    crc32s: npt.NDArray[np.uint32], nbytes: npt.ArrayLike, behind: npt.ArrayLike
) -> npt.NDArray[np.uint32]:
    """uint32[n]: shares of runs in a CRC's linear form, from their own CRC-32s; columns of equal length.

    Args:
        crc32s: uint32[n].
        nbytes: int64[n], of each run.
        behind: int64[n], bytes of the tensor behind each run.
    """
    length, after = np.asarray(nbytes, dtype=np.int64), np.asarray(behind, dtype=np.int64)
    ones = np.full(len(length), _ONES, dtype=np.uint32)
    # crc(run) is the run's linear form, what the initial ones become over the run, and ones again.
    return shifted_crc32s(crc32s ^ ones, after) ^ shifted_crc32s(ones, after + length)


def shifted_crc32s(values: npt.ArrayLike, nbytes: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """uint32[n]: what CRC registers become after so many zero bytes each, in columns.

    Law: ``crc32_combine(a, 0, n) == shifted_crc32s([a], [n])[0]``.
    """
    found = np.array(values, dtype=np.uint32)
    left = np.array(nbytes, dtype=np.int64)
    if len(found) <= _FEW:
        each = [crc32_combine(value, 0, n) for value, n in zip(found.tolist(), left.tolist(), strict=True)]
        return np.array(each, dtype=np.uint32)
    bit = 0
    while left.any():
        rows = np.flatnonzero(left & 1)
        if len(rows):
            tables, picked = _shift_tables(bit), found[rows]
            result = tables[0][picked & 0xFF]
            for byte in (1, 2, 3):
                result = result ^ tables[byte][(picked >> np.uint32(8 * byte)) & 0xFF]
            found[rows] = result
        left >>= 1
        bit += 1
    return found


def folded_form(forms: npt.NDArray[np.uint32], counts: Sequence[int], steps: Sequence[int]) -> int:
    """The share of equal runs in a linear form, as it is right behind the last of them.

    Law: what ``shifted_crc32s`` makes of the forms, each shifted by the bytes from its run's end to the last one's, in
    one sum. Costs two shifts for each run, whatever the distances.

    Args:
        forms: uint32[n], of the runs by themselves, in the order of a loop nest.
        counts: iterations of each loop, outermost first.
        steps: bytes that one iteration of each loop moves.
    """
    values = forms.reshape(tuple(counts))
    for step in reversed(steps):
        while values.shape[-1] > 1:
            if values.shape[-1] % 2:  # nothing, however far it is shifted, stays nothing
                values = np.concatenate([np.zeros((*values.shape[:-1], 1), dtype=np.uint32), values], axis=-1)
            values = _shifted_alike(values[..., 0::2], step) ^ values[..., 1::2]
            step *= 2  # noqa: PLW2901 - neighbours are now twice as far apart
        values = values[..., 0]
    return int(values)


def _shifted_alike(values: npt.NDArray[np.uint32], nbytes: int) -> npt.NDArray[np.uint32]:
    """What CRC registers become after the same number of zero bytes."""
    if values.size <= _FEW:
        each = [crc32_combine(value, 0, nbytes) for value in values.reshape(-1).tolist()]
        return np.array(each, dtype=np.uint32).reshape(values.shape)
    tables = _tables_of(nbytes)
    found: npt.NDArray[np.uint32] = tables[0][values & 0xFF]
    for byte in (1, 2, 3):
        found = found ^ tables[byte][(values >> np.uint32(8 * byte)) & 0xFF]
    return found


@cache
def _shift_tables(bit: int) -> npt.NDArray[np.uint32]:
    """uint32[4, 256]: what ``2 ** bit`` zero bytes make of a register, by the value of each of its bytes."""
    return _tables_of(1 << bit)


@lru_cache(maxsize=256)
def _tables_of(nbytes: int) -> npt.NDArray[np.uint32]:
    """uint32[4, 256]: the same for any number of zero bytes."""
    basis = [crc32_combine(1 << at, 0, nbytes) for at in range(32)]
    tables = np.zeros((4, 256), dtype=np.uint32)
    for byte in range(4):
        for at in range(8):
            has_bit = (np.arange(256) >> at) & 1 == 1
            tables[byte, has_bit] ^= np.uint32(basis[8 * byte + at])
    return tables


def wide_sums(data: npt.NDArray[np.uint8], offset: int) -> tuple[int, int]:
    """The two wide sums of a run; words count from the first byte of the tensor, and a cut word has zeros elsewhere."""
    before = offset % 4
    if before or (before + len(data)) % 4:
        padded = np.zeros(before + len(data) + (-(before + len(data)) % 4), dtype=np.uint8)
        padded[before : before + len(data)] = data
        data = padded
    words = data.view("<u4")
    first_row, column = divmod(offset // 4, _WORDS_PER_ROW)
    head = min((_WORDS_PER_ROW - column) % _WORDS_PER_ROW, len(words))  # of a row that began before
    n_rows = (len(words) - head) // _WORDS_PER_ROW
    tail = head + n_rows * _WORDS_PER_ROW
    whole_row = first_row + (column > 0)
    spans = [(words[None, :head], first_row, column)] if head else []
    spans += [(words[head:tail].reshape(n_rows, _WORDS_PER_ROW), whole_row, 0)] if n_rows else []
    spans += [(words[None, tail:], whole_row + n_rows, 0)] if tail < len(words) else []
    first = second = 0
    for rows, row, column in spans:
        first += _weighted(rows, 0, row, column)
        second += _weighted(rows, 1, row, column)
    return first & _MASK, second & _MASK


def _weighted(rows: npt.NDArray[np.uint32], lane: int, first_row: int, column: int) -> int:
    """The sum of one lane over rows of words of which the first begins at a column."""
    sums = np.einsum("rc,c->r", rows, _column_weights(lane)[column : column + rows.shape[1]], dtype=np.uint64)
    # Odd, so that a weight takes no bits away from its row's sum.
    index = np.arange(first_row, first_row + len(rows), dtype=np.uint64)
    return int((sums * (_random(2 * lane + 1, index) | np.uint64(1))).sum(dtype=np.uint64))


@cache
def _column_weights(lane: int) -> npt.NDArray[np.uint64]:
    """uint64[_WORDS_PER_ROW]: weights of words within a row."""
    return _random(2 * lane, np.arange(_WORDS_PER_ROW, dtype=np.uint64))


def _random(stream: int, index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One value for each index, of one of several unrelated streams.

    A stream's start is itself mixed: streams that begin at small numbers overlap, and products of their values commute,
    so that two sums then miss the same changes. The mixer is splitmix64's (Steele, Lea and Flood 2014).
    """
    start = _stream_start(stream)
    return _mixed(_mixed(index + start) ^ start)


@cache
def _stream_start(stream: int) -> np.uint64:
    return np.uint64(_mixed(np.array([(stream + 1) * 0xD1B54A32D192ED03 & _MASK], dtype=np.uint64))[0])


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    found = values + np.uint64(0x9E3779B97F4A7C15)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))
