"""A MessagePack file walked from front to back, arrays stepped over: what each value is, and where arrays' bytes lie.

Flax puts an array into an extension of type 1 (a numpy scalar: 3) that holds MessagePack itself: shape, name of the
element type, bytes; complex numbers are extension 2. Sources: the MessagePack specification, and
``flax/serialization.py`` (0.12). Counts and lengths are claims until the bytes are there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from math import prod
from typing import Any

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["ArrayPlace", "BytesPlace", "walk"]

_WINDOW_NBYTES = 64 << 10
_MAX_DEPTH = 128
_MAX_VALUES = 4_000_000
_MAX_TEXT_NBYTES = 16 << 20
_MAX_NDIM = 64
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i",
    0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# First byte of what has a length: the layout of the length, by kind.
_LENGTHS = {
    "bin": {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"},
    "ext": {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"},
    "str": {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"},
    "array": {0xDC: ">H", 0xDD: ">I"},
    "map": {0xDE: ">H", 0xDF: ">I"},
}
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """An array and where its bytes lie."""

    shape: tuple[int, ...]
    dtype: str
    """numpy's name."""
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BytesPlace:
    """Bytes that are no array, where they lie."""

    offset: int
    nbytes: int


def walk(read: Callable[[int, int], bytes], nbytes: int, where: str) -> Any:
    """The value in a file of ``nbytes`` bytes: dicts, lists, plain values, places of arrays and of bytes.

    Requests: windows of 64 KiB, and none for what lies in an array.

    Raises:
        FormatError: not one whole value.
        Unsupported: extensions that Flax does not write.
    """
    walker = _Walker(read, nbytes, where)
    value = walker.value(0)
    if walker.at != nbytes:
        raise FormatError(f"{counted(nbytes - walker.at, 'byte', 'follow')} the value", where=f"{where}:{walker.at}")
    return value


@dataclass(slots=True)
class _Walker:
    """A place in the file."""

    read: Callable[[int, int], bytes]
    nbytes: int
    where: str
    at: int = 0
    start: int = 0
    window: bytes = b""
    n_values: int = 0

    def raw(self, length: int) -> bytes:
        """The next bytes."""
        self.expect(length, 1)
        end = self.at + length
        if not self.start <= self.at or end > self.start + len(self.window):
            self.start = self.at
            self.window = self.read(self.at, min(max(_WINDOW_NBYTES, length), self.nbytes - self.at))
        piece = self.window[self.at - self.start : end - self.start]
        self.at = end
        return piece

    def number(self, layout: str) -> Any:
        """The next number."""
        return struct.unpack(layout, self.raw(struct.calcsize(layout)))[0]

    def expect(self, count: int, nbytes_each: int) -> None:
        """Nothing, when so much can still follow."""
        if count * nbytes_each > self.nbytes - self.at:
            raise FormatError(
                f"{count:,} things of {nbytes_each} bytes in the {self.nbytes - self.at:,} that are left",
                where=f"{self.where}:{self.at}",
                hint="the file was cut: fetch it again",
            )

    def value(self, depth: int) -> Any:
        """The next value."""
        self.n_values += 1
        if depth > _MAX_DEPTH or self.n_values > _MAX_VALUES:
            raise FormatError("nested deeper, or in more parts, than any checkpoint", where=f"{self.where}:{self.at}")
        first = self.raw(1)[0]
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _NUMBERS:
            return self.number(_NUMBERS[first])
        if first < 0x80 or first >= 0xE0:
            return first if first < 0x80 else first - 0x100
        kind, length = self._length(first)
        if kind == "map":
            return self._map(length, depth)
        if kind == "array":
            self.expect(length, 1)
            return [self.value(depth + 1) for _ in range(length)]
        if kind == "ext":
            return self._extension(length, depth)
        if kind == "bin":
            place = BytesPlace(self.at, length)
            self.expect(length, 1)
            self.at += length
            return place
        if length > _MAX_TEXT_NBYTES:
            raise FormatError(f"a text of {counted(length, 'byte')}", where=f"{self.where}:{self.at}")
        return self.raw(length).decode(errors="surrogateescape")

    def _length(self, first: int) -> tuple[str, int]:
        """Kind and length of what begins with this byte."""
        if 0x80 <= first <= 0x8F:
            return "map", first & 15
        if 0x90 <= first <= 0x9F:
            return "array", first & 15
        if 0xA0 <= first <= 0xBF:
            return "str", first & 31
        if first in _FIXED_EXT:
            return "ext", _FIXED_EXT[first]
        for kind, layouts in _LENGTHS.items():
            if first in layouts:
                return kind, self.number(layouts[first])
        raise FormatError(f"the byte {first:#04x} begins nothing", where=f"{self.where}:{self.at - 1}")

    def _map(self, length: int, depth: int) -> dict[Any, Any]:
        self.expect(length, 2)
        found: dict[Any, Any] = {}
        for _ in range(length):
            key = self.value(depth + 1)
            if not isinstance(key, (str, int)) or key in found:
                raise FormatError(f"the key {str(key)[:50]!r} is no name, or is there twice", where=self.where)
            found[key] = self.value(depth + 1)
        return found

    def _extension(self, length: int, depth: int) -> Any:
        kind = self.number(">b")
        self.expect(length, 1)
        end = self.at + length
        if kind not in (_ARRAY, _COMPLEX, _SCALAR):
            raise Unsupported(
                f"an extension of type {kind}, which Flax does not write", where=f"{self.where}:{self.at}"
            )
        inner = self.value(depth + 1)
        if self.at != end or not isinstance(inner, list):
            raise FormatError(
                f"an extension of {counted(length, 'byte')} holds another thing", where=f"{self.where}:{end}"
            )
        if kind == _COMPLEX:
            if len(inner) != 2 or not all(isinstance(part, (int, float)) for part in inner):
                raise FormatError("a complex number of other than two parts", where=f"{self.where}:{end}")
            return complex(*inner)
        return self._array(inner, end)

    def _array(self, inner: list[Any], end: int) -> ArrayPlace:
        place = f"{self.where}:{end}"
        if len(inner) != 3 or not isinstance(inner[0], list) or not isinstance(inner[2], BytesPlace):
            raise FormatError("an array without shape, type and bytes", where=place)
        shape, name, stored = tuple(inner[0]), inner[1], inner[2]
        if isinstance(name, BytesPlace):  # before 0.3 the name was bytes
            at, self.at = self.at, name.offset
            name = self.raw(min(name.nbytes, 64)).decode(errors="replace")
            self.at = at
        if len(shape) > _MAX_NDIM or any(type(n) is not int or n < 0 for n in shape) or not isinstance(name, str):
            raise FormatError(f"an array of shape {str(shape)[:100]}", where=place)
        if prod(n or 1 for n in shape) >= 1 << 60:
            raise FormatError(f"an array of shape {str(shape)[:100]}", where=place)
        return ArrayPlace(shape, name, stored.offset, stored.nbytes)
