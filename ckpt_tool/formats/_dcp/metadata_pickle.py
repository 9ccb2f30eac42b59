"""Parts of a ``.metadata`` that is being written, as the pickle that torch's own classes would give.

A checkpoint has three records per chunk, so these are rows of numbers (``pickle_rows``) and the rest is put together
from ready-made pieces; ``_pickle.dump`` walks objects, which takes a hundred times as long. Class layout:
torch/distributed/checkpoint metadata.py and filesystem.py, the same in torch 2.4 and 2.13 (``version``, which 2.4 does
not know, becomes a plain attribute there). Protocol 4 without frames, which are optional (PEP 3154).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.formats._dcp.pickle_rows import Column, Recalled, Rows
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.tables import IntArray, pad_shapes
from ckpt_tool.records import dataclass

__all__ = [
    "MetadataPickle",
    "WrittenChunk",
    "WrittenChunks",
    "WrittenItem",
    "WrittenTensor",
    "add_planner_data",
    "add_state_dict_metadata",
    "add_storage_data",
    "begin_metadata",
    "index_piece",
    "integer_piece",
    "text_piece",
]

_METADATA = "torch.distributed.checkpoint.metadata"
_MEMOIZE, _POP, _NEW, _BUILD, _MARK, _SETITEMS, _REDUCE, _NONE = (
    b"\x94", b"0", b")\x81", b"b", b"(", b"u", b"R", b"N",
)  # fmt: skip
_EMPTY_DICT, _EMPTY_LIST, _APPENDS, _TUPLE1, _TUPLE, _FALSE = b"}", b"]", b"e", b"\x85", b"t", b"\x89"


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """Where one item lies."""

    path: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """One box, in global coordinates, and its item."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    item: WrittenItem


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """One tensor; its chunks are the next ``n_chunks`` rows of a `WrittenChunks`."""

    fqn: str
    dtype: DType
    shape: Sequence[int]
    path: KeyPath
    n_chunks: int


@dataclass(frozen=True, eq=False)
class WrittenChunks:
    """Boxes and their items, in the order of tensors."""

    paths: Sequence[str]
    offsets: IntArray  # int64[n, D], global coordinates, padded behind
    sizes: IntArray  # int64[n, D]
    file: Column  # int[n], row of paths
    offset: IntArray  # int64[n], byte of the item
    length: IntArray  # int64[n], bytes of the item

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.file)

    @classmethod
    def of(cls, chunks: Sequence[WrittenChunk]) -> WrittenChunks:
        """Columns of records."""
        width = max((len(chunk.sizes) for chunk in chunks), default=0)
        paths = {path: row for row, path in enumerate(dict.fromkeys(chunk.item.path for chunk in chunks))}
        return cls(
            tuple(paths),
            pad_shapes([chunk.offsets for chunk in chunks], width, 0),
            pad_shapes([chunk.sizes for chunk in chunks], width, 1),
            np.array([paths[chunk.item.path] for chunk in chunks], dtype=np.int64),
            np.array([chunk.item.offset for chunk in chunks], dtype=np.int64),
            np.array([chunk.item.length for chunk in chunks], dtype=np.int64),
        )


class MetadataPickle:
    """A pickle in the making: its pieces, and the numbers under which values in it are remembered.

    ``properties`` are the module of ``TensorProperties``, and what its memory formats are called there.
    """

    def __init__(self, properties: tuple[str, str] = (_METADATA, "_MEM_FORMAT_ENCODING")) -> None:
        self.properties = properties
        self._pieces: list[bytes | tuple[Rows, int, int]] = [b"\x80\x04"]
        self._known: dict[object, int] = {}
        self.nbytes = 2
        """Length of the pickle so far."""

    def add(self, *pieces: bytes) -> None:
        """Append pieces."""
        self._pieces += pieces
        self.nbytes += sum(map(len, pieces))

    def add_rows(self, rows: Rows, first: int, stop: int) -> None:
        """Append the records ``first:stop``; they are made when the pickle is."""
        self._pieces.append((rows, first, stop))
        self.nbytes += (stop - first) * rows.row_nbytes

    def finished(self) -> bytes:
        """The whole pickle."""
        whole = io.BytesIO()  # whose bytes are handed out, not copied
        for piece in self._pieces:
            if isinstance(piece, bytes):
                whole.write(piece)
            else:
                rows, first, stop = piece
                whole.writelines(rows.written(first, stop))
        return whole.getvalue()

    def number(self, value: str) -> int:
        """The number under which a string is remembered."""
        self.text(value)
        return self._known[value]

    def known(self, key: object) -> bytes | None:
        """The piece that pushes what was remembered as ``key``."""
        number = self._known.get(key)
        return None if number is None else _recall_piece(number)

    def remember(self, key: object) -> None:
        """Remember the value on top of the stack as ``key``."""
        self._known[key] = len(self._known)
        self.add(_MEMOIZE)

    def text(self, value: str) -> bytes:
        """The piece that pushes a string; on its first use the string is put into the pickle, and off the stack."""
        found = self._known.get(value)
        if found is None:
            found = len(self._known)
            self.add(text_piece(value))
            self.remember(value)
            self.add(_POP)
        return _recall_piece(found)

    def name(self, module: str, name: str, *, keep: bool = False) -> bytes:
        """The piece that pushes a class or function; with ``keep`` it stays on the stack, and the piece is empty."""
        key = (module, name)
        found = self.known(key)
        if found is None:
            for part in key:
                piece = self.known(part)
                self.add(text_piece(part) if piece is None else piece)
                if piece is None:
                    self.remember(part)
            self.add(b"\x93")
            self.remember(key)
            found = _recall_piece(self._known[key])
            self.add(b"" if keep else _POP)
        return b"" if keep else found


