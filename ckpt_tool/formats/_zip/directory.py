"""The central directory of a zip: its members, and where their payload lies.

Bytes come from ``read(offset, length)``, offsets counted from the zip's first byte: the zip may be a part of a file.
torch writes neither sizes nor checksums into local headers, and pads them: the directory has the sizes, only the local
header says where the payload starts (torch ``caffe2/serialize/inline_container.cc``; PKWARE APPNOTE 6.3).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping

from ckpt_tool.checksum import crc32
from ckpt_tool.errors import FormatError, IntegrityError, Unsupported
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = [
    "LOCAL_HEADER_NBYTES",
    "Read",
    "ZipDirectory",
    "ZipMember",
    "find_end",
    "is_big_endian",
    "local_payload_offset",
    "payload_offset",
    "read_directory",
    "read_member",
]

Read = Callable[[int, int], bytes]

# Name, header offset, method, CRC, packed and unpacked bytes.
_Row = tuple[str, int, int, int, int, int]

LOCAL_HEADER_NBYTES = 30
STORED = 0
DEFLATED = 8
_ENCRYPTED_METHOD = -1
"""In place of the method of a member whose bytes are encrypted, however they are packed."""
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ENCRYPTED = 1 << 0
_HAS_DESCRIPTOR = 1 << 3
_UTF8 = 1 << 11
_MAX16 = 0xFFFF
_MAX32 = 0xFFFFFFFF
_MAX_COMMENT_NBYTES = 0xFFFF


@dataclass(frozen=True, slots=True)
class ZipMember:
    """One member as the central directory lists it."""

    name: str
    header_offset: int
    """Of its local header, from the zip's first byte."""
    method: int
    """0 stored, 8 deflated; others, and -1 for an encrypted member, are refused where the payload is wanted."""
    crc32: int
    """Of the unpacked payload; torch leaves 0 when told not to compute it."""
    compressed_nbytes: int
    nbytes: int
    next_offset: int
    """Where the next local header or the directory begins: the member ends before it."""

    @property
    def is_stored(self) -> bool:
        """True when the payload's bytes stand in the file as they are."""
        return self.method == STORED


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """The members of a zip that torch wrote, or something like it."""

    members: Mapping[str, ZipMember]
    """By full name, in the order of the directory."""
    root: str
    """The folder of ``data.pkl`` with its slash; empty when there is no ``data.pkl`` in a folder."""
    offset: int
    """Where the directory starts: every payload ends before it."""
    is_rebuilt: bool = False
    """Whether it was put together from local headers, because the file's own is lost."""

    def record(self, name: str) -> ZipMember | None:
        """The member ``name`` of the root folder (``data.pkl``, ``data/0``), None where there is none."""
        return self.members.get(self.root + name)

    @property
    def is_torch(self) -> bool:
        """True when there is a ``data.pkl``: torch.save or TorchScript."""
        return self.record("data.pkl") is not None

    @property
    def is_torchscript(self) -> bool:
        """True for a program (``torch.jit.save``), which shares the container: its modules are objects with tensors."""
        code = self.root + "code/"
        return self.record("constants.pkl") is not None and any(name.startswith(code) for name in self.members)


def read_directory(read: Read, nbytes: int, *, where: str, tail_nbytes: int = 1 << 16) -> ZipDirectory:
    """The directory of the zip of ``nbytes`` bytes: one read of ``tail_nbytes`` at most, and one more if it is longer.

    Raises:
        FormatError: not a whole zip, or one that contradicts itself: wrong counts, members beyond the end, overlapping
            or twice the same name, several volumes.
    """
    tail_start = max(nbytes - max(tail_nbytes, _END.size), 0)
    tail = read(tail_start, nbytes - tail_start)
    end = find_end(tail)
    if end < 0 and tail_start:
        tail_start = max(nbytes - _END.size - _MAX_COMMENT_NBYTES, 0)
        tail = read(tail_start, nbytes - tail_start)
        end = find_end(tail)
    if end < 0:
        raise FormatError(
            "no zip directory at the end", where=f"{where}:{nbytes}", hint="the file was cut; fetch it again"
        )
    n_members, directory_nbytes, directory_offset, limit = _ends(read, tail, tail_start, end, where)
    if directory_offset + directory_nbytes > limit:
        raise FormatError(
            f"the zip directory ends at byte {directory_offset + directory_nbytes:,}, expected {limit:,} at most",
            where=where,
        )
    if directory_offset >= tail_start:
        directory = tail[directory_offset - tail_start :][:directory_nbytes]
    else:
        directory = read(directory_offset, directory_nbytes)
    members = _members(directory, n_members, directory_offset, where)
    return ZipDirectory(members, _root(members), directory_offset)


