"""The ``.metadata`` of a checkpoint that is being written, as the pickle that torch's own classes would give.

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

__all__ = ["WrittenChunk", "WrittenItem", "WrittenTensor", "metadata_pickle"]

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_VERSION = "1.0.0"
"""``CURRENT_DCP_VERSION`` of torch 2.13."""

_MEMOIZE, _POP, _NEW, _BUILD, _STOP, _MARK, _SETITEMS, _REDUCE, _NONE = (
    b"\x94", b"0", b")\x81", b"b", b".", b"(", b"u", b"R", b"N",
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


def metadata_pickle(
    tensors: Sequence[WrittenTensor],
    blobs: Sequence[tuple[str, KeyPath, WrittenItem]],
    *,
    save_id: str,
) -> bytes:
    """The bytes of ``.metadata``.

    Args:
        tensors: in the order in which the state dict is to be rebuilt.
        blobs: fqn, nested keys and item of each object that is not a tensor.
        save_id: identifies the save; torch only logs it.
    """
    pickle = _Pickle()
    # The root's class comes first, so that the first bytes of the file tell what it is.
    pickle.add(pickle.name(_METADATA, "Metadata", keep=True), _NEW, _EMPTY_DICT, _MARK)
    pickle.add(pickle.text("state_dict_metadata"))
    _state_dict_metadata(pickle, tensors, [fqn for fqn, _, _ in blobs])
    pickle.add(pickle.text("planner_data"))
    paths = [(tensor.fqn, tensor.path) for tensor in tensors] + [(fqn, path) for fqn, path, _ in blobs]
    _planner_data(pickle, paths)
    pickle.add(pickle.text("storage_data"))
    _storage_data(pickle, tensors, blobs)
    pickle.add(pickle.text("storage_meta"))
    pickle.add(pickle.name(_METADATA, "StorageMeta"), _NEW, _EMPTY_DICT, _MARK)
    for name, value in (("checkpoint_id", _NONE), ("save_id", _text(save_id)), ("load_id", _NONE)):
        pickle.add(pickle.text(name), value)
    pickle.add(pickle.text("modules"), _EMPTY_LIST, _SETITEMS, _BUILD)
    pickle.add(pickle.text("version"), _text(_VERSION), _SETITEMS, _BUILD, _STOP)
    return pickle.finished()


class _Pickle:
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
            self.add(_text(value))
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
                self.add(_text(part) if piece is None else piece)
                if piece is None:
                    self.remember(part)
            self.add(b"\x93")
            self.remember(key)
            found = self._known[key]
            self.add(b"" if keep else _POP)
        return b"" if keep else found


def _state_dict_metadata(pickle: _Pickle, tensors: Sequence[WrittenTensor], blobs: Sequence[str]) -> None:
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


def _properties(pickle: _Pickle, dtype: DType) -> bytes:
    """The piece that pushes the ``TensorProperties`` of a dtype, one object for all tensors of it.

    Its state is (dtype, layout, requires_grad, memory format, pin_memory), of which readers use the first.
    """
    key = ("properties", dtype.name)
    found = pickle.known(key)
    if found is not None:
        return found
    layout = pickle.name("torch.serialization", "_get_layout") + _text("torch.strided") + _TUPLE1 + _REDUCE
    memory_format = pickle.name(_METADATA, "_MEM_FORMAT_ENCODING") + _integer(0) + _TUPLE1 + _REDUCE
    element = pickle.name("torch", dtype.name)
    pickle.add(pickle.name(_METADATA, "TensorProperties"), _NEW)
    pickle.remember(key)
    pickle.add(_MARK, element, layout, _FALSE, memory_format, _FALSE, _TUPLE, _BUILD, _POP)
    return pickle.known(key) or b""


def _planner_data(pickle: _Pickle, paths: Iterable[tuple[str, KeyPath]]) -> None:
    """Pushes the dict of fqn to keys from the root of the state dict."""
    pickle.add(_EMPTY_DICT, _MARK)
    for fqn, path in paths:
        keys = [pickle.text(key) if isinstance(key, str) else _integer(key) for key in path]
        pickle.add(pickle.text(fqn), _MARK, *keys, _TUPLE)
    pickle.add(_SETITEMS)


def _storage_data(
    pickle: _Pickle, tensors: Sequence[WrittenTensor], blobs: Sequence[tuple[str, KeyPath, WrittenItem]]
) -> None:
    """Pushes the dict of MetadataIndex to _StorageInfo."""
    size = pickle.name("torch", "Size")
    index = pickle.name(_METADATA, "MetadataIndex") + _NEW + _EMPTY_DICT + _MARK + pickle.text("fqn")
    info = pickle.name(_FILESYSTEM, "_StorageInfo") + _NEW + _EMPTY_DICT + _MARK + pickle.text("relative_path")
    names = {name: pickle.text(name) for name in ("index", "offset", "length")}
    end = _SETITEMS + _BUILD

    def record(item: WrittenItem) -> tuple[bytes, ...]:
        path = pickle.text(item.path)
        return info, path, names["offset"], _integer(item.offset), names["length"], _integer(item.length), end

    pickle.add(_EMPTY_DICT, _MARK)
    for fqn, _, item in blobs:
        value = record(item)
        pickle.add(index, pickle.text(fqn), names["index"], _NONE, end, *value)
    for tensor in tensors:
        fqn_piece = pickle.text(tensor.fqn)
        for number, box in enumerate(tensor.chunks):
            value = record(box.item)
            offsets = _size(size, box.offsets)
            pickle.add(index, fqn_piece, names["index"], _integer(number), names["offset"], offsets, end, *value)
    pickle.add(_SETITEMS)


def _size(cls: bytes, sizes: Sequence[int]) -> bytes:
    """A ``torch.Size``: a call with one tuple."""
    return b"".join([cls, _MARK, *map(_integer, sizes), _TUPLE, _TUPLE1, _REDUCE])


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"\x8c" + bytes([len(raw)]) + raw if len(raw) < 256 else b"X" + struct.pack("<I", len(raw)) + raw


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes((value.bit_length() >> 3) + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw
