"""What describes one zarr array, version 2 or 3: its element type, shape, chunks, and how a chunk is coded.

Sources: https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html and .../v3/core/v3.0.html with ``sharding_indexed``
(`coding` knows the other codecs); TensorStore's drivers ``zarr`` and ``zarr3``, which add element types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ckpt_tool.dtypes import DTYPES, DType, opaque
from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.orbax.coding import CRC_NBYTES, chain_of, steps_of_version2
from ckpt_tool.numerals import numeral
from ckpt_tool.records import dataclass

__all__ = ["DESCRIPTIONS", "Array", "parse_array", "zarr2_name"]

DESCRIPTIONS = (".zarray", "zarr.json")
"""Last part of the key that describes an array: version 2, version 3."""
_ZARR2 = {
    "f2": "float16", "f4": "float32", "f8": "float64", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64", "b1": "bool", "c8": "complex64",
    "c16": "complex128",
}  # fmt: skip
_EXTENDED = frozenset(
    {"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
)  # TensorStore's own names, in version 2 too
# TensorStore keeps an element of these in a byte of its own.
_NARROW = frozenset({"int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz"})
_INDEX_ENTRY_NBYTES = 16
_NUMBER = re.compile(numeral(most=12))
_MAX_NDIM = 32


@dataclass(frozen=True, slots=True)
class Array:
    """One array."""

    dtype: DType
    is_big_endian: bool
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """Shape of what one key holds."""
    inner: tuple[int, ...]
    """Shape of what is coded by itself: a part of ``chunks`` where chunks are shards, else the same."""
    codec: str | None
    """Of ``inner``: steps of `storage.virtual.codecs`, or None where its bytes stand as they are."""
    is_sharded: bool
    tail_nbytes: int
    """Bytes of a checksum behind each coded piece."""
    version: int
    separator: str
    is_filled_with_zeros: bool
    """Whether a chunk that is not stored holds zeros."""
    order: tuple[int, ...] | None = None
    """Dimensions from the slowest to the fastest one, None for row-major."""

    @property
    def n_inner(self) -> int:
        """Coded pieces in one key's value."""
        return prod(whole // part for whole, part in zip(self.chunks, self.inner, strict=True))

    @property
    def inner_nbytes(self) -> int:
        """Bytes of one piece, decoded: whole also where the array ends within it."""
        return prod(self.inner) * self.dtype.itemsize

    @property
    def index_nbytes(self) -> int:
        """Bytes of the index at the end of a shard: offset and length of each piece, and a CRC-32C."""
        return self.n_inner * _INDEX_ENTRY_NBYTES + CRC_NBYTES if self.is_sharded else 0

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dimension."""
        return tuple(-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True))

    def chunk_key(self, index: tuple[int, ...]) -> str:
        """The key (below the array's) of the chunk at this place in the grid."""
        parts = ["c", *map(str, index)] if self.version == 3 else list(map(str, index))
        return self.separator.join(parts) or "0"

    def chunk_index(self, key: str) -> tuple[int, ...] | None:
        """Where in the grid the chunk of this key (below the array's) is, None for another key."""
        if self.version == 3:
            head, _, key = key.partition(self.separator) if self.shape else (key, "", "")
            if head != "c":
                return None
        elif not self.shape:
            return () if key == "0" else None
        parts = key.split(self.separator) if self.shape else []
        if len(parts) != len(self.shape) or not all(_NUMBER.fullmatch(part) for part in parts):
            return None
        index = tuple(map(int, parts))
        return index if all(i < n for i, n in zip(index, self.grid, strict=True)) else None


def parse_array(text: bytes, where: str) -> Array | None:
    """The array that a ``.zarray`` or ``zarr.json`` describes; None for a group.

    Raises:
        FormatError: it describes none.
        Unsupported: an element type, an order, a filter or a codec that is not known here.
    """
    try:
        fields = json.loads(text)
        if fields.get("node_type") == "group":
            return None
        found = _version3(fields, where) if fields.get("zarr_format") == 3 else _version2(fields, where)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"no description of an array: {error!r}"[:300], where=where) from error
    numbers = (*found.shape, *found.chunks, *found.inner)
    is_sound = len(found.shape) == len(found.chunks) == len(found.inner) <= _MAX_NDIM
    if not is_sound or not all(type(n) is int and n >= 0 for n in numbers) or 0 in (*found.chunks, *found.inner):
        raise FormatError(f"shape {list(found.shape)} in chunks of {list(found.chunks)}", where=where)
    if any(whole % part for whole, part in zip(found.chunks, found.inner, strict=True)):
        raise FormatError(f"shards of {list(found.chunks)} in pieces of {list(found.inner)}", where=where)
    if max(prod(n or 1 for n in found.shape), prod(found.chunks)) * found.dtype.itemsize >= 1 << 62:
        raise FormatError(f"shape {list(found.shape)} in chunks of {list(found.chunks)} is no array", where=where)
    return found


def zarr2_name(dtype: DType) -> str | None:
    """The little-endian element type of a ``.zarray``, None where neither zarr nor TensorStore has one.

    >>> zarr2_name(DTYPES["float32"]), zarr2_name(DTYPES["bool"]), zarr2_name(DTYPES["bfloat16"])
    ('<f4', '|b1', 'bfloat16')
    """
    code = next((code for code, name in _ZARR2.items() if name == dtype.name), None)
    if code is not None:
        return f"{'|' if dtype.itemsize == 1 else '<'}{code}"
    return dtype.name if dtype.name in _EXTENDED else None


def _version2(fields: Mapping[str, Any], where: str) -> Array:
    if fields["zarr_format"] != 2 or fields.get("order", "C") not in ("C", "F"):
        raise Unsupported(
            f"zarr_format {fields['zarr_format']}, order {fields.get('order')!r}: expected version 2 or 3, C or F",
            where=where,
        )
    name = fields["dtype"]
    is_big = isinstance(name, str) and name.startswith(">")
    kind = DTYPES.get(_ZARR2.get(str(name).lstrip("<>|="), str(name)))
    shape, chunks = tuple(fields["shape"]), tuple(fields["chunks"])
    separator = fields.get("dimension_separator", ".")
    dtype = kind or _narrow(str(name), where)
    codec = steps_of_version2(fields.get("compressor"), fields.get("filters") or (), dtype.itemsize, where)
    is_reversed = fields.get("order") == "F" and len(shape) > 1
    return Array(
        dtype=dtype,
        is_big_endian=is_big and dtype.component_bytes > 1,
        shape=shape,
        chunks=chunks,
        inner=chunks,
        codec=codec,
        is_sharded=False,
        tail_nbytes=0,
        version=2,
        separator=separator,
        is_filled_with_zeros=not fields.get("fill_value"),
        order=tuple(reversed(range(len(shape)))) if is_reversed else None,
    )


def _version3(fields: Mapping[str, Any], where: str) -> Array:
    name = fields["data_type"]
    if fields.get("storage_transformers") or fields["chunk_grid"]["name"] != "regular":
        raise Unsupported(f"chunk_grid {fields['chunk_grid']['name']!r}, expected 'regular'", where=where)
    dtype = DTYPES.get(str(name)) or _narrow(str(name), where)
    shape = tuple(fields["shape"])
    chunks = inner = tuple(fields["chunk_grid"]["configuration"]["chunk_shape"])
    encoding = fields["chunk_key_encoding"]
    if encoding["name"] != "default":
        raise Unsupported(f"chunk_key_encoding {encoding['name']!r}, expected 'default'", where=where)
    separator = encoding.get("configuration", {}).get("separator", "/")
    codecs: Sequence[Mapping[str, Any]] = fields["codecs"]
    is_sharded = codecs[0]["name"] == "sharding_indexed"
    if is_sharded:
        sharding = codecs[0]["configuration"]
        index = [one["name"] for one in sharding["index_codecs"]]
        if len(codecs) > 1 or index != ["bytes", "crc32c"] or sharding.get("index_location", "end") != "end":
            raise Unsupported("shards that are coded again, or with an index elsewhere than at their end", where=where)
        inner, codecs = tuple(sharding["chunk_shape"]), sharding["codecs"]
    chain = chain_of(codecs, len(shape), dtype.itemsize, where)
    return Array(
        dtype=dtype,
        is_big_endian=chain.is_big_endian and dtype.component_bytes > 1,
        shape=shape,
        chunks=chunks,
        inner=inner,
        codec=chain.codec,
        is_sharded=is_sharded,
        tail_nbytes=chain.tail_nbytes,
        version=3,
        separator=separator,
        is_filled_with_zeros=not fields.get("fill_value"),
        order=chain.order,
    )


def _narrow(name: str, where: str) -> DType:
    if name not in _NARROW:
        raise Unsupported(f"element type {name!r} is not known", where=where)
    return opaque(name, numel=1, nbytes=1)
