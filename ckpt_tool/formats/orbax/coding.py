"""How the bytes of a zarr chunk are coded, as steps of `storage.virtual.codecs`, by ``.zarray`` or ``zarr.json``.

Names and settings: the codecs of zarr 3 (``transpose``, ``bytes``, ``zstd``, ``gzip``, ``blosc``, ``crc32c``), and
those of numcodecs, which zarr 2 calls by their ``id`` and zarr 3 by ``numcodecs.<id>``. What changes numbers
(``delta``, ``fixedscaleoffset`` ...) is not known here: decoding it is arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.errors import Unsupported
from ckpt_tool.records import dataclass

__all__ = ["CRC_NBYTES", "Chain", "chain_of", "steps_of_version2"]

CRC_NBYTES = 4
_COMPRESSIONS = {
    "zstd": "zstd", "zlib": "zlib", "gzip": "gzip", "blosc": "blosc", "lz4": "lz4", "bz2": "bz2", "lzma": "xz",
}  # fmt: skip
_PREFIX = "numcodecs."
_UNCHANGED = frozenset({"bitround"})
"""Filters that lose bits when they are written, and whose result is read as it is."""
_XZ_FORMAT = 1
_MAX_ELEMENT_NBYTES = 9999


@dataclass(frozen=True, slots=True)
class Chain:
    """What zarr 3 does to a chunk."""

    is_big_endian: bool
    codec: str | None
    """Steps that decode it, None where its bytes stand as they are."""
    tail_nbytes: int
    """Bytes of a checksum behind it."""
    order: tuple[int, ...] | None
    """Dimensions of the chunk from the slowest to the fastest one, None for row-major."""


def steps_of_version2(
    compressor: Mapping[str, Any] | None, filters: Sequence[Mapping[str, Any]], itemsize: int, where: str
) -> str | None:
    """Steps that decode a chunk of zarr 2, whose filters were applied first to last and then the compressor.

    Raises:
        Unsupported: one of them is not known.
    """
    steps = [] if compressor is None else [_step(str(compressor["id"]), compressor, itemsize, where)]
    steps += [_step(str(one["id"]), one, itemsize, where) for one in reversed(filters)]
    return "|".join(step for step in steps if step) or None


def chain_of(codecs: Sequence[Mapping[str, Any]], ndim: int, itemsize: int, where: str) -> Chain:
    """What ``codecs`` of zarr 3 are: perhaps ``transpose``, ``bytes``, compressions, perhaps a checksum at the end.

    Raises:
        Unsupported: another order, or one that is not known.
    """
    names = [str(one["name"]) for one in codecs]
    order = None
    if names[:1] == ["transpose"]:
        order = tuple(codecs[0]["configuration"]["order"])
        if sorted(order) != list(range(ndim)):
            raise Unsupported(f"dimensions in the order {list(order)}, expected each of {ndim} once", where=where)
        codecs, names = codecs[1:], names[1:]
    tail = names[-1:] == ["crc32c"]
    if names[:1] != ["bytes"] or "crc32c" in names[: len(names) - tail]:
        raise Unsupported(
            f"codecs {names}: expected bytes, then compressions, and at most a crc32c behind", where=where
        )
    is_big = codecs[0].get("configuration", {}).get("endian") == "big"
    inner = codecs[1 : len(codecs) - tail]
    steps = [
        _step(str(one["name"]).removeprefix(_PREFIX), one.get("configuration") or {}, itemsize, where)
        for one in reversed(inner)
    ]
    return Chain(is_big, "|".join(step for step in steps if step) or None, CRC_NBYTES * tail, order)


def _step(name: str, settings: Mapping[str, Any], itemsize: int, where: str) -> str:
    """One step, empty where there is nothing to undo."""
    if name in _UNCHANGED:
        return ""
    if name == "shuffle":
        width = settings.get("elementsize", itemsize)
        if type(width) is int and 0 < width <= _MAX_ELEMENT_NBYTES:
            return f"shuffle:{width}"
    elif name in _COMPRESSIONS and (name != "lzma" or settings.get("format", _XZ_FORMAT) == _XZ_FORMAT):
        return _COMPRESSIONS[name]
    known = ", ".join((*_COMPRESSIONS, "shuffle", *_UNCHANGED))
    raise Unsupported(f"chunks are coded with {name!r}, expected one of {known}, or nothing", where=where)
