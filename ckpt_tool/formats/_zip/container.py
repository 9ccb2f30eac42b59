"""The bytes of a zip that are no payload: what is said twice in it must be said alike, and padding is padding.

A checksum covers payload only. A bit that flips in a local header, a descriptor, the padding or the end records changes
no value and still means that the file is not as it was written; torch notices none of it. Sources: PKWARE APPNOTE 6.3;
for what torch writes ``caffe2/serialize/inline_container.cc`` and miniz, for other zips Python's ``zipfile``.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from ckpt_tool.errors import CkptError
from ckpt_tool.formats._zip.directory import LOCAL_HEADER_NBYTES, Read, ZipDirectory, ZipMember, find_end, read_member
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["MAX_SMALL_NBYTES", "Fault", "container_faults", "container_findings", "finding_of_fault"]

MAX_SMALL_NBYTES = 4 << 10
"""Members up to this size, of which nobody else takes the checksum, are part of the container."""

_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_HAS_DESCRIPTOR = 1 << 3
_KNOWN_FLAGS = 0x0002 | 0x0004 | _HAS_DESCRIPTOR | 0x0800
_VERSIONS = (0, 10, 20, 45)
"""Versions needed to extract: torch's 0, stored, deflated, ZIP64."""
_MAX32 = 0xFFFFFFFF
_ZIP64_FIELD, _TORCH_PADDING = 0x0001, int.from_bytes(b"FB", "little")
_ENOUGH = 3
"""So many members that agree make another one odd."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something about the container that is not as a program writes it."""

    offset: int
    """From the zip's first byte."""
    message: str
    is_certain: bool = True
    """False where the value is only unusual: no other bytes say what it should be."""


def finding_of_fault(fault: Fault, path: str, start: int = 0) -> Finding:
    """What `verify` says of a fault of the zip that begins at byte ``start`` of ``path``."""
    where = FileRange(path, start + fault.offset, 0)
    if fault.is_certain:
        said = f"{fault.message}: the file is not as it was written, though no value is concerned"
        return Finding("container-damage", Severity.ERROR, said, where=where)
    return Finding("container-odd", Severity.WARNING, fault.message, where=where)


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of the directory, as it stands there."""

    offset: int
    made_by: int
    needed: int
    flags: int
    time: tuple[int, int]
    extra: bytes
    disk: int
    internal: int
    external: int
    note_nbytes: int


IsCovered = Callable[[ZipMember], bool]


def _ranges(
    nbytes: int, directory: ZipDirectory, starts: Mapping[str, int], is_covered: IsCovered
) -> list[tuple[int, int]]:
    """(offset, length) of all that `container_faults` reads: everything but payload that has a checksum or is large.

    Args:
        nbytes: length of the zip.
        directory: its members.
        starts: where the payload of each member begins.
        is_covered: whether others take the checksum of a member.
    """
    ranges: list[tuple[int, int]] = []
    at = 0
    for member in sorted(directory.members.values(), key=lambda member: member.header_offset):
        if is_covered(member) or not _is_small(member):
            ranges.append((at, starts[member.name] - at))
            at = starts[member.name] + member.compressed_nbytes
    ranges.append((at, nbytes - at))
    return [each for each in ranges if each[1]]


def container_findings(
    source: Source, path: str, directory: ZipDirectory, starts: Mapping[str, int], is_covered: IsCovered
) -> Iterator[Finding]:
    """`container_faults` of a file that is a zip as findings: one round of requests."""
    if directory.is_rebuilt:  # nothing is left to compare with
        return
    nbytes = source.listing.nbytes(path)
    ranges = _ranges(nbytes, directory, starts, is_covered)
    pieces = source.store.fetch([FileRange(path, offset, length) for offset, length in ranges])
    offsets = [offset for offset, _ in ranges]

    def read(offset: int, length: int) -> bytes:
        at = bisect_right(offsets, offset) - 1
        return pieces[at][offset - offsets[at] :][:length] if length else b""

    for fault in container_faults(read, nbytes, directory, starts, is_covered):
        yield finding_of_fault(fault, path)


def container_faults(
    read: Read, nbytes: int, directory: ZipDirectory, starts: Mapping[str, int], is_covered: IsCovered
) -> Iterator[Fault]:
    """What contradicts itself among the bytes that are no payload, and in small members whose checksum nobody takes.

    Args:
        read: within the zip.
        nbytes: length of the zip.
        directory: its members.
        starts: where the payload of each member begins.
        is_covered: whether others take the checksum of a member.
    """
    tail = read(directory.offset, nbytes - directory.offset)
    entries, end = _entries(tail, directory)
    for member in directory.members.values():
        entry = entries[member.name]
        yield from _entry_faults(member, entry)
        yield from _local_faults(read, member, entry, starts[member.name])
        yield from _behind_faults(read, member, entry, starts[member.name] + member.compressed_nbytes)
        if _is_small(member) and not is_covered(member):
            try:
                read_member(read, member, where="")
            except CkptError as error:
                yield Fault(starts[member.name], error.message)
    yield from _uniform_faults(entries)
    first = min((member.header_offset for member in directory.members.values()), default=directory.offset)
    if first and any(read(0, first)):
        yield Fault(0, f"{counted(first, 'byte', 'stand')} before the first member", is_certain=False)
    yield from _end_faults(tail, end, directory.offset, entries)


def _is_small(member: ZipMember) -> bool:
    return max(member.compressed_nbytes, member.nbytes) <= MAX_SMALL_NBYTES


def _entries(tail: bytes, directory: ZipDirectory) -> tuple[dict[str, _Entry], int]:
    """Entries by the member's name, and where the directory ends in ``tail``."""
    found: dict[str, _Entry] = {}
    at = 0
    for name in directory.members:
        fields = _ENTRY.unpack_from(tail, at)
        _, made_by, needed, flags, _, time, date, _, _, _, name_nbytes, extra_nbytes, note_nbytes = fields[:13]
        disk, internal, external, _ = fields[13:]
        extra_start = at + _ENTRY.size + name_nbytes
        extra = tail[extra_start : extra_start + extra_nbytes]
        found[name] = _Entry(
            directory.offset + at, made_by, needed, flags, (time, date), extra, disk, internal, external, note_nbytes
        )
        at = extra_start + extra_nbytes + note_nbytes
    return found, at


