"""An OCDBT database read as what it is: a B+tree of keys whose values lie inline or at byte ranges of data files.

The newest version is read. Every node carries a CRC-32C, which is checked. TensorStore's library would give values
only; here each value keeps its place, so that arrays are planned and copied as byte ranges like those of any format.

Source: TensorStore, "ocdbt Key-Value Store driver", section "Storage format" (manifests, version trees and B+tree nodes
of version 0).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt_tool.checksum import crc32c
from ckpt_tool.errors import FormatError, IntegrityError, NotFound, Unsupported
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.urls import check_path

__all__ = ["MANIFEST", "Inline", "Value", "read_database"]

MANIFEST = "manifest.ocdbt"


class Inline(NamedTuple):
    """A value that stands in a leaf."""

    data: bytes
    part: FileRange
    """The leaf's body, coded."""
    codec: str | None
    """Of the body."""
    offset: int
    """In the decoded body."""


Value = Inline | FileRange

_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_HEADER = struct.Struct(">I")
_FOOTER_NBYTES = 4
_MAX_NODE_NBYTES = 64 << 20  # decoded; the default of TensorStore is 8 MiB, Orbax asks for 100 MB at most in memory
_MAX_MANIFEST_NBYTES = 64 << 20
_MAX_HEIGHT = 32
_NO_ROOT = 0xFFFFFFFFFFFFFFFF  # offset and length of an empty tree's root
_MAX_VARINT_NBYTES = 10
_MAX_PATH_NBYTES = 65535


class _File(NamedTuple):
    """A row of a data file table: files of a child node lie below ``base``."""

    base: str
    path: str


class _Child(NamedTuple):
    """A node that is to be read."""

    where: FileRange
    base: str
    height: int
    prefix: bytes


def read_database(source: Source, folder: str) -> dict[str, Value]:
    """Keys and values of the database in ``folder``, sorted by key.

    Costs a request for the manifest and one for each node, those of one height at once.

    Raises:
        NotFound: a data file is missing.
        FormatError: a manifest or node is damaged, or refers to bytes that are not there.
        IntegrityError: a CRC-32C does not match.
        Unsupported: a database whose manifests are numbered, or of a newer version.
    """
    prefix = f"{folder}/" if folder else ""
    path = prefix + MANIFEST
    nbytes = source.listing.nbytes(path)
    if nbytes > _MAX_MANIFEST_NBYTES:
        raise FormatError(f"a manifest of {counted(nbytes, 'byte')}", where=path)
    body = _Body.of(source.read_whole(path), _MANIFEST_MAGIC, FileRange(path, 0, nbytes))
    root = _newest_root(body, prefix)
    found: dict[bytes, Value] = {}
    level = [] if root is None else [root]
    budget = sum(source.listing.sizes.values())
    while level:
        budget -= sum(child.where.length for child in level)
        if budget < 0:  # nodes that refer to each other would otherwise multiply
            raise FormatError("the tree's nodes are more bytes than all files have", where=path)
        for child in level:
            _check_extent(source, child.where)
        below: list[_Child] = []
        for child, data in zip(level, source.store.fetch([c.where for c in level]), strict=True):
            node = _Body.of(data, _NODE_MAGIC, child.where)
            if node.byte() != child.height:
                raise FormatError(f"a node of another height than {child.height}", where=node.where)
            if child.height:
                below += _children(node, child)
            else:
                for key, value in _entries(node, child):
                    if isinstance(value, FileRange):
                        _check_extent(source, value)
                    found[key] = value
        level = below
    try:
        return {key.decode(): found[key] for key in sorted(found)}
    except UnicodeDecodeError as error:
        raise FormatError("a key is no UTF-8 text", where=path) from error


