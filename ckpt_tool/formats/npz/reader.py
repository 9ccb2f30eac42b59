"""The reader of ``.npz``: one tensor per member, under the member's name.

Arrays of Python objects are pickles and become objects of the checkpoint, read as data; so do short texts. Compressed
members (``numpy.savez_compressed``) are decoded where they are read.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_tool.errors import CkptError, FormatError, NotFound
from ckpt_tool.formats._columns import Columns
from ckpt_tool.formats._npy import FIRST_NBYTES, MAX_HEADER_NBYTES, NpyHeader, dtype_of_numpy, header_nbytes, parse_npy
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats._zip.directory import ZipDirectory, ZipMember, local_payload_offset, read_directory
from ckpt_tool.formats._zip.member_sums import member_sums
from ckpt_tool.formats._zip.scan import scan_members
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.sizes import counted

__all__ = ["READER", "NpzReader"]

SUFFIX = ".npz"
_MEMBER = ".npy"
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_FIRST_READ_NBYTES = 512  # local header, its ZIP64 field, and the usual 128 bytes of an array's header
_MAX_VALUE_NBYTES = 64 << 10
_MAX_PICKLE_NBYTES = 64 << 20
_NAMELESS = "V"


class NpzReader(ResolvedReader):
    """One ``.npz`` file: a request for its directory, and the head of each member, neighbours together."""

    name = "npz"

    def probe(self, source: Source) -> Probe:
        """By name and first bytes; a file of another name by its directory."""
        entry = source.listing.entry
        paths = [entry] if entry is not None else list(source.listing.match("*" + SUFFIX))
        if len(paths) != 1:
            return Probe(0.1 if paths else 0.0, f"{len(paths)} .npz files at the top, expected one: name one")
        path = paths[0]
        if not source.head(path, 4).startswith(_ZIP):
            return Probe(0.0, f"{path} is no zip")
        if path.endswith(SUFFIX):
            return Probe(0.95 if entry is not None else 0.8, f"{path} is a zip named .npz")
        try:
            members = _directory(source, path).members
        except CkptError as error:
            return Probe(0.0, f"{path}: {error.message}")
        if members and all(name.endswith(_MEMBER) for name in members):
            return Probe(0.8, f"{path} is a zip of .npy files")
        return Probe(0.0, f"{path} is a zip of other files than .npy")

    def read(self, source: Source) -> Manifest:
        """The manifest.

        Raises:
            FormatError: the zip or an array's header is damaged, or an array does not fill its member.
        """
        path = _path(source)
        members = list(_directory(source, path).members.values())
        arrays = [member for member in members if member.name.endswith(_MEMBER)]
        starts, headers = _headers(source, path, arrays)
        columns = Columns()
        whole = columns.add_file(FileEntry(path, source.listing.nbytes(path)))
        blobs, nameless = [], []
        for member, start, header in zip(arrays, starts, headers, strict=True):
            fqn = member.name.removesuffix(_MEMBER)
            where = f"{path}:{member.name}"
            stored = FileRange(path, start + header.nbytes, member.nbytes - header.nbytes)
            if header.numpy.hasobject:
                blobs.append(Blob(fqn, "pickle", stored if member.is_stored else None, path=(fqn,)))
                continue
            if header.payload_nbytes != stored.length:
                raise FormatError(
                    f"{header.numpy.str}{list(header.shape)} takes {counted(header.payload_nbytes, 'byte')}, the "
                    f"member has {stored.length:,}",
                    where=where,
                )
            if header.numpy.kind in "USMm" and stored.length <= _MAX_VALUE_NBYTES:
                blobs.append(Blob(fqn, "bytes", stored if member.is_stored else None, path=(fqn,)))
                continue
            dtype, is_big = dtype_of_numpy(header.numpy)
            if dtype.name.startswith(_NAMELESS):
                nameless.append(fqn)
            tensor = columns.add_tensor(fqn, dtype, header.shape)
            file, offset = whole, start
            if not member.is_stored:
                part = FileRange(path, start, member.compressed_nbytes)
                file, offset = columns.add_file(FileEntry(f"{path}!{member.name}", member.nbytes, "deflate", part)), 0
            columns.add_chunks(
                tensor,
                offsets=[(0,) * len(header.shape)],
                sizes=[header.shape],
                file=file,
                offset=[offset + header.nbytes],
                length=header.payload_nbytes,
                flags=int(ChunkFlag.BIG_ENDIAN) if is_big and dtype.component_bytes > 1 else 0,
                strides=None if header.strides is None else [header.strides],
            )
        tensors, chunks, files = columns.tables()
        others = [member.name for member in members if not member.name.endswith(_MEMBER)]
        notes = (
            [f"{counted(len(others), 'member', 'are')} no .npy files and were left out: {', '.join(others[:3])}"]
            if others
            else []
        )
        if nameless:
            notes.append(
                f"{counted(len(nameless), 'array', 'have')} void elements ({', '.join(nameless[:3])}): numpy has no "
                "name for bfloat16 and float8 and writes those so; their bytes are kept as they are"
            )
        blobs = list(_loaded(source, path, blobs, {m.name.removesuffix(_MEMBER): m for m in arrays}, starts, headers))
        return Manifest(self.name, source.listing.url, tensors, chunks, files, blobs=tuple(blobs), notes=tuple(notes))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """That the directory was lost, and with it the names of what was cut off."""
        del manifest
        path = _path(source)
        directory = _directory(source, path)
        if directory.is_rebuilt:
            end = max(member.next_offset for member in directory.members.values())
            said = f"{path} was cut: what stood behind its byte {end:,} is not known, as the zip's directory is lost"
            yield Finding("truncated-file", Severity.ERROR, said, where=FileRange(path, end, -1))

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """The CRC-32 of each stored member, its header included; compressed ones are checked when they are decoded."""
        del manifest
        path = _path(source)
        return member_sums(source, path, _directory(source, path), lambda member: member.name.removesuffix(_MEMBER))


def _path(source: Source) -> str:
    if source.listing.entry is not None:
        return source.listing.entry
    paths = source.listing.match("*" + SUFFIX)
    if len(paths) != 1:
        raise NotFound(f"expected one .npz file, found {len(paths)}", where=source.listing.url)
    return paths[0]


def _directory(source: Source, path: str) -> ZipDirectory:
    """The zip's directory; of a file that was cut, what the headers of its members tell, to be salvaged.

    Raises:
        FormatError: not a whole zip.
    """

    def read(offset: int, length: int) -> bytes:
        return source.store.read(path, offset, length)

    nbytes = source.listing.nbytes(path)
    try:
        return read_directory(read, nbytes, where=path)
    except FormatError as error:
        rebuilt = scan_members(read, nbytes)
        if rebuilt is None:
            raise
        if source.is_salvage:
            return rebuilt
        raise FormatError(
            f"{error.message}; {counted(len(rebuilt.members), 'member', 'are')} whole",
            where=error.where,
            hint="the file was cut; fetch it again, or keep what is whole: ckpt verify SRC --salvage OUT",
        ) from error


def _headers(source: Source, path: str, members: Sequence[ZipMember]) -> tuple[list[int], list[NpyHeader]]:
    """Where the payload of each member starts, and its array's header: one round of requests, two for long headers."""
    firsts = [
        FileRange(path, m.header_offset, min(_FIRST_READ_NBYTES + len(m.name), m.next_offset - m.header_offset))
        for m in members
    ]
    starts: list[int] = []
    heads: list[bytes] = []
    for member, first, data in zip(members, firsts, _fetch(source, firsts), strict=True):
        start = local_payload_offset(data, member, where=path)
        starts.append(start)
        heads.append(data[start - first.offset :][: member.compressed_nbytes])
    long = []
    for row, member in enumerate(members):
        place = f"{path}:{member.name}"
        wanted = header_nbytes(_content(member, heads[row], FIRST_NBYTES, place), where=place)
        if len(_content(member, heads[row], wanted, place)) < wanted:
            long.append(row)
    rests = [FileRange(path, starts[r], min(members[r].compressed_nbytes, MAX_HEADER_NBYTES)) for r in long]
    for row, data in zip(long, _fetch(source, rests), strict=True):
        heads[row] = data
    headers = [
        parse_npy(_content(member, head, MAX_HEADER_NBYTES, f"{path}:{member.name}"), where=f"{path}:{member.name}")
        for member, head in zip(members, heads, strict=True)
    ]
    for member, header in zip(members, headers, strict=True):
        if header.nbytes > member.nbytes:
            raise FormatError(f"the array's header is longer than its member {member.name!r}", where=path)
    return starts, headers


