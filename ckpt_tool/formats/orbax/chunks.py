"""From the values of a store to chunks: which box of which array each coded piece is, and where its bytes lie.

A store is keys with values, whether these are files or the entries of a database; keys below an array's name are its
chunks. Pieces that are compressed become coded entries of the file table.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from math import prod

import numpy as np

from ckpt_tool.checksum import crc32c
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._columns import Columns
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.orbax.arrays import DESCRIPTIONS, Array, parse_array
from ckpt_tool.formats.orbax.ocdbt import Inline, Value
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.model import FileEntry, FileRange
from ckpt_tool.manifest.tables import ChunkFlag, IntArray
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted, counted_of

__all__ = ["Filled", "Stored", "add_chunks", "arrays_of", "shard_indexes"]

_NO_PIECE = 0xFFFFFFFFFFFFFFFF
_PROCESS = re.compile(r"(?:^|/)ocdbt\.process_([0-9]{1,9})/")
_MAX_DESCRIPTION_NBYTES = 1 << 20
_MAX_MISSING = 10_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """One array and the values of its chunks, by place in its grid."""

    name: str
    array: Array
    values: Mapping[tuple[int, ...], Value]

    def lost(self, *, zeros_are_left_out: bool) -> Iterator[tuple[int, ...]]:
        """Places in the grid whose chunk is not there, or is shorter than any chunk is; the first ones of very many."""
        if not prod(self.array.shape):
            return
        yield from (index for index in self.values if self.is_cut(index))
        if not zeros_are_left_out:
            yield from islice(_absent(self), _MAX_MISSING)

    def is_cut(self, index: tuple[int, ...]) -> bool:
        """Whether a chunk has no bytes at all, or a shard not even an index."""
        return _nbytes(self.values[index]) < max(self.array.index_nbytes, 1)


@dataclass(slots=True)
class Filled:
    """Pieces that are not stored."""

    zeros: dict[str, int] = field(default_factory=dict)
    """By array: how many were taken for zeros, as its description says."""
    missing: dict[str, int] = field(default_factory=dict)
    """By array: how many are lost."""


def arrays_of(source: Source, values: Mapping[str, Value]) -> list[Stored]:
    """The arrays of a store, sorted by name. Descriptions that are no inline values cost a request each, at once.

    Raises:
        FormatError: a description is damaged.
        Unsupported: an array is coded in a way that is not known here.
    """
    described: dict[str, tuple[str, Value]] = {}
    for key, value in values.items():
        name, slash, last = key.rpartition("/")
        if slash and last in DESCRIPTIONS:
            described.setdefault(name, (key, value))
    far = [(name, key, value) for name, (key, value) in described.items() if isinstance(value, FileRange)]
    for _, key, value in far:
        if value.length > _MAX_DESCRIPTION_NBYTES:
            raise FormatError(f"{counted(value.length, 'byte')}, which describe no array", where=key)
    read = source.store.fetch([value for _, _, value in far]) if far else []
    texts = {name: data for (name, _, _), data in zip(far, read, strict=True)}
    arrays = {}
    for name, (key, value) in sorted(described.items()):
        array = parse_array(value.data if isinstance(value, Inline) else texts[name], key)
        if array is not None:
            arrays[name] = array
    chunks: dict[str, dict[tuple[int, ...], Value]] = {name: {} for name in arrays}
    for key, value in values.items():
        owner = _owner(key, arrays)
        if owner is not None:
            index = arrays[owner].chunk_index(key[len(owner) + 1 :])
            if index is not None:
                chunks[owner][index] = value
    return [Stored(name, array, chunks[name]) for name, array in arrays.items()]


def _owner(key: str, arrays: Mapping[str, Array]) -> str | None:
    """The array whose chunk a key may be: the longest name in front of a slash."""
    end = key.rfind("/")
    while end > 0:
        if key[:end] in arrays:
            return key[:end]
        end = key.rfind("/", 0, end)
    return None


def shard_indexes(source: Source, stored: Stored) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Offset and length of each coded piece of each shard, in the order of its grid; -1 for one that is not stored.

    Costs a request per shard, at once.

    Raises:
        FormatError: an index is damaged, or refers to bytes beyond the shard.
    """
    array = stored.array
    length = array.index_nbytes
    keys = [index for index in stored.values if not stored.is_cut(index)]
    far = [index for index in keys if isinstance(stored.values[index], FileRange)]
    places = [_part(stored.values[i], _nbytes(stored.values[i]) - length, length) for i in far]
    read = dict(zip(far, source.store.fetch(places) if far else [], strict=True))
    found = {}
    for index in keys:
        value = stored.values[index]
        data = value.data[-length:] if isinstance(value, Inline) else read[index]
        where = _where(stored, index)
        expected = struct.unpack("<I", data[-4:])[0]
        if crc32c(data[:-4]) != expected:
            raise FormatError("the index of the shard does not match its CRC-32C", where=where)
        numbers = struct.unpack(f"<{2 * array.n_inner}Q", data[:-4])
        pieces = list(zip(numbers[::2], numbers[1::2], strict=True))
        limit = _nbytes(value) - length
        for offset, nbytes in pieces:
            if offset != _NO_PIECE and offset + nbytes > limit:
                raise FormatError(f"a piece ends at byte {offset + nbytes:,} of {limit:,}", where=where)
        found[index] = [(-1, 0) if offset == _NO_PIECE else (offset, nbytes) for offset, nbytes in pieces]
    return found


