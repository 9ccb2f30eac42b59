"""A torch file is one file that torch.save wrote, opened: the saved object, and where each storage's bytes are.

Both containers are read, told apart by content: the zip (1.6 and later, also repacked and compressed by other tools)
and the stream of five pickles before it. Knows no tensor's name and reads no payload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._content import content_of
from ckpt_tool.formats._pickle.legacy import is_legacy, is_legacy_tar, read_legacy
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.walk import storages
from ckpt_tool.formats._torch_file.inline import inline_places
from ckpt_tool.formats._torch_file.rows import StoragePlace
from ckpt_tool.formats._torch_file.salvage import salvage_text, storage_sizes
from ckpt_tool.formats._zip.directory import (
    LOCAL_HEADER_NBYTES,
    Read,
    ZipDirectory,
    ZipMember,
    is_big_endian,
    local_payload_offset,
    payload_offset,
    read_directory,
    read_member,
)
from ckpt_tool.formats._zip.scan import scan_directory
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.model import FileEntry, FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.fetch import fetch_all

__all__ = [
    "HEAD_NBYTES",
    "TorchFile",
    "is_torch_head",
    "open_torch_file",
    "open_torch_files",
    "predicted_offset",
    "storage_members",
    "zip_directory",
]

HEAD_NBYTES = 512
_TAIL_NBYTES = 64 << 10
_MAX_JOINED_GAP_NBYTES = 64 << 10
_KEPT_NBYTES = 16 << 20
_WIDE_NBYTES = 0xFFFFFFFF
_ALIGNMENT = 64
_TORCH_ZIP = re.compile(rb"PK\x03\x04.{26}[^\0]{1,200}/(?:data\.pkl|\.format_version|version|byteorder)", re.DOTALL)


@dataclass(frozen=True)
class TorchFile:
    """One opened file."""

    path: str
    kind: str
    """``zip`` or ``legacy``."""
    root: Any
    """The saved object, inert."""
    storages: Mapping[str, StoragePlace]
    """By key, those that the archive has."""
    big_endian: bool
    directory: ZipDirectory | None
    """None for a legacy stream."""


def is_torch_head(head: bytes) -> bool:
    """Whether a file that starts with ``head`` (`HEAD_NBYTES`) is surely one of torch.save's.

    False leaves a zip in doubt whose first member is another one than torch puts there.
    """
    return is_legacy(head) or _TORCH_ZIP.match(head) is not None


def open_torch_files(source: Source, paths: Sequence[str]) -> list[TorchFile]:
    """Each file opened, ``store.cost.concurrency`` at once; requests as `open_torch_file`."""
    return fetch_all(lambda path: open_torch_file(source, path), paths, concurrency=source.store.cost.concurrency)


def open_torch_file(source: Source, path: str) -> TorchFile:
    """One file opened.

    Costs three requests for a zip: 512 bytes of head (shared with probes), the last 64 KiB, ``data.pkl``; one more when
    the directory is longer. Payload offsets of stored members are reckoned from their neighbours (``is_exact`` False)
    unless their local headers are among these bytes. Compressed members cost one small request each.
    A legacy stream costs three: head, up to 1 MiB, and 8 bytes; its offsets are exact.

    Raises:
        FormatError: not such a file, or one that is cut; for a zip the message counts the storages that are whole.
        Unsupported: encryption, the tar archives of 2017.
        UnsafePickle: its pickle asks for something that could run code.
    """
    head = source.head(path, HEAD_NBYTES)
    nbytes = source.listing.nbytes(path)
    if is_legacy(head) or is_legacy_tar(head):
        return _open_legacy(source, path, nbytes)
    if not head.startswith(b"PK"):
        content = content_of(head)
        what = content.what if content is not None else "of an unknown kind"
        raise FormatError(
            f"not a torch.save file: it is {what}", where=path, hint=None if content is None else content.fix
        )
    return _open_zip(source, path, nbytes)


def _open_legacy(source: Source, path: str, nbytes: int) -> TorchFile:
    legacy = read_legacy(
        lambda offset, length: source.store.read(path, offset, length), nbytes, where=path, is_cut=source.is_salvage
    )
    entry = FileEntry(path, nbytes)
    places = {key: StoragePlace(key, entry, offset, length) for key, (offset, length) in legacy.storages.items()}
    part = FileRange(path, legacy.pickle_offset, len(legacy.pickle))
    places |= {place.key: place for place in inline_places(legacy.root, legacy.pickle, entry, part)}
    return TorchFile(path, "legacy", legacy.root, places, not legacy.is_little_endian, None)


def zip_directory(source: Source, path: str) -> tuple[ZipDirectory, Read]:
    """The directory of a torch zip, and a read that keeps what it read: one request of 64 KiB, two if it is longer.

    Raises:
        FormatError: not a whole zip; the message says what its local headers still tell.
        Unsupported: a zip that torch did not write.
    """
    nbytes = source.listing.nbytes(path)
    window = _Window(source, path)
    try:
        directory = read_directory(window.read, nbytes, where=path, tail_nbytes=_TAIL_NBYTES)
    except FormatError as error:
        scanned = scan_directory(window.read, nbytes, storage_sizes) if source.is_salvage else None
        if scanned is not None:
            return scanned, window.read
        found = salvage_text(window.read, nbytes, where=path)
        if found is None:
            raise
        said, can_be_salvaged = found
        hint = "the copy or the save was cut: fetch or save the file again"
        hint += ", or keep what is whole: ckpt verify SRC --salvage OUT" if can_be_salvaged else ""
        raise FormatError(f"{error.message}; {said}", where=path, hint=hint) from error
    if not directory.is_torch:
        raise Unsupported(f"a zip of {counted(len(directory.members), 'member')} without data.pkl", where=path)
    return directory, window.read


def _open_zip(source: Source, path: str, nbytes: int) -> TorchFile:
    directory, read = zip_directory(source, path)
    pickle = directory.members[directory.root + "data.pkl"]
    order = directory.record("byteorder")
    end = pickle.next_offset
    if order is not None and 0 <= order.header_offset - end <= _MAX_JOINED_GAP_NBYTES:
        end = order.next_offset
    read(pickle.header_offset, end - pickle.header_offset)  # kept: the members below come out of it
    data = read_member(read, pickle, where=path)
    root = load_pickle(data, where=f"{path}:{pickle.name}")
    big_endian = is_big_endian(read, directory, where=path)
    entry = FileEntry(path, nbytes)
    places = {key: _place(read, member, key, entry) for key, member in storage_members(directory).items()}
    part = FileRange(path, payload_offset(read, pickle, where=path), pickle.compressed_nbytes)
    inline = inline_places(root, data, entry, part, None if pickle.is_stored else "deflate")
    places |= {place.key: place for place in inline}
    if source.is_salvage:  # what was cut off lies beyond the end, so that its tensors are told as lost
        lost = {s.key: s.nbytes for s in storages(root) if s.key not in places}
        places |= {key: StoragePlace(key, entry, nbytes, size) for key, size in lost.items()}
    return TorchFile(path, "zip", root, places, big_endian, directory)


def storage_members(directory: ZipDirectory) -> dict[str, ZipMember]:
    """Members that are storages, by key, in the directory's order."""
    prefix = directory.root + "data/"
    return {name[len(prefix) :]: member for name, member in directory.members.items() if name.startswith(prefix)}