def _fetch(source: Source, ranges: Sequence[FileRange]) -> list[bytes]:
    return source.store.fetch(ranges) if ranges else []


def _content(member: ZipMember, head: bytes, limit: int, where: str) -> bytes:
    """The first bytes of a member's content, ``limit`` at most, as far as ``head`` tells them."""
    if member.is_stored:
        return head[:limit]
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(head, limit)
    except zlib.error as error:
        raise FormatError(f"not a deflate stream: {error}", where=where) from error


def _loaded(
    source: Source,
    path: str,
    blobs: Sequence[Blob],
    members: dict[str, ZipMember],
    starts: Sequence[int],
    headers: Sequence[NpyHeader],
) -> Iterator[Blob]:
    """Objects with their values: an array of objects as the list that its pickle holds, text as numpy shows it."""
    rows = {fqn: row for row, fqn in enumerate(members)}
    for blob in blobs:
        row, member = rows[blob.fqn], members[blob.fqn]
        where = f"{path}:{member.name}"
        header = headers[row]
        if member.nbytes > _MAX_PICKLE_NBYTES:
            yield blob
            continue
        raw = source.store.read(path, starts[row], member.compressed_nbytes)
        data = _content(member, raw, member.nbytes, where)[header.nbytes :]
        if len(data) != member.nbytes - header.nbytes:
            raise FormatError(f"{member.name!r} is cut", where=path)
        value: Any
        if blob.kind == "pickle":
            value = load_pickle(data, where=where)
        else:
            array = np.load(io.BytesIO(_content(member, raw, member.nbytes, where)), allow_pickle=False)
            value = array.tolist() if array.dtype.kind in "US" else array.astype(str).tolist()
        yield replace(blob, value=value, is_loaded=True)


READER = NpzReader()