def payload_offset(read: Read, member: ZipMember, *, where: str) -> int:
    """Where the payload of ``member`` starts, from its local header: one small read."""
    length = min(LOCAL_HEADER_NBYTES + len(member.name.encode()), member.next_offset - member.header_offset)
    return local_payload_offset(read(member.header_offset, length), member, where=where)


def local_payload_offset(header: bytes, member: ZipMember, *, where: str) -> int:
    """Where the payload of ``member`` starts; ``header`` is its local header of 30 bytes and its name, or more.

    Raises:
        FormatError: the local header belongs to another member, or leaves no room for the payload.
    """
    place = f"{where}:{member.header_offset}"
    if len(header) < LOCAL_HEADER_NBYTES:
        raise FormatError(f"the local header of {member.name!r} is cut", where=place)
    signature, _, flags, packing, _, _, crc, packed, unpacked, name_nbytes, extra_nbytes = _LOCAL.unpack_from(header)
    if signature != b"PK\x03\x04":
        raise FormatError(f"no local header of {member.name!r} here", where=place)
    name = _name(header[LOCAL_HEADER_NBYTES : LOCAL_HEADER_NBYTES + name_nbytes], flags, place)
    if name != member.name:
        raise FormatError(f"the local header is that of {name!r}, expected {member.name!r}", where=place)
    if (method := _method(flags, packing)) != member.method:
        said = f"{name!r} is {_packed_by(method)} by its local header, {_packed_by(member.method)} by the directory"
        raise FormatError(said, where=place, hint="the file is damaged: fetch it again")
    if not flags & _HAS_DESCRIPTOR and unpacked not in (0, _MAX32):
        stated = (crc, packed, unpacked)
        if stated != (member.crc32, member.compressed_nbytes, member.nbytes):
            raise FormatError(f"local header and directory differ about {name!r}", where=place)
    start = member.header_offset + LOCAL_HEADER_NBYTES + int(name_nbytes) + int(extra_nbytes)
    if start + member.compressed_nbytes > member.next_offset:
        raise FormatError(
            f"{name!r} ends at byte {start + member.compressed_nbytes:,}, expected {member.next_offset:,} at most",
            where=place,
        )
    return start


def read_member(read: Read, member: ZipMember, *, where: str) -> bytes:
    """The payload of ``member``, unpacked and checked against its CRC where one is recorded: two reads.

    Raises:
        IntegrityError: the CRC differs.
        FormatError: it does not unpack to the stated length.
        Unsupported: encrypted, or packed by another method than deflate.
    """
    start = payload_offset(read, member, where=where)
    if member.method not in (STORED, DEFLATED):
        said = f"{member.name!r} is {_packed_by(member.method)}, expected method 0 (stored) or 8 (deflate)"
        raise Unsupported(said, where=f"{where}:{member.header_offset}")
    raw = read(start, member.compressed_nbytes)
    if len(raw) != member.compressed_nbytes:
        raise FormatError(
            f"{member.name!r} is cut: {len(raw):,} of {counted(member.compressed_nbytes, 'byte')}", where=where
        )
    data = raw if member.method == STORED else _inflated(raw, member, where)
    if member.crc32 and crc32(data) != member.crc32:
        raise IntegrityError(
            f"{member.name!r}: expected CRC-32 {member.crc32:08x}, got {crc32(data):08x}", where=f"{where}:{start}"
        )
    return data


