"""A torch file laid out: one nested object with its tensors, as torch.save (2.13) would write it, before any payload.

Only what ``torch.load(weights_only=True)`` reads comes from here; objects that are carried over are their own affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from ckpt_tool.checksum import crc32, crc32_combine
from ckpt_tool.dtypes import DType
from ckpt_tool.formats._element_types import check_types
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.nodes import Device, OrderedMap, PathText, Size
from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.formats._zip.layout import ZipLayout, torch_members
from ckpt_tool.formats.base import Segment
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.model import Blob, KeyPath
from ckpt_tool.manifest.tables import IntArray, TensorTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Storage", "WrittenFile", "blob_entry", "check_dtypes", "fresh_tensor", "weights_only_notes"]

_ATOMS = (bool, int, float, str, bytes, DType, Size, Device)
_SHOWN = 3
_N_SMALL_MEMBERS = 4  # data.pkl, .format_version, .storage_alignment, byteorder stand before the storages


def fresh_tensor(key: int, dtype: DType, shape: tuple[int, ...]) -> TensorRef:
    """A packed row-major tensor that fills the storage ``key`` of a file."""
    numel = 1
    for size in shape:
        numel *= size
    # torch.load has no typed storage of complex32, and torch.save writes it untyped (torch 2.13).
    is_typed = dtype.storage is not None and dtype.name != "complex32"
    storage = StorageRef(dtype if is_typed else None, str(key), "cpu", numel if is_typed else dtype.nbytes(numel))
    return TensorRef(storage, 0, shape, contiguous_strides(shape), dtype)


def check_dtypes(tensors: TensorTable) -> None:
    """Nothing, when torch has plain tensors of all these dtypes.

    Raises:
        Unsupported: it has not; the message names each dtype with a tensor.
    """
    check_types(
        tensors,
        "torch has no plain tensors of",
        lambda kind, _: kind.kind not in ("quantized", "opaque") and kind.bits % 8 == 0,
    )


def blob_entry(blob: Blob) -> tuple[KeyPath, Any]:
    """Path and value of an object that is to be pickled into the file.

    Raises:
        Unsupported: it is not loaded, or has tensors inside, whose bytes are elsewhere.
    """
    check_objects([blob])
    return blob.path or (blob.fqn,), blob.value


def weights_only_notes(blobs: Iterable[Blob]) -> tuple[str, ...]:
    """A note about objects for which ``torch.load(weights_only=True)`` refuses a file; none when there are none."""
    refused = list(dict.fromkeys(blob.fqn for blob in blobs if not _is_plain(blob.value)))
    if not refused:
        return ()
    shown = ", ".join(refused[:_SHOWN]) + (" ..." if len(refused) > _SHOWN else "")
    return (
        (
            f"torch.load needs weights_only=False for {counted(len(refused), 'object')}: {shown}; --exclude leaves "
            "them out"
        ),
    )


def _is_plain(root: Any) -> bool:
    """Whether a value has only what torch's restricted unpickler allows (2.4 to 2.13): no numpy, no other classes."""
    waiting = [root]
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        if value is None or id(value) in seen:
            continue
        if isinstance(value, _ATOMS) and not isinstance(value, PathText | np.generic):
            continue
        seen.add(id(value))
        if type(value) in (dict, OrderedMap):
            waiting += [*value.keys(), *value.values()]
        elif type(value) in (list, tuple, set):
            waiting += value
        else:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Storage:
    """What fills one storage of a file: rows of the request, with zeros between and behind them, or known bytes."""

    nbytes: int
    rows: tuple[int, ...] = ()
    """Of the request, by place."""
    starts: tuple[int, ...] = ()
    """Byte of the storage at which each row begins."""
    lengths: tuple[int, ...] = ()
    """Bytes of each row."""
    data: bytes | None = None
    """All bytes, where these are known."""

    @classmethod
    def of_row(cls, row: int, nbytes: int) -> Storage:
        """A storage that one row fills; an empty one has the row -1."""
        return cls(nbytes, (row,), (0,), (nbytes,)) if row >= 0 else cls(nbytes)

    @classmethod
    def joined(cls, nbytes: int, parts: Sequence[Storage]) -> Storage:
        """A storage of ``nbytes`` with what fills others, whose starts are counted from its own first byte."""
        rows, starts, lengths = (
            tuple(chain.from_iterable(getattr(part, name) for part in parts)) for name in ("rows", "starts", "lengths")
        )
        return cls(nbytes, rows, starts, lengths)

    def crc32(self, crc32s: Sequence[int]) -> int:
        """The CRC-32 of its bytes, given that of each row of the request."""
        found = at = 0
        for row, start, length in zip(self.rows, self.starts, self.lengths, strict=True):
            found = crc32_combine(_then_zeros(found, start - at), int(crc32s[row]), length)
            at = start + length
        return _then_zeros(found, self.nbytes - at)


