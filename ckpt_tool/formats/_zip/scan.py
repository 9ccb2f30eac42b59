"""The members of a zip whose directory is lost, from the local headers that stand before each payload.

torch writes sizes behind the payload, not before it: how long ``data.pkl`` is, the pickle itself tells, and how long
each storage is, ``data.pkl`` does. So a file of torch.save can be walked from its first byte to where it was cut.
numpy's headers tell all sizes, those of 64 bits in their extra field.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from ckpt_tool.errors import CkptError, FormatError
from ckpt_tool.formats._pickle.scan import pickle_end
from ckpt_tool.formats._zip.directory import LOCAL_HEADER_NBYTES, STORED, Read, ZipDirectory, ZipMember

__all__ = ["scan_directory", "scan_members"]

_ZIP64 = struct.Struct("<2H2Q")
_LOCAL = struct.Struct("<4s5H3I2H")
_SIGNATURE, _DESCRIPTOR = b"PK\x03\x04", b"PK\x07\x08"
_HAS_DESCRIPTOR = 1 << 3
_WIDE_NBYTES = 0xFFFFFFFF
_FIRST_NBYTES, _MAX_PICKLE_NBYTES = 64 << 10, 1 << 30
_MAX_SMALL_NBYTES = 4 << 10
_MAX_NAME_NBYTES = 1 << 12
_MAX_MEMBERS = 1 << 20

StorageSizes = Callable[[bytes], Mapping[str, int]]
"""Bytes of each storage by its key, from the bytes of ``data.pkl``."""


def scan_directory(read: Read, nbytes: int, storage_sizes: StorageSizes) -> ZipDirectory | None:
    """The members that are wholly there, up to the first that is not; None where not even ``data.pkl`` is.

    Costs a read for each member, and one or more of 64 KiB for ``data.pkl``.
    """
    members: dict[str, ZipMember] = {}
    sizes: Mapping[str, int] = {}
    root = ""
    at = 0
    while len(members) < _MAX_MEMBERS:
        found = _local(read, at, nbytes)
        if found is None:
            break
        name, start, flags, method, crc, packed, unpacked = found
        if method != STORED:
            break
        if flags & _HAS_DESCRIPTOR and not packed:
            length = _length(read, name, root, start, nbytes, sizes)
            if length is None or start + length > nbytes:
                break
            described = _descriptor(read, start + length, length, nbytes)
            if described is None:
                break
            crc, behind = described
            packed = unpacked = length
        else:
            behind = start + packed
        if behind > nbytes or name in members:
            break
        if name.endswith("/data.pkl") and name.count("/") == 1 and not root:
            root = name.removesuffix("data.pkl")
            try:
                sizes = {f"{root}data/{key}": n for key, n in storage_sizes(read(start, packed)).items()}
            except CkptError:
                return None
        members[name] = ZipMember(name, at, method, crc, packed, unpacked, behind)
        at = behind
    return ZipDirectory(members, root, at, is_rebuilt=True) if root else None


def scan_members(read: Read, nbytes: int) -> ZipDirectory | None:
    """The members that are wholly there and whose own headers tell their sizes, up to the first that is not.

    None where there is none. Costs two or three reads for each member.
    """
    members: dict[str, ZipMember] = {}
    at = 0
    while len(members) < _MAX_MEMBERS:
        found = _local(read, at, nbytes)
        if found is None:
            break
        name, start, flags, method, crc, packed, unpacked = found
        if flags & _HAS_DESCRIPTOR or start + packed > nbytes or name in members:
            break
        members[name] = ZipMember(name, at, method, crc, packed, unpacked, start + packed)
        at = start + packed
    return ZipDirectory(members, "", at, is_rebuilt=True) if members else None


def _local(read: Read, at: int, nbytes: int) -> tuple[str, int, int, int, int, int, int] | None:
    """Name, payload offset, flags, method, CRC, packed and unpacked bytes of the header at ``at``."""
    if at + LOCAL_HEADER_NBYTES > nbytes:
        return None
    fields = _LOCAL.unpack(read(at, LOCAL_HEADER_NBYTES))
    signature, _, flags, method, _, _, crc, packed, unpacked, name_nbytes, extra_nbytes = fields
    start = at + LOCAL_HEADER_NBYTES + name_nbytes + extra_nbytes
    if signature != _SIGNATURE or name_nbytes > _MAX_NAME_NBYTES or start > nbytes:
        return None
    if _WIDE_NBYTES in {packed, unpacked}:
        extra = read(start - extra_nbytes, extra_nbytes)
        if extra_nbytes < _ZIP64.size or extra[:2] != b"\x01\x00":
            return None
        _, _, unpacked, packed = _ZIP64.unpack(extra[: _ZIP64.size])
    try:
        name = read(at + LOCAL_HEADER_NBYTES, name_nbytes).decode()
    except UnicodeDecodeError:
        return None
    return name, start, flags, method, crc, packed, unpacked


def _length(read: Read, name: str, root: str, start: int, nbytes: int, sizes: Mapping[str, int]) -> int | None:
    """Bytes of a payload that its header does not tell."""
    if name in sizes:
        return sizes[name]
    if name.endswith("/data.pkl") and not root:
        length = min(nbytes - start, _FIRST_NBYTES)
        while True:
            try:
                return pickle_end(read(start, length), where="", start=0)
            except FormatError:  # noqa: PERF203 - a few turns
                if length >= min(nbytes - start, _MAX_PICKLE_NBYTES):
                    return None
                length = min(nbytes - start, length * 4)
    small = read(start, min(_MAX_SMALL_NBYTES, nbytes - start))
    at = small.find(_DESCRIPTOR)
    while at >= 0:
        if small[at + 8 : at + 12] == struct.pack("<I", at):
            return at
        at = small.find(_DESCRIPTOR, at + 1)
    return None


def _descriptor(read: Read, at: int, length: int, nbytes: int) -> tuple[int, int] | None:
    """CRC behind a payload, and the byte behind it; 0 where the file was cut right there.

    None where something else stands there: the payload is not where it was, or not what it was.
    """
    size = 24 if length >= _WIDE_NBYTES else 16
    if at + size > nbytes:
        return 0, nbytes
    found = read(at, size)
    if not found.startswith(_DESCRIPTOR) or found[8 : 8 + (size - 8) // 2] != length.to_bytes(
        (size - 8) // 2, "little"
    ):
        return None
    return int.from_bytes(found[4:8], "little"), at + size