def add_state_dict_metadata(
    pickle: MetadataPickle, tensors: Sequence[WrittenTensor], chunks: WrittenChunks, blobs: Sequence[str]
) -> None:
    """Pushes the dict of fqn to TensorStorageMetadata or BytesStorageMetadata."""
    size = pickle.name("torch", "Size")
    record = pickle.name(_METADATA, "TensorStorageMetadata") + _NEW + _EMPTY_DICT + _MARK
    chunk = pickle.name(_METADATA, "ChunkStorageMetadata") + _NEW + _EMPTY_DICT + _MARK + pickle.text("offsets")
    names = {name: pickle.text(name) for name in ("properties", "size", "chunks", "sizes")}
    bytes_record = pickle.name(_METADATA, "BytesStorageMetadata") + _NEW
    rows_of = {
        ndim: Rows(
            n,
            [chunk, *_size_parts(size, chunks.offsets, ndim), names["sizes"],
             *_size_parts(size, chunks.sizes, ndim), _SETITEMS + _BUILD],
            rows,
        )
        for ndim, n, rows in _by_ndim(tensors)
    }  # fmt: skip
    used = dict.fromkeys(rows_of, 0)
    pickle.add(_EMPTY_DICT, _MARK)
    for tensor in tensors:
        fqn, properties, ndim = pickle.text(tensor.fqn), _properties(pickle, tensor.dtype), len(tensor.shape)
        head = (fqn, record, names["properties"], properties, names["size"], _size(size, tensor.shape))
        pickle.add(b"".join((*head, names["chunks"], _EMPTY_LIST, _MARK)))
        pickle.add_rows(rows_of[ndim], used[ndim], used[ndim] + tensor.n_chunks)
        used[ndim] += tensor.n_chunks
        pickle.add(_APPENDS + _SETITEMS + _BUILD)
    for fqn_text in blobs:
        pickle.add(pickle.text(fqn_text), bytes_record)
    pickle.add(_SETITEMS)


def _by_ndim(tensors: Sequence[WrittenTensor]) -> list[tuple[int, int, npt.NDArray[np.int32] | None]]:
    """Dimensions, number of chunks with as many, and their rows, None for all."""
    counts = np.array([tensor.n_chunks for tensor in tensors], dtype=np.int64)
    dims = np.array([len(tensor.shape) for tensor in tensors], dtype=np.int64)
    different = sorted(set(dims.tolist()))
    if len(different) == 1:
        return [(different[0], int(counts.sum()), None)]
    ndim = np.repeat(dims.astype(np.int8), counts)
    found = ((n, np.flatnonzero(ndim == n).astype(np.int32)) for n in different)
    return [(n, len(rows), rows) for n, rows in found]


def _size_parts(cls: bytes, columns: IntArray, ndim: int) -> list[bytes | Column | Recalled]:
    """A column of ``torch.Size``."""
    return [cls + _MARK, *columns.T[:ndim], _TUPLE + _TUPLE1 + _REDUCE]


def _properties(pickle: MetadataPickle, dtype: DType) -> bytes:
    """The piece that pushes the ``TensorProperties`` of a dtype, one object for all tensors of it.

    Its state is (dtype, layout, requires_grad, memory format, pin_memory), of which readers use the first.
    """
    key = ("properties", dtype.name)
    found = pickle.known(key)
    if found is not None:
        return found
    layout = pickle.name("torch.serialization", "_get_layout") + text_piece("torch.strided") + _TUPLE1 + _REDUCE
    module, encoding = pickle.properties
    memory_format = pickle.name(module, encoding) + integer_piece(0) + _TUPLE1 + _REDUCE
    element = pickle.name("torch", dtype.name)
    pickle.add(pickle.name(module, "TensorProperties"), _NEW)
    pickle.remember(key)
    pickle.add(_MARK, element, layout, _FALSE, memory_format, _FALSE, _TUPLE, _BUILD, _POP)
    return pickle.known(key) or b""


