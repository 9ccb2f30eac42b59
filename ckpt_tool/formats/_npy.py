"""The header of a ``.npy`` file: element type, order and shape, as a Python dict in ASCII.

Source: numpy ``lib/format.py`` (versions 1.0, 2.0 and 3.0 of the format). The dict is read as a literal and nothing in
it is called. Knows no container.
"""

from __future__ import annotations

import ast
import struct
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES, DType, opaque
from ckpt_tool.errors import FormatError
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = [
    "FIRST_NBYTES",
    "MAX_HEADER_NBYTES",
    "NpyHeader",
    "dtype_of_numpy",
    "header_nbytes",
    "npy_header",
    "parse_npy",
]

_MAGIC = b"\x93NUMPY"
FIRST_NBYTES = 12
"""First bytes of a file that tell how long its header is."""
MAX_HEADER_NBYTES = 64 << 10
"""Longer than any header of a plain element type; numpy itself stops at 10,000 characters."""
_ALIGNMENT = 64
_MAX_NDIM = 64
_BY_KIND = {
    (row.kind[0] if row.kind != "bool" else "b", row.bits): row
    for row in (DTYPES[name] for name in (
        "float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
        "bool", "complex64", "complex128",
    ))
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a header says."""

    descr: Any
    """numpy's own description of the element type."""
    numpy: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    nbytes: int
    """Of the header: the elements start behind it."""

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.numpy.itemsize

    @property
    def strides(self) -> tuple[int, ...] | None:
        """In elements; None for a row-major array."""
        if not self.is_fortran or len(self.shape) < 2:
            return None
        steps = [1]
        for size in self.shape[:-1]:
            steps.append(steps[-1] * max(size, 1))
        return tuple(steps)


def header_nbytes(head: bytes, *, where: str) -> int:
    """Length of the header of a file that begins with ``head`` (``FIRST_NBYTES``).

    Raises:
        FormatError: no such file, or a header longer than ``MAX_HEADER_NBYTES``.
    """
    if not head.startswith(_MAGIC) or len(head) < FIRST_NBYTES or head[6] not in (1, 2, 3):
        raise FormatError("no numpy array: expected the bytes \\x93NUMPY and version 1 to 3", where=where)
    wide = head[6] > 1
    length = struct.unpack_from("<I" if wide else "<H", head, 8)[0]
    total = int(length) + (12 if wide else 10)
    if total > MAX_HEADER_NBYTES:
        raise FormatError(f"a header of {counted(total, 'byte')}, expected at most {MAX_HEADER_NBYTES:,}", where=where)
    return total


def parse_npy(head: bytes, *, where: str) -> NpyHeader:
    """The header at the start of ``head``, which has at least all of it.

    Raises:
        FormatError: damaged, or not what numpy writes.
    """
    nbytes = header_nbytes(head[:FIRST_NBYTES], where=where)
    start = 12 if head[6] > 1 else 10
    if len(head) < nbytes:
        raise FormatError(f"the header has {counted(nbytes, 'byte')}, only {len(head):,} are here", where=where)
    try:
        found = ast.literal_eval(head[start:nbytes].decode("utf-8" if head[6] == 3 else "latin-1").strip())
        descr, shape, is_fortran = found["descr"], found["shape"], found["fortran_order"]
        kind = np.lib.format.descr_to_dtype(descr)
    except (ValueError, TypeError, KeyError, SyntaxError, MemoryError, RecursionError, IndexError) as error:
        raise FormatError(f"no header of a numpy array: {str(error)[:200]}", where=where) from error
    is_shape = isinstance(shape, tuple) and len(shape) <= _MAX_NDIM and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or type(is_fortran) is not bool or prod(n or 1 for n in shape) * max(kind.itemsize, 1) >= 1 << 62:
        raise FormatError(f"shape {str(shape)[:200]} and fortran_order {is_fortran!r} describe no array", where=where)
    return NpyHeader(descr, kind, shape, is_fortran, nbytes)


def dtype_of_numpy(kind: np.dtype[Any]) -> tuple[DType, bool]:
    """Our name of a numpy type, and whether its bytes are in big-endian order.

    Types that checkpoints have no name for (``V2``, which is how numpy writes bfloat16; text, dates, records) are
    opaque elements of their width, called as numpy calls them.
    """
    found = _BY_KIND.get((kind.kind, kind.itemsize * 8))
    if found is None:
        name = kind.str.lstrip("<>|=") if kind.names is None else f"record{kind.itemsize}"
        return opaque(name, numel=1, nbytes=max(kind.itemsize, 1)), False
    return found, kind.byteorder == ">"


def npy_header(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The header of a row-major array, version 1.0 with the elements at a multiple of 64 bytes, as numpy writes it.

    Types that numpy lacks become void elements of their width, which is how numpy itself writes ml_dtypes' types.
    """
    kind = dtype.as_numpy()
    descr = kind.str if dtype.name in DTYPES and kind.kind in "fiubc" and kind.isbuiltin == 1 else f"|V{dtype.itemsize}"
    text = repr({"descr": descr, "fortran_order": False, "shape": shape}).replace("}", ", }").encode("ascii")
    padding = -(len(_MAGIC) + 4 + len(text) + 1) % _ALIGNMENT
    text += b" " * padding + b"\n"
    return _MAGIC + b"\x01\x00" + struct.pack("<H", len(text)) + text
