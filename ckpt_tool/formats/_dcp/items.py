"""The item of a chunk: one torch.save zip that holds one tensor, and where in it the elements lie.

All offsets are in bytes from the item's first byte. Knows how a zip is opened cheaply, not how items form a checkpoint.
Layout: torch ``serialization.py::_save`` (2.1 to 2.13); the payload of 2.13 starts at byte 704, that of 2.1 at 448, and
later where pickles are longer or sizes exceed 4 GiB, so it is always looked up.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import CkptError, FormatError, NotFound, Unsupported
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.tensors import QuantizedTensorRef, TensorRef
from ckpt_tool.formats._zip.directory import Read, is_big_endian, payload_offset, read_directory, read_member
from ckpt_tool.formats._zip.head import parse_item_head
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["HEAD_NBYTES", "ItemHeads", "Payload", "is_zip", "item_fault", "payload_from_directory"]

HEAD_NBYTES = 1 << 10
"""First bytes of an item that are read; in all that torch wrote so far the payload starts before their end."""
_TAIL_NBYTES = 4 << 10
"""Last bytes that hold the whole directory of an item: its eight entries take less than 1 KiB."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The tensor in an item."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    """Of the element at index 0."""
    length: int
    """From there to the end of the last element."""
    strides: tuple[int, ...] | None
    """In elements; None when packed row by row."""
    flags: int
    """``ChunkFlag`` bits."""
    end: int
    """Where the storage ends; the item goes on behind it."""

    def moved(self, start: int) -> Payload:
        """The same in an item that begins at byte ``start``."""
        return Payload(
            self.dtype, self.shape, start + self.offset, self.length, self.strides, self.flags, start + self.end
        )


class ItemHeads:
    """Payloads by the first bytes of items; each distinct head is parsed once.

    Items of equal dtype and shape have equal bytes up to the payload, so a checkpoint has few distinct heads.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Payload] = {}
        self._head_nbytes: list[int] = []

    def known(self, head: memoryview) -> Payload | None:
        """The payload of an item whose head was parsed before, the same record each time."""
        for nbytes in self._head_nbytes:
            found = self._known.get(bytes(head[:nbytes]))
            if found is not None:
                return found
        return None

    def payload(self, head: memoryview, where: str) -> Payload | None:
        """The payload of the item that starts with ``head``; None when only its directory can tell.

        Raises:
            FormatError: the item holds something else than a tensor.
        """
        found = self.known(head)
        if found is not None:
            return found
        data = bytes(head)
        parsed = parse_item_head(data)
        if parsed is None or parsed.payload_offset is None:
            return None
        tensor = _tensor_of(parsed.pickle, where)
        if tensor.storage.key != "0":
            return None
        payload = _place(tensor, parsed.payload_offset, is_big_endian=parsed.is_big_endian)
        if parsed.payload_offset not in self._head_nbytes:
            self._head_nbytes.append(parsed.payload_offset)
        self._known[data[: parsed.payload_offset]] = payload
        return payload


def item_fault(sizes: Mapping[str, int], item: FileRange, fqn: str, *, is_chunk: bool = False) -> CkptError | None:
    """What is wrong when an item does not lie in its file, None when it does.

    Args:
        sizes: bytes of each file that is there.
        item: where it should be.
        fqn: whose it is.
        is_chunk: whether it holds a part of that only.
    """
    nbytes = sizes.get(item.path)
    if nbytes is None:
        return NotFound(f"the file is missing; it holds {'a chunk of ' if is_chunk else ''}{fqn!r}", where=item.path)
    if item.end > nbytes:
        return FormatError(
            f"the item of {fqn!r} ends at byte {item.end:,}, the file has {nbytes:,} ({item.end - nbytes:,} missing)",
            where=item.path,
            hint="the file was cut: copy it again",
        )
    return None


def is_zip(head: bytes | memoryview) -> bool:
    r"""Whether an item begins as a zip, and not as a blob of safetensors of which the header has 19,280 bytes: "PK".

    >>> is_zip(b"PK\x03\x04" + bytes(8)), is_zip((19280).to_bytes(8, "little") + b"{"), is_zip(b"")
    (True, False, False)
    """
    return bytes(head[:2]) == b"PK" and bytes(head[8:9]) != b"{"


def payload_from_directory(read: Read, nbytes: int, where: str) -> Payload:
    """The payload of an item of ``nbytes`` bytes by its directory: seven small reads.

    Args:
        read: ``read(offset, length)`` within the item.
        nbytes: length of the item.
        where: names the item in messages.

    Raises:
        FormatError: no whole zip, or one that holds something else than a tensor.
        Unsupported: the storage is compressed within the zip.
    """
    directory = read_directory(read, nbytes, where=where, tail_nbytes=_TAIL_NBYTES)
    pickle = directory.record("data.pkl")
    if pickle is None:
        raise FormatError("the zip has no data.pkl, expected what torch.save writes", where=where)
    tensor = _tensor_of(read_member(read, pickle, where=where), where)
    member = directory.record(f"data/{tensor.storage.key}")
    if member is None:
        raise FormatError(f"the zip lacks the storage data/{tensor.storage.key}", where=where)
    if not member.is_stored:
        raise Unsupported("the tensor's bytes are compressed within the zip", where=where)
    if member.nbytes < tensor.storage.nbytes:
        raise FormatError(
            f"the storage has {counted(member.nbytes, 'byte')}, the pickle says {tensor.storage.nbytes:,}", where=where
        )
    start = payload_offset(read, member, where=where)
    return _place(tensor, start, is_big_endian=is_big_endian(read, directory, where=where))


def _tensor_of(pickle: bytes, where: str) -> TensorRef:
    """The tensor that a ``data.pkl`` describes; of a quantized one its integers."""
    value = load_pickle(pickle, where=f"{where} data.pkl")
    if isinstance(value, QuantizedTensorRef):
        value = value.tensor
    if not isinstance(value, TensorRef):
        raise FormatError(f"expected a strided tensor, got {type(value).__name__}", where=where)
    return value


def _place(tensor: TensorRef, start: int, *, is_big_endian: bool) -> Payload:
    itemsize = tensor.dtype.itemsize
    n_spanned = 0 if 0 in tensor.shape else 1
    if n_spanned:
        n_spanned += sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    swaps = is_big_endian and tensor.dtype.component_bytes > 1
    flags = (
        (ChunkFlag.BIG_ENDIAN if swaps else 0)
        | (ChunkFlag.CONJUGATE if tensor.conj else 0)
        | (ChunkFlag.NEGATE if tensor.neg else 0)
    )
    return Payload(
        dtype=tensor.dtype,
        shape=tensor.shape,
        offset=start + itemsize * tensor.offset,
        length=itemsize * n_spanned,
        strides=None if tensor.is_contiguous else tensor.strides,
        flags=int(flags),
        end=start + tensor.storage.nbytes,
    )