def _unpacked(data: bytes, limit: int, where: str) -> bytes:
    """The content of a zstd frame of at most ``limit`` bytes.

    Raises:
        FormatError: damaged, or longer.
    """
    import pyarrow as pa  # 90 ms of start-up that only such files need

    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            content: bytes = stream.read(limit + 1)
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"not a zstd frame: {error}", where=where) from error
    if len(content) > limit:
        raise FormatError(f"decodes to more than {counted(limit, 'byte')}", where=where)
    return content


def _check_extent(source: Source, where: FileRange) -> None:
    nbytes = source.listing.sizes.get(where.path)
    if nbytes is None:
        raise NotFound("the database refers to this file, which is missing", where=where.path, files=(where.path,))
    if where.end > nbytes:
        raise FormatError(f"the database refers to byte {where.end:,}, the file has {nbytes:,}", where=where.path)


@dataclass(slots=True)
class _Body:
    """The decoded body of a manifest or node, read from front to back."""

    data: bytes
    where: str
    at: int = 0
    part: FileRange | None = None
    """Where the coded body lies."""
    codec: str | None = None

    @classmethod
    def of(cls, data: bytes, magic: int, place: FileRange) -> _Body:
        """Header and footer are checked, the body between them is decoded."""
        where = str(place)
        if len(data) < 12 + _FOOTER_NBYTES or _HEADER.unpack_from(data)[0] != magic:
            raise FormatError(f"expected the four bytes {magic:08x} of OCDBT", where=where)
        length = struct.unpack_from("<Q", data, 4)[0]
        if length != len(data):
            raise FormatError(f"says it has {counted(length, 'byte')}, {len(data):,} are here", where=where)
        expected = struct.unpack_from("<I", data, len(data) - _FOOTER_NBYTES)[0]
        actual = crc32c(data[:-_FOOTER_NBYTES])
        if actual != expected:
            raise IntegrityError(f"expected CRC-32C {expected:08x}, got {actual:08x}", where=where)
        head = cls(data[:-_FOOTER_NBYTES], where, 12)
        version, compression = head.varint(), head.varint()
        if version or compression > 1:
            raise Unsupported(f"OCDBT version {version} with compression {compression}", where=where)
        rest = head.data[head.at :]
        part = FileRange(place.path, place.offset + head.at, len(rest))
        if compression:
            return cls(_unpacked(rest, _MAX_NODE_NBYTES, where), where, 0, part, "zstd")
        return cls(rest, where, 0, part)

    def raw(self, length: int) -> bytes:
        """The next bytes."""
        piece = self.data[self.at : self.at + length]
        if len(piece) != length:
            raise FormatError("ends inside a field", where=self.where)
        self.at += length
        return piece

    def byte(self) -> int:
        """The next byte."""
        return self.raw(1)[0]

    def varint(self) -> int:
        """The next number, seven bits a byte, the lowest first."""
        value, data, at = 0, self.data, self.at
        for shift in range(0, 7 * _MAX_VARINT_NBYTES, 7):
            if at >= len(data):
                break
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                self.at = at
                return value & 0xFFFFFFFFFFFFFFFF
        raise FormatError("a number ends nowhere", where=self.where)

    def varints(self, count: int) -> list[int]:
        """So many numbers; each takes a byte at least, which bounds what a lie can ask for."""
        if count > len(self.data) - self.at:
            raise FormatError(
                f"{counted(count, 'number')} in {counted(len(self.data) - self.at, 'byte')}", where=self.where
            )
        return [self.varint() for _ in range(count)]

    def texts(self, prefixes: Sequence[int], suffixes: Sequence[int]) -> list[bytes]:
        """Texts that each share a prefix with the one before."""
        texts, last = [], b""
        for shared, length in zip(prefixes, suffixes, strict=True):
            if shared > len(last) or length > _MAX_PATH_NBYTES:
                raise FormatError("a key shares more with the one before it than that has", where=self.where)
            last = last[:shared] + self.raw(length)
            texts.append(last)
        return texts

    def counted(self) -> int:
        """The next number, as a count of things that take a byte each at least."""
        count = self.varint()
        if count > len(self.data) - self.at:
            raise FormatError(
                f"{counted(count, 'entry')} in {counted(len(self.data) - self.at, 'byte')}", where=self.where
            )
        return count

    def files(self, base: str) -> list[_File]:
        """A data file table; ``base`` is where the node itself was found."""
        count = self.counted()
        prefixes = [0, *self.varints(count - 1)] if count else []
        suffixes, bases = self.varints(count), self.varints(count)
        found = []
        for text, length in zip(self.texts(prefixes, suffixes), bases, strict=True):
            try:
                path, own = base + text.decode(), base + text[:length].decode()
            except UnicodeDecodeError as error:
                raise FormatError("the name of a data file is no UTF-8 text", where=self.where) from error
            found.append(_File(own, path))
        return found

    def file(self, files: Sequence[_File], row: int) -> _File:
        """A row of a table."""
        if row >= len(files):
            raise FormatError(f"data file {row} of {len(files)}", where=self.where)
        check_path(files[row].path, root=self.where)
        return files[row]