def _entry_faults(member: ZipMember, entry: _Entry) -> Iterator[Fault]:
    """One entry by itself."""
    what = f"the directory's entry of {member.name!r}"
    if entry.flags & ~_KNOWN_FLAGS or entry.disk or entry.internal not in (0, 1):
        yield Fault(entry.offset, f"{what} has flags that nothing sets", is_certain=False)
    if entry.needed not in _VERSIONS:
        yield Fault(entry.offset, f"{what} asks for version {entry.needed} of zip", is_certain=False)
    if entry.note_nbytes:
        yield Fault(entry.offset, f"{what} has a comment of {counted(entry.note_nbytes, 'byte')}", is_certain=False)
    if not _is_sound(
        entry.extra, {member.nbytes, member.compressed_nbytes, member.header_offset}, is_torch=not entry.needed
    ):
        yield Fault(entry.offset, f"{what} has a damaged extra field")


def _local_faults(read: Read, member: ZipMember, entry: _Entry, start: int) -> Iterator[Fault]:
    """The local header against the directory's entry."""
    header = read(member.header_offset, start - member.header_offset)
    _, needed, flags, _, time, date, crc, packed, unpacked, name_nbytes, _ = _LOCAL.unpack_from(header)
    what = f"the local header of {member.name!r}"
    if (flags, (time, date)) != (entry.flags, entry.time):
        yield Fault(member.header_offset, f"{what} and the directory differ in flags or time")
    if needed not in _VERSIONS or (needed == 0) != (entry.needed == 0):
        yield Fault(member.header_offset, f"{what} asks for version {needed} of zip", is_certain=entry.needed == 0)
    later = flags & _HAS_DESCRIPTOR
    for stated, known in ((crc, member.crc32), (packed, member.compressed_nbytes), (unpacked, member.nbytes)):
        if stated != known and not (later and stated == 0) and stated != _MAX32:
            yield Fault(member.header_offset, f"{what} says {stated:,} where the directory says {known:,}")
    extra = header[LOCAL_HEADER_NBYTES + name_nbytes :]
    values = {0, member.nbytes, member.compressed_nbytes, member.header_offset}
    if not _is_sound(extra, values, is_torch=not entry.needed):
        yield Fault(member.header_offset + LOCAL_HEADER_NBYTES + name_nbytes, f"{what} has damaged padding")