def is_big_endian(read: Read, directory: ZipDirectory, *, where: str) -> bool:
    """True when the member ``byteorder`` says so; files before torch 2.1 have none and are little-endian."""
    member = directory.record("byteorder")
    if member is None:
        return False
    text = read_member(read, member, where=where) if member.nbytes <= 16 else b"?"
    if text not in (b"little", b"big"):
        raise FormatError(f"byteorder is {text[:16]!r}, expected 'little' or 'big'", where=where)
    return text == b"big"


def find_end(tail: bytes) -> int:
    """The position of the end record in the last bytes of a zip, -1 when it is not there."""
    end = len(tail)
    while (end := tail.rfind(b"PK\x05\x06", 0, end)) >= 0:
        if end + _END.size <= len(tail) and end + _END.size + int(_END.unpack_from(tail, end)[-1]) == len(tail):
            return end
        end += 3  # rfind's end is exclusive: the next search must not find this one again
    return -1


def _ends(read: Read, tail: bytes, tail_start: int, end: int, where: str) -> tuple[int, int, int, int]:
    """Members, bytes, offset of the directory, and the offset of the record behind it."""
    place = f"{where}:{tail_start + end}"
    _, disk, first_disk, n_here, n_members, directory_nbytes, directory_offset, _ = _END.unpack_from(tail, end)
    if (disk not in (0, _MAX16)) or (first_disk not in (0, _MAX16)) or n_here != n_members:
        raise FormatError("the end record speaks of a zip in several volumes, which no program writes", where=place)
    locator = end - _LOCATOR.size
    if locator < 0 or tail[locator : locator + 4] != b"PK\x06\x07":
        if n_members == _MAX16 or _MAX32 in (directory_nbytes, directory_offset):
            raise FormatError("the end record refers to a ZIP64 record, which is missing", where=place)
        return n_members, directory_nbytes, directory_offset, tail_start + end
    record_offset = int(_LOCATOR.unpack_from(tail, locator)[2])
    if record_offset + _END64.size > tail_start + locator:
        raise FormatError(f"the ZIP64 record is said to lie at byte {record_offset:,}", where=place)
    inside = record_offset - tail_start
    record = tail[inside : inside + _END64.size] if inside >= 0 else read(record_offset, _END64.size)
    if len(record) != _END64.size:
        raise FormatError("the ZIP64 record is cut", where=f"{where}:{record_offset}")
    signature, _, _, _, _, _, n_here64, n_members64, nbytes64, offset64 = _END64.unpack(record)
    if signature != b"PK\x06\x06" or n_here64 != n_members64:
        raise FormatError("no ZIP64 record here", where=f"{where}:{record_offset}")
    for short, wide, saturated in (
        (n_members, n_members64, _MAX16),
        (directory_nbytes, nbytes64, _MAX32),
        (directory_offset, offset64, _MAX32),
    ):
        if short not in (saturated, wide):
            raise FormatError(f"the end records differ: {short:,} and, in ZIP64, {wide:,}", where=place)
    return n_members64, nbytes64, offset64, record_offset


def _members(directory: bytes, n_members: int, directory_offset: int, where: str) -> dict[str, ZipMember]:
    if n_members * _ENTRY.size > len(directory):
        raise FormatError(
            f"the zip says it has {counted(n_members, 'member')}, its directory has room for "
            f"{len(directory) // _ENTRY.size:,}",
            where=f"{where}:{directory_offset}",
        )
    rows: list[_Row] = []
    position = 0
    for _ in range(n_members):
        position = _row(directory, position, rows, f"{where}:{directory_offset + position}")
    if position != len(directory):
        raise FormatError(
            f"{counted(len(directory) - position, 'byte', 'follow')} the last of {counted(n_members, 'member')} in "
            "the zip directory",
            where=f"{where}:{directory_offset + position}",
        )
    return _placed(rows, directory_offset, where)