def _place(read: Read, member: ZipMember, key: str, entry: FileEntry) -> StoragePlace:
    crc = member.crc32 or None
    if not member.is_stored:
        start = payload_offset(read, member, where=entry.path)
        part = FileRange(entry.path, start, member.compressed_nbytes)
        content = FileEntry(f"{entry.path}!{member.name}", member.nbytes, "deflate", part)
        return StoragePlace(key, content, 0, member.nbytes, crc)
    header = _kept(read, member.header_offset, LOCAL_HEADER_NBYTES + len(member.name.encode()))
    if header is not None:
        start = local_payload_offset(header, member, where=entry.path)
        return StoragePlace(key, entry, start, member.nbytes, crc)
    return StoragePlace(key, entry, predicted_offset(member), member.nbytes, crc, is_exact=False)


def predicted_offset(member: ZipMember) -> int:
    """Where the payload of a stored member starts, reckoned backwards from the next member.

    torch puts a data descriptor of 16 (from 4 GiB on 24) bytes behind each payload that is not empty, and starts
    payloads at multiples of 64 or more; other writers put nothing there.
    """
    end = member.next_offset
    if member.nbytes:
        start = end - (24 if member.nbytes >= _WIDE_NBYTES else 16) - member.nbytes
        if start % _ALIGNMENT == 0 and start >= member.header_offset + LOCAL_HEADER_NBYTES + len(member.name.encode()):
            return start
    return end - member.nbytes


class _Window:
    """Reads of one file that keep what they read, so that small files and small members cost one request."""

    def __init__(self, source: Source, path: str) -> None:
        self._store = source.store
        self._path = path
        self._kept: list[tuple[int, bytes]] = []

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``; a request unless they were read before."""
        found = self.kept(offset, length)
        if found is not None:
            return found
        data = self._store.read(self._path, offset, length)
        if length <= _KEPT_NBYTES:
            self._kept.append((offset, data))
        return data

    def kept(self, offset: int, length: int) -> bytes | None:
        """The bytes if they were read before."""
        for start, data in self._kept:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return None


def _kept(read: Read, offset: int, length: int) -> bytes | None:
    window = getattr(read, "__self__", None)
    return window.kept(offset, length) if isinstance(window, _Window) else None