def _then_zeros(crc: int, count: int) -> int:
    """The CRC-32 of bytes with ``count`` zeros behind them."""
    return crc32_combine(crc, crc32(bytes(count)), count) if count else crc


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file's layout."""

    path: str
    zip: ZipLayout
    storages: tuple[Storage, ...]

    @classmethod
    def of(cls, path: str, value: Any, nbytes: Sequence[int], rows: Sequence[int]) -> WrittenFile:
        """The layout of ``value``, whose tensors (`fresh_tensor`) have storages of ``nbytes`` bytes.

        ``rows`` are those of the request that fill each storage, -1 for an empty one.

        Raises:
            Unsupported: an object in ``value`` cannot be pickled.
        """
        return cls.packed(path, value, [Storage.of_row(row, size) for row, size in zip(rows, nbytes, strict=True)])

    @classmethod
    def packed(cls, path: str, value: Any, storages: Sequence[Storage]) -> WrittenFile:
        """The layout of ``value``, whose tensors lie in ``storages``.

        Raises:
            Unsupported: an object in ``value`` cannot be pickled.
        """
        known = {key: storage.data for key, storage in enumerate(storages) if storage.data is not None}
        members = torch_members(dump_pickle(value), [storage.nbytes for storage in storages], known=known)
        return cls(path, ZipLayout(members), tuple(storages))

    def again(self, path: str, storages: Sequence[Storage]) -> WrittenFile:
        """The same object in another file, filled by other rows; ``storages`` are as long as its own."""
        return replace(self, path=path, storages=tuple(storages))

    @property
    def payload_offsets(self) -> list[int]:
        """Where the payload of each storage starts."""
        return list(self.zip.payload_offsets[_N_SMALL_MEMBERS : _N_SMALL_MEMBERS + len(self.storages)])

    def places(self) -> Iterator[tuple[int, int]]:
        """Each row of the request that is in the file, and the byte at which it begins."""
        for storage, offset in zip(self.storages, self.payload_offsets, strict=True):
            yield from ((row, offset + start) for row, start in zip(storage.rows, storage.starts, strict=True))

    def placed_rows(self) -> tuple[IntArray, IntArray]:
        """`places` as columns: ``(rows int64[n], bytes int64[n])``."""
        rows = [np.array(storage.rows, dtype=np.int64) for storage in self.storages]
        starts = [
            np.array(storage.starts, dtype=np.int64) + offset
            for storage, offset in zip(self.storages, self.payload_offsets, strict=True)
        ]
        nothing = np.zeros(0, dtype=np.int64)
        return np.concatenate([nothing, *rows]), np.concatenate([nothing, *starts])

    def heads(self) -> Iterator[Segment]:
        """Bytes that do not depend on payload."""
        return (Segment(self.path, offset, data) for offset, data in self.zip.heads)

    def tail(self, crc32s: Sequence[int]) -> Iterator[Segment]:
        """Descriptors and directory, given the CRC-32 of each row of the request."""
        return self._tail([storage.crc32(crc32s) for storage in self.storages if storage.data is None])

    def tail_without_checksums(self) -> Iterator[Segment]:
        """The same with 0, which stands for "not recorded"; for targets that cannot go back."""
        return self._tail([0 for storage in self.storages if storage.data is None])

    def _tail(self, own: Sequence[int]) -> Iterator[Segment]:
        return (Segment(self.path, offset, data) for offset, data in self.zip.tail(own))