def add_chunks(
    source: Source, columns: Columns, tensor: int, stored: Stored, filled: Filled, *, zeros_are_left_out: bool
) -> None:
    """Chunks of one array.

    Args:
        source: where the indexes of shards are read that have several pieces.
        columns: what they are added to.
        tensor: the array's id there.
        stored: the array.
        filled: what is not stored is counted there.
        zeros_are_left_out: whether pieces that are not stored hold the fill value; else they are lost.
    """
    array = stored.array
    if not prod(array.shape):
        return
    place = _Places(source, columns, stored)
    starts: list[tuple[int, ...]] = []
    n_missing = n_cut = 0
    indexes = shard_indexes(source, stored) if array.is_sharded and array.n_inner > 1 else None
    for index, value in stored.values.items():
        if stored.is_cut(index):
            n_cut += 1
            continue
        corner = tuple(i * n for i, n in zip(index, array.chunks, strict=True))
        for start, offset, nbytes in _pieces(array, value, None if indexes is None else indexes[index]):
            at = tuple(c + s for c, s in zip(corner, start, strict=True))
            if any(a >= n for a, n in zip(at, array.shape, strict=True)):
                continue
            if offset >= 0:
                starts.append(at)
                place.add(index, value, offset, nbytes, start)
            else:
                n_missing += 1
                if zeros_are_left_out:
                    starts.append(at)
                    place.add_zeros()
    for index in _absent(stored):
        n_missing += 1
        if zeros_are_left_out:
            starts.append(tuple(i * n for i, n in zip(index, array.chunks, strict=True)))
            place.add_zeros(prod(array.chunks))
    if zeros_are_left_out and n_missing:
        filled.zeros[stored.name] = n_missing
    n_lost = n_cut + (0 if zeros_are_left_out else n_missing)
    if n_lost:
        filled.missing[stored.name] = n_lost
    place.finish(tensor, starts)


def _absent(stored: Stored) -> Iterator[tuple[int, ...]]:
    grid = stored.array.grid
    count = prod(grid) - len(stored.values)
    if count <= 0:
        return
    if prod(grid) > _MAX_MISSING:
        raise FormatError(f"{counted_of(count, prod(grid), 'chunk', 'are')} not stored", where=stored.name)
    for index in product(*map(range, grid)):
        if index not in stored.values:
            yield index


