"""Parts of a ``.metadata`` that is being written, as the pickle that torch's own classes would give.

A checkpoint has three records per chunk, so the pickle is put together from ready-made pieces, a few microseconds a
chunk; ``_pickle.dump`` walks objects and takes twenty times as long. Class layout: torch/distributed/checkpoint
metadata.py and filesystem.py, the same in torch 2.4 and 2.13 (``version``, which 2.4 does not know, becomes a plain
attribute there). Protocol 4 without frames, which are optional (PEP 3154).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_tool.dtypes import DType
from ckpt_tool.manifest.model import KeyPath

__all__ = [
    "MetadataPickle",
    "WrittenChunk",
    "WrittenItem",
    "WrittenTensor",
    "add_planner_data",
    "add_state_dict_metadata",
    "add_storage_data",
    "index_piece",
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
    """One tensor with its chunks."""

    fqn: str
    dtype: DType
    shape: Sequence[int]
    path: KeyPath
    chunks: Sequence[WrittenChunk]


class MetadataPickle:
    """A pickle in the making: its bytes, and the numbers under which values in it are remembered."""

    def __init__(self) -> None:
        self._bytes = bytearray(b"\x80\x04")
        self._known: dict[object, bytes] = {}

    def add(self, *pieces: bytes) -> None:
        """Append pieces."""
        self._bytes += b"".join(pieces)

    def finished(self) -> bytes:
        """The whole pickle."""
        return bytes(self._bytes)

    def known(self, key: object) -> bytes | None:
        """The piece that pushes what was remembered as ``key``."""
        return self._known.get(key)

    def remember(self, key: object) -> None:
        """Remember the value on top of the stack as ``key``."""
        number = len(self._known)
        self._known[key] = b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)
        self._bytes += _MEMOIZE

    def text(self, value: str) -> bytes:
        """The piece that pushes a string; on its first use the string is put into the pickle, and off the stack."""
        found = self._known.get(value)
        if found is None:
            self.add(text_piece(value))
            self.remember(value)
            self.add(_POP)
            found = self._known[value]
        return found

    def name(self, module: str, name: str, *, keep: bool = False) -> bytes:
        """The piece that pushes a class or function; with ``keep`` it stays on the stack, and the piece is empty."""
        key = (module, name)
        found = self._known.get(key)
        if found is None:
            for part in key:
                piece = self._known.get(part)
                self.add(text_piece(part) if piece is None else piece)
                if piece is None:
                    self.remember(part)
            self.add(b"\x93")
            self.remember(key)
            found = self._known[key]
            self.add(b"" if keep else _POP)
        return b"" if keep else found


def add_state_dict_metadata(pickle: MetadataPickle, tensors: Sequence[WrittenTensor], blobs: Sequence[str]) -> None:
    """Pushes the dict of fqn to TensorStorageMetadata or BytesStorageMetadata."""
    size = pickle.name("torch", "Size")
    record = pickle.name(_METADATA, "TensorStorageMetadata") + _NEW + _EMPTY_DICT + _MARK
    chunk = pickle.name(_METADATA, "ChunkStorageMetadata") + _NEW + _EMPTY_DICT + _MARK + pickle.text("offsets")
    names = {name: pickle.text(name) for name in ("properties", "size", "chunks", "sizes")}
    bytes_record = pickle.name(_METADATA, "BytesStorageMetadata") + _NEW
    pickle.add(_EMPTY_DICT, _MARK)
    for tensor in tensors:
        fqn, properties = pickle.text(tensor.fqn), _properties(pickle, tensor.dtype)
        pickle.add(fqn, record, names["properties"], properties, names["size"], _size(size, tensor.shape))
        pickle.add(names["chunks"], _EMPTY_LIST, _MARK)
        for box in tensor.chunks:
            pickle.add(chunk, _size(size, box.offsets), names["sizes"], _size(size, box.sizes), _SETITEMS, _BUILD)
        pickle.add(_APPENDS, _SETITEMS, _BUILD)
    for fqn_text in blobs:
        pickle.add(pickle.text(fqn_text), bytes_record)
    pickle.add(_SETITEMS)


def _properties(pickle: MetadataPickle, dtype: DType) -> bytes:
    """The piece that pushes the ``TensorProperties`` of a dtype, one object for all tensors of it.

    Its state is (dtype, layout, requires_grad, memory format, pin_memory), of which readers use the first.
    """
    key = ("properties", dtype.name)
    found = pickle.known(key)
    if found is not None:
        return found
    layout = pickle.name("torch.serialization", "_get_layout") + text_piece("torch.strided") + _TUPLE1 + _REDUCE
    memory_format = pickle.name(_METADATA, "_MEM_FORMAT_ENCODING") + integer_piece(0) + _TUPLE1 + _REDUCE
    element = pickle.name("torch", dtype.name)
    pickle.add(pickle.name(_METADATA, "TensorProperties"), _NEW)
    pickle.remember(key)
    pickle.add(_MARK, element, layout, _FALSE, memory_format, _FALSE, _TUPLE, _BUILD, _POP)
    return pickle.known(key) or b""


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
    blobs: Sequence[tuple[str, KeyPath, WrittenItem]],
    info_class: tuple[str, str],
) -> None:
    """Pushes the dict of MetadataIndex to ``_StorageInfo``, which is of the module and name ``info_class``."""
    info = pickle.name(*info_class) + _NEW + _EMPTY_DICT + _MARK + pickle.text("relative_path")
    names = {name: pickle.text(name) for name in ("offset", "length")}

    def record(item: WrittenItem) -> tuple[bytes, ...]:
        path = pickle.text(item.path)
        numbers = (names["offset"], integer_piece(item.offset), names["length"], integer_piece(item.length))
        return (info, path, *numbers, _SETITEMS, _BUILD)

    pickle.add(_EMPTY_DICT, _MARK)
    for fqn, _, item in blobs:
        value = record(item)
        pickle.add(index_piece(pickle, fqn, None, ()), *value)
    for tensor in tensors:
        for number, box in enumerate(tensor.chunks):
            value = record(box.item)
            pickle.add(index_piece(pickle, tensor.fqn, number, box.offsets), *value)
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