def _is_sound(extra: bytes, values: set[int], *, is_torch: bool) -> bool:
    """Whether an extra field is a row of fields, padding is uniform, and a ZIP64 field says what is known.

    What other programs put there is not known, and torch has these two kinds alone.
    """
    at = 0
    while at < len(extra):
        if at + 4 > len(extra):
            return not any(extra[at:])
        kind, length = struct.unpack_from("<HH", extra, at)
        content = extra[at + 4 : at + 4 + length]
        if len(content) != length:
            return False
        if kind == _TORCH_PADDING and (content.strip(content[:1]) or content[:1] not in (b"", b"Z", b"\0")):
            return False
        if is_torch and kind not in (_TORCH_PADDING, _ZIP64_FIELD):
            return False
        if kind == _ZIP64_FIELD and not set(struct.unpack(f"<{length // 8}Q", content[: length // 8 * 8])) <= values:
            return False
        at += 4 + int(length)
    return True


def _behind_faults(read: Read, member: ZipMember, entry: _Entry, end: int) -> Iterator[Fault]:
    """What stands between a payload and the next member: a descriptor that agrees, and zeros."""
    gap = read(end, member.next_offset - end)
    rest = gap
    if entry.flags & _HAS_DESCRIPTOR:
        sizes = (member.compressed_nbytes, member.nbytes)
        forms = [
            mark + struct.pack(form, member.crc32, *(size & limit for size in sizes))
            for mark in (b"PK\x07\x08", b"")
            for form, limit in (("<IQQ", (1 << 64) - 1), ("<III", _MAX32))
        ]
        found = next((form for form in forms if gap.startswith(form)), None)
        if found is None:
            yield Fault(end, f"what follows {member.name!r} does not describe it as the directory does")
            return
        rest = gap[len(found) :]
    if any(rest):
        said = f"{counted(len(rest), 'byte')} that are no padding follow {member.name!r}"
        yield Fault(end + len(gap) - len(rest), said, is_certain=False)


def _uniform_faults(entries: Mapping[str, _Entry]) -> Iterator[Fault]:
    """One entry that names another program or other attributes than all the others."""
    for field in ("made_by", "external"):
        counts = Counter(getattr(entry, field) for entry in entries.values())
        if len(counts) < 2 or counts.most_common(1)[0][1] < _ENOUGH:
            continue
        usual = counts.most_common(1)[0][0]
        odd = [(name, entry) for name, entry in entries.items() if getattr(entry, field) != usual]
        if len(odd) == 1:
            name, entry = odd[0]
            said = f"the directory's entry of {name!r} has {getattr(entry, field)} where all others have {usual}"
            yield Fault(entry.offset, said, is_certain=False)


def _end_faults(tail: bytes, end: int, start: int, entries: Mapping[str, _Entry]) -> Iterator[Fault]:
    """The records behind the directory, which begins at ``start`` and ends at ``end`` of ``tail``."""
    at = find_end(tail)
    if at + _END.size != len(tail):
        said = f"a comment of {counted(len(tail) - at - _END.size, 'byte')} ends the zip"
        yield Fault(start + at, said, is_certain=False)
    if at == end:
        return
    record = tail[end : end + _END64.size]
    if len(record) == _END64.size and record.startswith(b"PK\x06\x06") and at == end + _END64.size + _LOCATOR.size:
        _, size, made_by, needed, disk, first_disk, *_ = _END64.unpack(record)
        usual = {entry.made_by for entry in entries.values()} | {0x031E, 0x032D, 45}
        if size != _END64.size - 12 or disk or first_disk:
            yield Fault(start + end, "the ZIP64 record states a length or a volume that it does not have")
        if made_by not in usual or needed not in _VERSIONS:
            said = f"the ZIP64 record was made by {made_by:#06x} for version {needed} of zip"
            yield Fault(start + end, said, is_certain=False)
        signature, disk, _, n_disks = _LOCATOR.unpack_from(tail, end + _END64.size)
        if signature != b"PK\x06\x07" or disk or n_disks != 1:
            yield Fault(start + end + _END64.size, "the ZIP64 locator is damaged")
        return
    if any(tail[end:at]):
        said = f"{counted(at - end, 'byte')} that nothing refers to stand behind the directory"
        yield Fault(start + end, said, is_certain=tail.startswith(b"PK\x06\x06", end))