def _pieces(
    array: Array, value: Value, index: Sequence[tuple[int, int]] | None
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Start within the chunk, offset within the value (-1: not stored) and length of each coded piece.

    A shard of one piece has it in front of its index: that is what writers do, and ``verify`` compares.
    """
    origin = (0,) * len(array.shape)
    if index is None:
        nbytes = _nbytes(value) - array.index_nbytes
        yield origin, (0 if nbytes > 0 else -1), nbytes
        return
    counts = [whole // part for whole, part in zip(array.chunks, array.inner, strict=True)]
    for cell, (offset, nbytes) in zip(product(*map(range, counts)), index, strict=True):
        yield tuple(c * n for c, n in zip(cell, array.inner, strict=True)), offset, nbytes


def _where(stored: Stored, index: tuple[int, ...]) -> str:
    """A chunk for messages: its file, where it has one of its own."""
    value = stored.values[index]
    is_file = isinstance(value, FileRange) and value.path.endswith(f"{stored.name}/{stored.array.chunk_key(index)}")
    return value.path if is_file and isinstance(value, FileRange) else f"{stored.name}{list(index)}"


def _nbytes(value: Value) -> int:
    return value.length if isinstance(value, FileRange) else len(value.data)


def _part(value: Value, offset: int, length: int) -> FileRange:
    """Bytes of a value that stands in a file."""
    if not isinstance(value, FileRange):
        raise FormatError("an inline value has no place of its own")
    return FileRange(value.path, value.offset + offset, length)


@dataclass(slots=True)
class _Places:
    """File, offset and rank of each piece of one array, as lists."""

    source: Source
    columns: Columns
    stored: Stored
    files: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    """Elements of the packed whole that the piece's rows are cut from: 0 for ``inner``, else those of zeros."""

    def add(self, index: tuple[int, ...], value: Value, offset: int, nbytes: int, start: tuple[int, ...]) -> None:
        """A stored piece."""
        array, name = self.stored.array, self.stored.name
        nbytes -= array.tail_nbytes
        label = f"{name}/{'.'.join(map(str, index))}" + (f"+{'.'.join(map(str, start))}" if any(start) else "")
        is_far = isinstance(value, FileRange)
        part = _part(value, offset, nbytes) if isinstance(value, FileRange) else value.part
        if array.codec is None and nbytes != array.inner_nbytes:
            where = _where(self.stored, index)
            raise FormatError(f"a chunk has {counted(nbytes, 'byte')}, expected {array.inner_nbytes:,}", where=where)
        at = 0
        if is_far and array.codec is None:
            entry = FileEntry(part.path, self.source.listing.nbytes(part.path))
            at = part.offset
        else:
            steps = [] if isinstance(value, FileRange) else [value.codec, f"slice:{value.offset + offset}:{nbytes}"]
            codec = "|".join(step for step in (*steps, array.codec) if step)
            entry = FileEntry(f"{part.path}!{label}", array.inner_nbytes, codec, part)
        process = _PROCESS.search(part.path)
        self.files.append(self.columns.add_file(entry))
        self.offsets.append(at)
        self.ranks.append(-1 if process is None else int(process[1]))
        self.widths.append(0)

    def add_zeros(self, numel: int = 0) -> None:
        """A piece (or a chunk of ``numel`` elements) that is not stored."""
        array = self.stored.array
        nbytes = (numel or prod(array.inner)) * array.dtype.itemsize
        anchor = next(iter(self.source.listing.sizes))  # of no bytes: coded entries have a part
        label = f"{self.stored.name}!zeros{len(self.files)}"  # of its own: two chunks in one place would be a fault
        entry = FileEntry(label, nbytes, f"zeros:{nbytes}", FileRange(anchor, 0, 0))
        self.files.append(self.columns.add_file(entry))
        self.offsets.append(0)
        self.ranks.append(-1)
        self.widths.append(numel)

    def finish(self, tensor: int, starts: Sequence[tuple[int, ...]]) -> None:
        """The columns of all pieces; where the array ends within one, its rows are longer than the box."""
        array = self.stored.array
        ndim = len(array.shape)
        n = len(starts)
        offsets = np.array(starts, dtype=np.int64).reshape(n, ndim)
        whole = np.where(
            np.array(self.widths, dtype=np.int64)[:, None] > 0,
            np.array(array.chunks, dtype=np.int64)[None, :],
            np.array(array.inner, dtype=np.int64)[None, :],
        ).reshape(n, ndim)
        sizes = np.minimum(whole, np.array(array.shape, dtype=np.int64) - offsets)
        strides = _strides(whole, array.order)
        spans = ((sizes - 1) * strides).sum(axis=1) + 1
        is_cut = bool((sizes != whole).any())
        self.columns.add_chunks(
            tensor,
            offsets=offsets,
            sizes=sizes,
            file=self.files,
            offset=self.offsets,
            length=spans * array.dtype.itemsize,
            rank=self.ranks,
            flags=int(ChunkFlag.BIG_ENDIAN) if array.is_big_endian else 0,
            strides=strides if is_cut or array.order is not None else None,
        )


def _strides(whole: IntArray, order: tuple[int, ...] | None) -> IntArray:
    """int64[n, ndim]: strides of packed boxes whose dimensions lie in ``order``, the slowest first."""
    if order is None:
        return contiguous_strides_columns(whole)
    strides = np.empty_like(whole)
    strides[:, order] = contiguous_strides_columns(whole[:, order])
    return strides
