"""The first bytes of a zip that torch.save wrote, read without its directory.

Where a file holds many small zips (a ``.distcp``), reading the directory of each costs a request more. torch writes
``data.pkl``, then three small members, then ``data/0``: the first kilobyte tells where the payload starts. What does
not look exactly so is left to the directory. Source: torch ``serialization.py::_save`` (2.1 to 2.13).
"""

from __future__ import annotations

import struct

from ckpt_tool.checksum import crc32
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.scan import pickle_end
from ckpt_tool.records import dataclass

__all__ = ["ItemHead", "parse_item_head"]

_LOCAL = struct.Struct("<4s5H3I2H")
_LOCAL_NBYTES = 30
_FLAGS = 0x0808
_FLAGS_EMPTY = 0x0800
_DESCRIPTOR = b"PK\x07\x08"
_MAX_SMALL_NBYTES = 64
_SMALL = frozenset({".format_version", ".storage_alignment", "byteorder"})


@dataclass(frozen=True, slots=True)
class ItemHead:
    """What the first bytes of an item tell."""

    root: str
    """The top folder with its slash."""
    pickle: bytes
    """The bytes of ``data.pkl``."""
    pickle_offset: int
    payload_offset: int | None
    """Where ``data/0`` starts, from the item's first byte; None for an item without storages."""
    is_big_endian: bool = False


def parse_item_head(head: bytes) -> ItemHead | None:
    """What ``head``, the first bytes of an item, tells; None when it does not reach ``data/0`` or looks otherwise."""
    first = _local(head, 0)
    if first is None or not first[0].endswith("/data.pkl") or first[0].count("/") != 1 or first[2]:
        return None
    root = first[0].removesuffix("data.pkl")
    start = first[1]
    try:
        end = pickle_end(head, where="", start=start)
    except FormatError:
        return None
    pickle = head[start:end]
    position = _behind_descriptor(head, start, end)
    is_big_endian = False
    while position is not None:
        following = _local(head, position)
        if following is None:
            return None
        name, start, is_empty = following
        if name == root + "data/0":
            return ItemHead(root, pickle, first[1], start, is_big_endian)
        if name == root + "version":
            return ItemHead(root, pickle, first[1], None, is_big_endian)
        if name.removeprefix(root) not in _SMALL or is_empty:
            return None
        end = head.find(_DESCRIPTOR, start, start + _MAX_SMALL_NBYTES + 4)
        if end < 0:
            return None
        if name == root + "byteorder":
            if head[start:end] not in (b"little", b"big"):
                return None
            is_big_endian = head[start:end] == b"big"
        position = _behind_descriptor(head, start, end)
    return None


def _local(head: bytes, position: int) -> tuple[str, int, bool] | None:
    """Name, payload offset and emptiness of the local header at ``position``, None when it is not one of torch's."""
    if position + _LOCAL_NBYTES > len(head):
        return None
    signature, _, flags, method, _, _, _, packed, _, name_nbytes, extra_nbytes = _LOCAL.unpack_from(head, position)
    if signature != b"PK\x03\x04" or flags not in (_FLAGS, _FLAGS_EMPTY) or method or packed:
        return None
    name_start = position + _LOCAL_NBYTES
    start = name_start + name_nbytes + extra_nbytes
    if name_start + name_nbytes > len(head):
        return None
    try:
        name = head[name_start : name_start + name_nbytes].decode()
    except UnicodeDecodeError:
        return None
    return name, start, flags == _FLAGS_EMPTY


def _behind_descriptor(head: bytes, start: int, end: int) -> int | None:
    """The offset behind the data descriptor at ``end``, None when it does not describe ``head[start:end]``."""
    if head[end : end + 4] != _DESCRIPTOR or end + 16 > len(head):
        return None
    crc, packed, unpacked = struct.unpack_from("<III", head, end + 4)
    if packed != end - start or unpacked != packed or crc not in (0, crc32(head[start:end])):
        return None
    return end + 16