def _newest_root(body: _Body, base: str) -> _Child | None:
    """The root of the last version, None for an empty database."""
    body.raw(16)  # uuid
    kind = body.varint()
    if kind:
        raise Unsupported(
            "a database with numbered manifests", where=body.where, hint="Orbax writes a single one: copy it with Orbax"
        )
    body.varints(2)  # longest inline value, longest node
    body.byte()  # arity of the version tree
    if body.varint() == 1:
        body.raw(4)  # zstd level
    files = body.files(base)
    count = body.counted()
    if not count:
        return None
    body.varints(count)  # generation numbers, ascending
    heights = list(body.raw(count))
    rows, offsets, lengths = body.varints(count), body.varints(count), body.varints(count)
    height = heights[-1]
    if height > _MAX_HEIGHT:
        raise FormatError(f"a tree of height {height}", where=body.where)
    if offsets[-1] == _NO_ROOT or not lengths[-1]:
        return None
    file = body.file(files, rows[-1])
    return _Child(FileRange(file.path, offsets[-1], lengths[-1]), file.base, height, b"")


def _keys(node: _Body, count: int) -> tuple[list[int], list[int]]:
    return ([0, *node.varints(count - 1)] if count else []), node.varints(count)


def _children(node: _Body, own: _Child) -> list[_Child]:
    """Entries of an interior node."""
    files = node.files(own.base)
    count = node.counted()
    prefixes, suffixes = _keys(node, count)
    shared = node.varints(count)
    keys = node.texts(prefixes, suffixes)
    rows, offsets, lengths = node.varints(count), node.varints(count), node.varints(count)
    children = []
    for key, length, row, offset, nbytes in zip(keys, shared, rows, offsets, lengths, strict=True):
        file = node.file(files, row)
        where = FileRange(file.path, offset, nbytes)
        children.append(_Child(where, file.base, own.height - 1, own.prefix + key[:length]))
    return children


def _entries(node: _Body, own: _Child) -> Iterator[tuple[bytes, Value]]:
    """Keys and values of a leaf."""
    files = node.files(own.base)
    count = node.counted()
    keys = node.texts(*_keys(node, count))
    lengths = node.varints(count)
    kinds = node.varints(count)
    if any(kind > 1 for kind in kinds):
        raise FormatError("a value is stored neither inline nor at a place", where=node.where)
    n_far = sum(kinds)
    rows, offsets = iter(node.varints(n_far)), iter(node.varints(n_far))
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        if kind:
            yield own.prefix + key, FileRange(node.file(files, next(rows)).path, next(offsets), length)
        elif node.codec is None and node.part is not None:
            yield own.prefix + key, FileRange(node.part.path, node.part.offset + node.at, len(node.raw(length)))
        else:
            at = node.at
            yield own.prefix + key, Inline(node.raw(length), node.part or own.where, node.codec, at)
