"""Items of one kind have the same bytes around their payload, checksums aside: what one's directory says, all say.

A checkpoint has thousands of items and a few dozen kinds (dtype and sizes), so that reading each directory anew would
take most of the time that checking their checksums takes. An item that differs by one byte is read by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tool.formats._zip.directory import Read, ZipDirectory, payload_offset, read_directory

__all__ = ["ItemKinds", "MemberSum"]

MemberSum = tuple[str, int, int, int]
"""Name, first byte in the item, bytes, CRC-32."""

_ENTRY_NBYTES = 46
_CRC_AT = 16


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is the same for all items of a kind."""

    head: bytes
    """All bytes before the payload."""
    pieces: tuple[bytes, ...]
    """The directory and what follows it, without the checksums between."""
    members: tuple[tuple[str, int, int, int], ...]
    """Name, first byte, bytes, and which checksum it has."""


class ItemKinds:
    """Checksums of items; each distinct directory is parsed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[_Kind]] = {}

    def sums(self, read: Read, nbytes: int, head: bytes, tail: bytes, *, where: str) -> Iterator[MemberSum]:
        """Of ``data.pkl`` and each stored member below ``data/``, those that have a checksum.

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
            found = _checksums(kind, head, tail)
            if found is not None:
                yield from ((name, start, length, found[at]) for name, start, length, at in kind.members if found[at])
                return
        directory = read_directory(read, nbytes, where=where, tail_nbytes=len(tail))
        members = [
            (name, payload_offset(read, member, where=where), member.nbytes, member.crc32)
            for full_name, member in directory.members.items()
            if _is_wanted(name := full_name.removeprefix(directory.root)) and member.is_stored
        ]
        new = _kind(directory, members, nbytes, head, tail)
        if new is not None:
            self._known.setdefault((nbytes, len(tail)), []).append(new)
        yield from (member for member in members if member[3])


def _is_wanted(name: str) -> bool:
    return name == "data.pkl" or name.startswith("data/")


def _kind(directory: ZipDirectory, members: list[MemberSum], nbytes: int, head: bytes, tail: bytes) -> _Kind | None:
    """The kind of an item, None where more than its checksums may be its own."""
    start = directory.offset - (nbytes - len(tail))
    storages = [member for member in members if member[0].startswith("data/")]
    if start < 0 or len(storages) != 1 or storages[0][1] > len(head):
        return None
    pieces: list[bytes] = []
    number: dict[str, int] = {}
    at = kept = start
    for turn, name in enumerate(directory.members):
        lengths = struct.unpack_from("<HHH", tail, at + 28)
        pieces.append(tail[kept : at + _CRC_AT])
        kept = at + _CRC_AT + 4
        number[name.removeprefix(directory.root)] = turn
        at += _ENTRY_NBYTES + sum(lengths)
    pieces.append(tail[kept:])
    rows = tuple((name, first, length, number[name]) for name, first, length, _ in members)
    return _Kind(head[: storages[0][1]], tuple(pieces), rows)


def _checksums(kind: _Kind, head: bytes, tail: bytes) -> list[int] | None:
    """The checksums of all members, None for an item of another kind."""
    if not head.startswith(kind.head):
        return None
    at = len(tail) - sum(map(len, kind.pieces)) - 4 * (len(kind.pieces) - 1)
    found: list[int] = []
    for piece in kind.pieces:
        if not tail.startswith(piece, at):
            return None
        at += len(piece)
        found.append(int.from_bytes(tail[at : at + 4], "little"))
        at += 4
    return found[:-1]