def begin_metadata(
    pickle: MetadataPickle,
    module: str,
    tensors: Sequence[WrittenTensor],
    chunks: WrittenChunks,
    blobs: Sequence[tuple[str, KeyPath, WrittenItem]],
    info_class: tuple[str, str],
) -> None:
    """Pushes the ``Metadata`` of ``module`` and the fields that every dialect has; the dict of its fields stays open.

    The root's class comes first, so that the first bytes of the file tell what it is.
    """
    pickle.add(pickle.name(module, "Metadata", keep=True), _NEW, _EMPTY_DICT, _MARK)
    pickle.add(pickle.text("state_dict_metadata"))
    add_state_dict_metadata(pickle, tensors, chunks, [fqn for fqn, _, _ in blobs])
    pickle.add(pickle.text("planner_data"))
    add_planner_data(pickle, [*((tensor.fqn, tensor.path) for tensor in tensors), *((n, p) for n, p, _ in blobs)])
    pickle.add(pickle.text("storage_data"))
    add_storage_data(pickle, tensors, chunks, blobs, info_class)


def add_planner_data(pickle: MetadataPickle, paths: Iterable[tuple[str, KeyPath]]) -> None:
    """Pushes the dict of fqn to keys from the root of the state dict."""
    pickle.add(_EMPTY_DICT, _MARK)
    for fqn, path in paths:
        keys = [pickle.text(key) if isinstance(key, str) else integer_piece(key) for key in path]
        pickle.add(pickle.text(fqn), _MARK, *keys, _TUPLE)
    pickle.add(_SETITEMS)


def add_storage_data(
    pickle: MetadataPickle,
    tensors: Sequence[WrittenTensor],
    chunks: WrittenChunks,
    blobs: Sequence[tuple[str, KeyPath, WrittenItem]],
    info_class: tuple[str, str],
) -> None:
    """Pushes the dict of MetadataIndex to ``_StorageInfo``, which is of the module and name ``info_class``."""
    info = pickle.name(*info_class) + _NEW + _EMPTY_DICT + _MARK + pickle.text("relative_path")
    names = {name: pickle.text(name) for name in ("offset", "length", "fqn", "index")}
    size = pickle.name("torch", "Size")
    index = pickle.name(_METADATA, "MetadataIndex") + _NEW + _EMPTY_DICT + _MARK + names["fqn"]
    n_chunks = np.array([tensor.n_chunks for tensor in tensors], dtype=np.int64)
    fqn = np.repeat(np.array([pickle.number(tensor.fqn) for tensor in tensors], dtype=np.int32), n_chunks)
    first = (np.cumsum(n_chunks) - n_chunks).astype(np.int32)
    number = np.arange(len(fqn), dtype=np.int32) - np.repeat(first, n_chunks)
    path = np.array([pickle.number(path) for path in chunks.paths], dtype=np.int32)[chunks.file]
    placed = [(blob, pickle.text(blob), pickle.text(item.path), item) for blob, _, item in blobs]
    pickle.add(_EMPTY_DICT, _MARK)
    for blob, _, item_path, item in placed:
        place = (names["offset"], integer_piece(item.offset), names["length"], integer_piece(item.length))
        pickle.add(index_piece(pickle, blob, None, ()), info, item_path, *place, _SETITEMS + _BUILD)
    for ndim, n, rows in _by_ndim(tensors):
        records = Rows(
            n,
            [index, Recalled(fqn), names["index"], number, names["offset"],
             *_size_parts(size, chunks.offsets, ndim), _SETITEMS + _BUILD + info, Recalled(path),
             names["offset"], chunks.offset, names["length"], chunks.length, _SETITEMS + _BUILD],
            rows,
        )  # fmt: skip
        pickle.add_rows(records, 0, n)
    pickle.add(_SETITEMS)


def index_piece(pickle: MetadataPickle, fqn: str, number: int | None, offsets: Sequence[int]) -> bytes:
    """The piece that pushes a MetadataIndex: of the chunk ``number`` at ``offsets``, or of an object (None)."""
    size = pickle.name("torch", "Size")
    index = pickle.name(_METADATA, "MetadataIndex") + _NEW + _EMPTY_DICT + _MARK + pickle.text("fqn")
    start = index + pickle.text(fqn) + pickle.text("index")
    if number is None:
        return start + _NONE + _SETITEMS + _BUILD
    offset = pickle.text("offset")
    return start + integer_piece(number) + offset + _size(size, offsets) + _SETITEMS + _BUILD


def _size(cls: bytes, sizes: Sequence[int]) -> bytes:
    """A ``torch.Size``: a call with one tuple."""
    return b"".join([cls, _MARK, *map(integer_piece, sizes), _TUPLE, _TUPLE1, _REDUCE])


def _recall_piece(number: int) -> bytes:
    """The piece that pushes a remembered value."""
    return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)


def text_piece(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"\x8c" + bytes([len(raw)]) + raw if len(raw) < 256 else b"X" + struct.pack("<I", len(raw)) + raw


def integer_piece(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw
