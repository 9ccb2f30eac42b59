"""A zip laid out before it is written, byte for byte as torch.save (2.13) writes one.

All offsets and sizes follow from names and lengths; only the checksums of payloads come afterwards, and they stand
behind the payloads. torch's writer is miniz in ZIP64 mode behind ``caffe2/serialize/inline_container.cc``: local
headers carry neither sizes nor checksums, padding is an extra field ``FB`` of ``Z``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from ckpt_tool.checksum import crc32
from ckpt_tool.errors import UsageError
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Member", "ZipLayout", "item_layout", "torch_members"]

_MAX16 = 0xFFFF
_MAX32 = 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_MADE_BY = 0x031E
_NEEDED_FOR_ZIP64 = 0x002D
_UTF8 = 0x0800
_HAS_DESCRIPTOR = 0x0008
_CRC_IN_ENTRY = 16
_MAX_ALIGNMENT = 1 << 15


@dataclass(frozen=True, slots=True)
class Member:
    """One member to be written."""

    name: str
    nbytes: int
    payload: bytes | None = None
    """The bytes, None where they are written by others and only their checksum comes here."""


class ZipLayout:
    """Where everything of a zip goes. Immutable; may be shared by all zips of equal names and lengths.

    Attributes:
        nbytes: Length of the whole zip.
        payload_offsets: Where the payload of each member starts, from the zip's first byte.
        heads: ``(offset, bytes)`` that do not depend on payloads: local headers, and members with known bytes.
    """

    __slots__ = (
        "_crc_offsets",
        "_descriptors",
        "_directory",
        "_directory_offset",
        "heads",
        "nbytes",
        "payload_offsets",
    )

    def __init__(self, members: Iterable[Member], *, alignment: int = 64) -> None:
        if not 1 <= alignment <= _MAX_ALIGNMENT:
            raise UsageError(f"alignment is {counted(alignment, 'byte')}, expected 1 to {_MAX_ALIGNMENT:,}")
        payload_offsets: list[int] = []
        heads: list[tuple[int, bytes]] = []
        # Of the members whose bytes come later: offset of the descriptor, length, and whether it is a wide one.
        self._descriptors: list[tuple[int, int, bool]] = []
        self._crc_offsets: list[int] = []
        directory = bytearray()
        n_members = 0
        cursor = 0
        pending = bytearray()
        pending_offset = 0
        for member in members:
            n_members += 1
            name = member.name.encode()
            if member.payload is not None and len(member.payload) != member.nbytes:
                raise UsageError(
                    f"{member.name!r} has {counted(len(member.payload), 'byte')}, {member.nbytes:,} were stated"
                )
            header_offset = cursor
            header, is_wide = _local_header(name, member.nbytes, cursor, alignment)
            pending += header
            cursor += len(header)
            payload_offsets.append(cursor)
            known_crc = 0
            if member.payload is not None:
                known_crc = crc32(member.payload)
                pending += member.payload
                cursor += member.nbytes
                if member.nbytes:
                    descriptor = _descriptor(known_crc, member.nbytes, is_wide=is_wide)
                    pending += descriptor
                    cursor += len(descriptor)
            elif member.nbytes:
                heads.append((pending_offset, bytes(pending)))
                cursor += member.nbytes
                self._descriptors.append((cursor, member.nbytes, is_wide))
                cursor += 24 if is_wide else 16
                pending_offset = cursor
                pending = bytearray()
            if member.payload is None:
                self._crc_offsets.append(len(directory) + _CRC_IN_ENTRY)
                if not member.nbytes:
                    self._descriptors.append((cursor, 0, is_wide))
            directory += _entry(name, member.nbytes, header_offset, known_crc)
        if pending:
            heads.append((pending_offset, bytes(pending)))
        self.payload_offsets = tuple(payload_offsets)
        self.heads = tuple(heads)
        self._directory_offset = cursor
        directory_nbytes = len(directory)
        directory += _end_records(n_members, directory_nbytes, cursor)
        self._directory = bytes(directory)
        self.nbytes = cursor + len(directory)

    def tail(self, crc32s: Sequence[int]) -> tuple[tuple[int, bytes], ...]:
        """``(offset, bytes)`` of data descriptors and directory, given the CRC-32 of each payload not known before.

        ``crc32s`` are in the order of members; empty payloads count and have 0.
        """
        if len(crc32s) != len(self._descriptors):
            raise UsageError(
                f"{counted(len(self._descriptors), 'checksum', 'are')} missing in the zip, got {len(crc32s):,}"
            )
        parts = [
            (offset, _descriptor(crc, nbytes, is_wide=is_wide))
            for (offset, nbytes, is_wide), crc in zip(self._descriptors, crc32s, strict=True)
            if nbytes
        ]
        directory = bytearray(self._directory)
        for offset, crc in zip(self._crc_offsets, crc32s, strict=True):
            struct.pack_into("<I", directory, offset, crc)
        parts.append((self._directory_offset, bytes(directory)))
        return tuple(parts)


def torch_members(
    pickle: bytes,
    storage_nbytes: Sequence[int],
    *,
    root: str = "archive",
    alignment: int = 64,
    known: Mapping[int, bytes] | None = None,
) -> list[Member]:
    """The members of a torch.save file in torch's order: ``pickle`` as ``data.pkl``, storages ``data/0``, ``data/1``...

    The last one is an identifier of 40 digits, here derived from the names and lengths. ``known`` has the bytes of
    storages that are known already, by their number.
    """
    small = (
        ("data.pkl", pickle),
        (".format_version", b"1"),
        (".storage_alignment", b"%d" % alignment),
        ("byteorder", b"little"),
    )
    members = [Member(f"{root}/{name}", len(payload), payload) for name, payload in small]
    payloads = known or {}
    members += [Member(f"{root}/data/{key}", nbytes, payloads.get(key)) for key, nbytes in enumerate(storage_nbytes)]
    members.append(Member(f"{root}/version", 2, b"3\n"))
    digest = hashlib.blake2b(pickle + repr((root, tuple(storage_nbytes))).encode(), digest_size=16).digest()
    digits = b"%020d%020d" % struct.unpack("<QQ", digest)
    members.append(Member(f"{root}/.data/serialization_id", len(digits), digits))
    return members


@lru_cache(maxsize=4096)
def item_layout(pickle: bytes, storage_nbytes: tuple[int, ...]) -> ZipLayout:
    """The layout of one item of a ``.distcp``: a torch.save file of its own. Items of one kind share theirs."""
    return ZipLayout(torch_members(pickle, storage_nbytes))


def _local_header(name: bytes, nbytes: int, header_offset: int, alignment: int) -> tuple[bytes, bool]:
    """A local header with name and padding, and whether its sizes are wide."""
    wide = b""
    if nbytes >= _MAX32:
        wide += struct.pack("<QQ", nbytes, 0)
    if header_offset >= _MAX32:
        wide += struct.pack("<Q", header_offset)
    extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
    start = header_offset + _LOCAL.size + len(name) + len(extra) + 4
    padding = -start % alignment
    extra += b"FB" + struct.pack("<H", padding) + b"Z" * padding
    header = _LOCAL.pack(b"PK\x03\x04", 0, _flags(nbytes), 0, 0, 0, 0, 0, 0, len(name), len(extra))
    return header + name + extra, bool(wide)


def _flags(nbytes: int) -> int:
    return _UTF8 | _HAS_DESCRIPTOR if nbytes else _UTF8


def _descriptor(crc: int, nbytes: int, *, is_wide: bool) -> bytes:
    return struct.pack("<4sIQQ" if is_wide else "<4sIII", b"PK\x07\x08", crc, nbytes, nbytes)


def _entry(name: bytes, nbytes: int, header_offset: int, crc: int) -> bytes:
    wide = [value for value in (nbytes, nbytes, header_offset) if value >= _MAX32]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    short = min(nbytes, _MAX32)
    fixed = _ENTRY.pack(
        b"PK\x01\x02", 0, 0, _flags(nbytes), 0, 0, 0, crc, short, short, len(name), len(extra), 0, 0, 0, 0,
        min(header_offset, _MAX32),
    )  # fmt: skip
    return fixed + name + extra


def _end_records(n_members: int, directory_nbytes: int, directory_offset: int) -> bytes:
    """ZIP64 end record, its locator, and the end record: torch writes all three always."""
    end = directory_offset + directory_nbytes
    return b"".join(
        (
            _END64.pack(
                b"PK\x06\x06", _END64.size - 12, _MADE_BY, _NEEDED_FOR_ZIP64, 0, 0, n_members, n_members,
                directory_nbytes, directory_offset,
            ),
            _LOCATOR.pack(b"PK\x06\x07", 0, end, 1),
            _END.pack(
                b"PK\x05\x06", 0, 0, min(n_members, _MAX16), min(n_members, _MAX16), min(directory_nbytes, _MAX32),
                min(directory_offset, _MAX32), 0,
            ),
        )
    )  # fmt: skip
