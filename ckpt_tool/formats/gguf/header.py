"""The header of a GGUF file: key-value pairs, and for each tensor its name, sizes, type and place.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Sizes stand innermost first there,
and outermost first here. A file in big-endian order is told by its version.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from typing import Any

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.gguf.types import GgmlType, ggml_type
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["MAGIC", "Entry", "Header", "parse_header"]

MAGIC = b"GGUF"
_FIRST_WINDOW_NBYTES = 1 << 20
_MAX_HEADER_NBYTES = 512 << 20
_MAX_NDIM = 8
_MAX_DEPTH = 4
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    """In blocks: the last size counts these."""
    offset: int
    """From the file's first byte."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return prod(self.shape) * self.type.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says."""

    version: int
    is_big_endian: bool
    pairs: dict[str, Any]
    entries: tuple[Entry, ...]
    nbytes: int


def parse_header(read: Callable[[int, int], bytes], nbytes: int, where: str, *, is_cut: bool = False) -> Header:
    """The header of a file of ``nbytes`` bytes; ``read(offset, length)`` is called for windows that grow.

    Of a file that ``is_cut``, tensors may end behind its end.

    Raises:
        FormatError: damaged, or longer than any header is.
        Unsupported: version 1, or a type of tensors that is not known.
    """
    cursor = _Cursor(read, nbytes, where)
    if cursor.raw(4) != MAGIC:
        raise FormatError("expected the four bytes GGUF", where=where)
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        cursor.order = ">"
        version = struct.unpack(">I", struct.pack("<I", version))[0]
    if version not in (2, 3):
        raise Unsupported(
            f"GGUF version {version:,}, expected 2 or 3", where=where, hint="llama.cpp's gguf-convert-endian or a "
            "newer conversion writes version 3"
        )  # fmt: skip
    n_tensors, n_pairs = cursor.number("Q"), cursor.number("Q")
    cursor.expect(n_tensors, 24, "tensors")
    cursor.expect(n_pairs, 13, "pairs")
    pairs: dict[str, Any] = {}
    for _ in range(n_pairs):
        key = cursor.text()
        if key in pairs:
            raise FormatError(f"the key {key!r} is there twice", where=where)
        pairs[key] = cursor.value(cursor.number("I"))
    alignment = pairs.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise FormatError(f"general.alignment is {alignment!r}, expected a small number", where=where)
    rows = [cursor.entry() for _ in range(n_tensors)]
    start = -(-cursor.at // alignment) * alignment
    entries = []
    for name, kind, shape, offset in rows:
        entry = Entry(name, kind, shape, start + offset)
        if entry.offset + entry.nbytes > nbytes and not is_cut:
            raise FormatError(
                f"{name!r} ends at byte {entry.offset + entry.nbytes:,}, the file has {nbytes:,}",
                where=where,
                hint="the file was cut: fetch it again, or keep what is whole: ckpt verify SRC --salvage OUT.gguf",
            )
        entries.append(entry)
    return Header(version, cursor.order == ">", pairs, tuple(entries), cursor.at)


@dataclass(slots=True)
class _Cursor:
    """Reads a header from front to back."""

    read: Callable[[int, int], bytes]
    nbytes: int
    where: str
    at: int = 0
    order: str = "<"
    _window: bytes = field(default=b"", repr=False)

    def raw(self, length: int) -> bytes:
        """The next bytes."""
        end = self.at + length
        if end > self.nbytes:
            raise FormatError(f"the header goes on to byte {end:,}, the file has {self.nbytes:,}", where=self.where)
        while end > len(self._window):
            if end > _MAX_HEADER_NBYTES:
                raise FormatError(f"a header of more than {counted(_MAX_HEADER_NBYTES, 'byte')}", where=self.where)
            have = len(self._window)
            wanted = min(max(_FIRST_WINDOW_NBYTES, 2 * have, end), self.nbytes)
            self._window += self.read(have, wanted - have)
        piece = self._window[self.at : end]
        self.at = end
        return piece

    def number(self, code: str) -> int:
        """The next number."""
        value: int = struct.unpack(self.order + code, self.raw(struct.calcsize(self.order + code)))[0]
        return value

    def expect(self, count: int, nbytes_each: int, what: str) -> None:
        """Nothing, when so many things can still follow."""
        if count * nbytes_each > self.nbytes - self.at:
            raise FormatError(f"{count:,} {what} in {counted(self.nbytes - self.at, 'byte')}", where=self.where)

    def text(self) -> str:
        """The next text."""
        length = self.number("Q")
        self.expect(length, 1, "characters")
        try:
            return self.raw(length).decode()
        except UnicodeDecodeError:
            # vocabularies may have tokens that are single bytes of a character
            return self._window[self.at - length : self.at].decode(errors="surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        """The next value of a pair."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise FormatError(f"a value of the unknown kind {kind:,}", where=f"{self.where}:{self.at}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            layout = f"{self.order}{_SCALARS[inner]}"
            width = struct.calcsize(layout)
            self.expect(count, width, "values")
            return [row[0] for row in struct.iter_unpack(layout, self.raw(count * width))]
        self.expect(count, 8, "values")
        return [self.value(inner, depth + 1) for _ in range(count)]

    def entry(self) -> tuple[str, GgmlType, tuple[int, ...], int]:
        """The next tensor: name, type, sizes in blocks, offset in the data."""
        name = self.text()
        ndim = self.number("I")
        if ndim > _MAX_NDIM:
            raise FormatError(f"{name!r} has {counted(ndim, 'dimension')}", where=self.where)
        shape = [self.number("Q") for _ in range(ndim)][::-1]
        number, offset = self.number("I"), self.number("Q")
        kind = ggml_type(number)
        if kind is None:
            raise Unsupported(f"{name!r} has the type {number}, which is not known here", where=self.where)
        if kind.block > 1 and (not shape or shape[-1] % kind.block):
            raise FormatError(f"{name!r}: rows of {shape[-1:]} do not divide into blocks of {kind.block}", where=name)
        if prod(n or 1 for n in shape) >= 1 << 60:
            raise FormatError(f"{name!r} has the sizes {shape}", where=self.where)
        if kind.block > 1:
            shape[-1] //= kind.block
        return name, kind, tuple(shape), offset
