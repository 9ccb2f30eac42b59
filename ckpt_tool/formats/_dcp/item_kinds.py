"""Items of one kind have the same bytes around their payload, checksums aside: what one's directory says, all say.

A checkpoint has thousands of items and a few dozen kinds (dtype and sizes), so that reading each directory anew would
take most of the time that checking their checksums takes. An item that differs by one byte is read by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tool.checksum import crc32
from ckpt_tool.formats._zip.container import MAX_SMALL_NBYTES, Fault, container_faults
from ckpt_tool.formats._zip.directory import Read, ZipDirectory, ZipMember, payload_offset, read_directory
from ckpt_tool.records import dataclass

__all__ = ["ItemKinds", "MemberSum"]

MemberSum = tuple[str, int, int, int]
"""Name, first byte in the item, bytes, CRC-32."""

_CRC_AT = 16
_ENTRY_NBYTES = 46
_CRC_IN_DESCRIPTOR = 4
_SLOT = 4


@dataclass(frozen=True, slots=True)
class _Slot:
    """Bytes behind the payload that items of a kind have each for themselves."""

    start: int
    """From the end of the payload."""
    length: int
    member: str
    is_content: bool
    """Whether these are the member's bytes, else its checksum."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is the same for all items of a kind."""

    head: bytes
    """All bytes before the payload."""
    nbytes_behind: int
    pieces: tuple[tuple[int, bytes], ...]
    """What lies between the slots, and where: from the end of the payload."""
    slots: tuple[_Slot, ...]
    members: tuple[MemberSum, ...]
    """The checksum only of those that lie before the payload; 0 where a slot has it."""


class ItemKinds:
    """Checksums of items; each distinct directory is parsed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[_Kind]] = {}

    def sums(self, read: Read, nbytes: int, head: bytes, tail: bytes, *, where: str) -> Iterator[MemberSum | Fault]:
        """Of ``data.pkl`` and each stored member below ``data/``, those that have a checksum; and faults around them.

        Args:
            read: within the item.
            nbytes: length of the item.
            head: its first bytes.
            tail: its last bytes.
            where: names the item in messages.

        Raises:
            FormatError: no whole zip, or one that contradicts itself.
        """
        for kind in self._known.get((nbytes, len(tail)), ()):
            found = _own_sums(kind, head, tail)
            if found is not None:
                for name, start, length, fixed in kind.members:
                    crc = fixed or found.get(name, 0)
                    if crc:
                        yield name, start, length, crc
                return
        directory = read_directory(read, nbytes, where=where, tail_nbytes=len(tail))
        starts = {m.name: payload_offset(read, m, where=where) for m in directory.members.values()}
        faults = list(container_faults(read, nbytes, directory, starts, _is_covered))
        yield from faults
        members = [
            (name, starts[full_name], member.nbytes, member.crc32)
            for full_name, member in directory.members.items()
            if _is_covered(member) and (name := full_name.removeprefix(directory.root))
        ]
        new = None if faults else _kind(directory, starts, members, nbytes, head, tail)
        if new is not None:
            self._known.setdefault((nbytes, len(tail)), []).append(new)
        yield from (member for member in members if member[3])


def _is_covered(member: ZipMember) -> bool:
    """Whether its checksum is one of those that are taken of payload."""
    name = member.name.partition("/")[2]
    return member.is_stored and (name == "data.pkl" or name.startswith("data/") or member.nbytes > MAX_SMALL_NBYTES)


def _kind(
    directory: ZipDirectory,
    starts: dict[str, int],
    members: list[MemberSum],
    nbytes: int,
    head: bytes,
    tail: bytes,
) -> _Kind | None:
    """The kind of an item, None where more than its checksums may be its own."""
    storages = [member for member in members if member[0].startswith("data/")]
    if len(storages) != 1 or storages[0][1] > len(head):
        return None
    end = storages[0][1] + storages[0][2]
    behind = tail[end - (nbytes - len(tail)) :]
    if end < nbytes - len(tail):
        return None
    slots: list[_Slot] = []
    at = directory.offset - end
    for full_name, member in directory.members.items():
        name = full_name.removeprefix(directory.root)
        if starts[full_name] >= storages[0][1] and member.nbytes:
            stop = starts[full_name] + member.nbytes - end
            if stop > 0:
                slots.append(_Slot(starts[full_name] - end, member.nbytes, name, is_content=True))
            if behind[stop : stop + 4] == b"PK\x07\x08":
                slots.append(_Slot(stop + _CRC_IN_DESCRIPTOR, _SLOT, name, is_content=False))
            slots.append(_Slot(at + _CRC_AT, _SLOT, name, is_content=False))
        lengths = (int.from_bytes(behind[at + 28 + 2 * k : at + 30 + 2 * k], "little") for k in range(3))
        at += _ENTRY_NBYTES + sum(lengths)
    slots.sort(key=lambda slot: slot.start)
    pieces: list[tuple[int, bytes]] = []
    at = 0
    for slot in slots:
        pieces.append((at, behind[at : slot.start]))
        at = slot.start + slot.length
    pieces.append((at, behind[at:]))
    fixed = {slot.member for slot in slots}
    rows = tuple((name, start, length, 0 if name in fixed else crc) for name, start, length, crc in members)
    return _Kind(head[: storages[0][1]], len(behind), tuple(pieces), tuple(slots), rows)


def _own_sums(kind: _Kind, head: bytes, tail: bytes) -> dict[str, int] | None:
    """The checksums of members behind the head, None for an item of another kind, or one that contradicts itself."""
    if not head.startswith(kind.head):
        return None
    base = len(tail) - kind.nbytes_behind
    for start, piece in kind.pieces:
        if not tail.startswith(piece, base + start):
            return None
    found: dict[str, int] = {}
    for slot in kind.slots:
        raw = tail[base + slot.start : base + slot.start + slot.length]
        value = crc32(raw) if slot.is_content else int.from_bytes(raw, "little")
        if found.setdefault(slot.member, value) != value:
            return None
    return found