def _row(directory: bytes, position: int, rows: list[_Row], place: str) -> int:
    """The offset behind one directory entry, which is appended to ``rows``."""
    if position + _ENTRY.size > len(directory):
        raise FormatError("the zip directory ends inside an entry", where=place)
    entry = _ENTRY.unpack_from(directory, position)
    signature, _, _, flags, method, _, _, crc, packed, unpacked, name_nbytes, extra_nbytes, note_nbytes = entry[:13]
    header_offset = entry[16]
    name_end = position + _ENTRY.size + int(name_nbytes)
    extra_end = name_end + int(extra_nbytes)
    if signature != b"PK\x01\x02" or extra_end + note_nbytes > len(directory):
        raise FormatError("no entry of a zip directory here", where=place)
    name = _name(directory[position + _ENTRY.size : name_end], flags, place)
    if _MAX32 in (unpacked, packed, header_offset):
        unpacked, packed, header_offset = _wide(
            directory[name_end:extra_end], unpacked, packed, header_offset, f"{place}: {name!r}"
        )
    rows.append((name, header_offset, _method(flags, method), crc, packed, unpacked))
    return extra_end + int(note_nbytes)


def _placed(rows: list[_Row], directory_offset: int, where: str) -> dict[str, ZipMember]:
    """Members by name, each with where the next one begins; refuses overlaps and double names."""
    following: dict[int, int] = {}
    limit = directory_offset
    for row in sorted(rows, key=lambda row: row[1], reverse=True):
        name, header_offset, method, _, packed, unpacked = row
        end = header_offset + LOCAL_HEADER_NBYTES + len(name) + packed
        if end > limit or header_offset in following:
            raise FormatError(f"{name!r} ends at byte {end:,}, expected {limit:,} at most", where=where)
        if method == STORED and packed != unpacked:
            raise FormatError(f"{name!r} is stored, but {counted(packed, 'byte', 'become')} {unpacked:,}", where=where)
        following[header_offset] = limit
        limit = header_offset
    members = {row[0]: ZipMember(*row, following[row[1]]) for row in rows}
    if len(members) != len(rows):
        raise FormatError(
            f"{counted(len(rows) - len(members), 'member of the zip', 'have')} the name of another", where=where
        )
    return members


def _wide(extra: bytes, unpacked: int, packed: int, header_offset: int, place: str) -> tuple[int, int, int]:
    """Sizes and offset with what a ZIP64 extra field says of the saturated ones, in this order."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            field = extra[position + 4 : position + 4 + length]
            values = list(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
            shorts = (unpacked, packed, header_offset)
            wide = [values.pop(0) if short == _MAX32 and values else short for short in shorts]
            return wide[0], wide[1], wide[2]
        position += 4 + int(length)
    raise FormatError("sizes beyond 4 GiB without a ZIP64 field", where=place)


def _method(flags: int, packing: int) -> int:
    return _ENCRYPTED_METHOD if flags & _ENCRYPTED else packing


def _packed_by(method: int) -> str:
    return "encrypted" if method == _ENCRYPTED_METHOD else f"packed by method {method}"


def _name(raw: bytes, flags: int, place: str) -> str:
    try:
        return raw.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError as error:
        raise FormatError("a member's name is not UTF-8", where=place) from error


def _root(members: Mapping[str, ZipMember]) -> str:
    pickles = [name for name in members if name.endswith("/data.pkl")]
    return min(pickles, key=len).removesuffix("data.pkl") if pickles else ""


def _inflated(raw: bytes, member: ZipMember, where: str) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # One byte more than stated is enough to see that there is more.
        data = inflater.decompress(raw, member.nbytes + 1)
    except (zlib.error, MemoryError, OverflowError) as error:
        raise FormatError(f"{member.name!r} does not unpack: {error}", where=where) from error
    if len(data) != member.nbytes:
        raise FormatError(f"{member.name!r} does not unpack to {counted(member.nbytes, 'byte')}", where=where)
    return data
