"""A header is the JSON at the start of a safetensors file: names, dtypes, shapes and byte ranges, and free metadata.

Layout (huggingface/safetensors 0.8, ``safetensors/src/tensor.rs``): u64 little-endian length ``N``, ``N`` bytes of JSON
padded with spaces, then the payload; ``data_offsets`` count from the payload's first byte, the end is exclusive, and
the tensors fill the payload without hole or overlap. There is no checksum.

Pure: bytes in, records out, and back. Knows no store, no index, no manifest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ckpt_tool.dtypes import DTYPES, DType, from_safetensors, opaque
from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = [
    "MAX_HEADER_NBYTES",
    "PEER_MAX_HEADER_NBYTES",
    "Entry",
    "Header",
    "build_header",
    "entry_fields",
    "has_type",
    "header_nbytes",
    "parse_header",
]

MAX_HEADER_NBYTES = 1 << 30
"""A longer header is refused: it is a damaged length, not a header."""
PEER_MAX_HEADER_NBYTES = 100_000_000
"""The reference library refuses headers above this (``MAX_HEADER_SIZE`` in tensor.rs)."""
ALIGNMENT = 64
"""Payloads that are laid out here start at a multiple of this (the format asks for none, the library pads to 8)."""
BLOCK_NBYTES = 4096
"""What file systems share: two files have a block in common where its bytes lie in both at a multiple of this."""

_MAX_NDIM = 64
_MAX_SIZE = (1 << 63) - 1
_METADATA = "__metadata__"
_FP4 = DTYPES["float4_e2m1fn_x2"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    """In elements of ``dtype``: for packed fp4 the last dimension is half of what the header says."""
    start: int
    """First byte, counted from the payload's first."""
    end: int
    """One past the last byte."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """What one file says about itself."""

    entries: tuple[Entry, ...]
    """By position in the file."""
    metadata: Mapping[str, str]
    data_start: int
    """Byte of the file where the payload starts."""
    aliases: tuple[tuple[str, str], ...] = field(default=())
    """Pairs of names that have the very same bytes, which the format forbids but which loses nothing."""

    @property
    def payload_nbytes(self) -> int:
        """Bytes after the header."""
        return self.entries[-1].end if self.entries else 0


def header_nbytes(head: bytes, file_nbytes: int, where: str) -> int:
    """Bytes up to the payload, the 8 of the length included, from the first bytes of a file.

    Args:
        head: the first 9 bytes or more (all of a shorter file); the first 512 make the best messages.
        file_nbytes: size of the file.
        where: its path, for messages.

    Raises:
        FormatError: not a safetensors file; the message says what it is instead.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) > 8 and 2 <= length <= min(file_nbytes - 8, MAX_HEADER_NBYTES) and head[8:9] == b"{":
        return 8 + length
    looks_cut = len(head) > 8 and head[8:9] == b"{" and 2 <= length <= MAX_HEADER_NBYTES
    if looks_cut:
        raise FormatError(
            f"the header ends at byte {8 + length:,}, the file has {file_nbytes:,} "
            f"({8 + length - file_nbytes:,} missing)",
            where=where,
            hint="the copy was cut; fetch or save the file again",
        )
    from ckpt_tool.formats._content import content_of  # for this message alone

    found = content_of(head)
    if found is not None and found.what != "a safetensors file":
        raise FormatError(f"not a safetensors file but {found.what}", where=where, hint=found.fix)
    raise FormatError(
        f"not a safetensors file: expected the length of a JSON header in the first 8 bytes, got {length:,} "
        f"in a file of {counted(file_nbytes, 'byte')}",
        where=where,
    )


def parse_header(head: bytes, file_nbytes: int, where: str, *, is_cut: bool = False) -> Header:
    """The checked header of a file.

    Args:
        head: the file from its first byte, at least to the end of its header; what follows is ignored.
        file_nbytes: size of the whole file.
        where: its path, for messages.
        is_cut: let the file end before its tensors do, or behind them: what each tensor has of it, the caller sees.

    Raises:
        FormatError: the header contradicts itself or the file's size, or the file is something else.
    """
    data_start = header_nbytes(head, file_nbytes, where)
    if len(head) < data_start:
        raise FormatError(f"header of {counted(data_start, 'byte')} given only to byte {len(head):,}", where=where)
    listed = _json_object(head[8:data_start], where)
    metadata = _metadata(listed.pop(_METADATA, {}), where)
    entries = sorted((_entry(name, fields, where) for name, fields in listed.items()), key=lambda e: (e.start, e.end))
    end = max((entry.end for entry in entries), default=0) if is_cut else file_nbytes - data_start
    aliases = _check_extents(entries, end, where, data_start)
    return Header(tuple(entries), metadata, data_start, aliases)


def _json_object(raw: bytes, where: str) -> dict[str, Any]:
    """``raw`` as a JSON object whose keys are unique at every level."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise FormatError(f"{twice!r} is listed twice in the header", where=where)
        return found

    def no_constant(text: str) -> None:
        raise FormatError(f"{text} in the header, which is not JSON", where=where)

    try:
        # It starts with a brace (`header_nbytes`), so it is an object or an error.
        listed: dict[str, Any] = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header is not JSON: {error}", where=where) from error
    return listed


def _metadata(found: Any, where: str) -> dict[str, str]:
    if found is None:  # the library takes null for none
        return {}
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise FormatError("expected __metadata__ to map strings to strings", where=where)
    return found


def _entry(name: str, fields: Any, where: str) -> Entry:
    """One entry of the header, checked by itself."""
    try:
        name.encode("utf-8")
        stored_dtype, stored_shape, (start, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{name!a}: expected dtype, shape and two data_offsets, got {str(fields)[:80]}", where=where
        ) from error
    if not isinstance(stored_dtype, str) or not isinstance(stored_shape, list):
        raise FormatError(f"{name!r}: dtype {stored_dtype!r} or shape {stored_shape!r} has the wrong type", where=where)
    if len(stored_shape) > _MAX_NDIM:
        raise FormatError(
            f"{name!r} has {counted(len(stored_shape), 'dimension')}, expected at most {_MAX_NDIM}", where=where
        )
    if not all(type(n) is int and 0 <= n <= _MAX_SIZE for n in (*stored_shape, start, end)) or start > end:
        raise FormatError(
            f"{name!r}: shape {stored_shape} and bytes [{start}, {end}) must be ascending counts", where=where
        )
    dtype, shape = _element_type(name, stored_dtype, stored_shape, end - start, where)
    return Entry(name, dtype, shape, start, end)


def _element_type(
    name: str, stored: str, sizes: Sequence[int], nbytes: int, where: str
) -> tuple[DType, tuple[int, ...]]:
    """The dtype and shape that the header's words mean, checked against the bytes."""
    numel, dtype, said = prod(sizes), from_safetensors(stored), f"{name!r}: {stored} of shape {list(sizes)}"
    if numel > _MAX_SIZE:
        raise FormatError(f"{name!r}: shape {list(sizes)} has more than 2**63 elements", where=where)
    if dtype is _FP4:
        if sizes and sizes[-1] % 2 == 0:
            sizes = (*sizes[:-1], sizes[-1] // 2)
            numel = prod(sizes)
        else:
            dtype = DType(stored, 4, "opaque", stored)
    if dtype is None:
        try:
            dtype = opaque(stored, numel=numel, nbytes=nbytes)
        except FormatError as error:
            raise FormatError(f"{name!r}: {error.message}", where=where) from error
    n_bits = numel * dtype.bits
    if n_bits != nbytes * 8:
        takes = f"{n_bits:,} bits, which fill no whole bytes" if n_bits % 8 else f"{n_bits // 8:,} bytes"
        raise FormatError(f"{said} takes {takes}, its data_offsets span {nbytes:,}", where=where)
    return dtype, tuple(sizes)


def _check_extents(
    entries: Sequence[Entry], payload_nbytes: int, where: str, data_start: int
) -> tuple[tuple[str, str], ...]:
    """Pairs of names with the same bytes; any other overlap, a hole, or bytes past either end is an error."""
    aliases = []
    reached, last = 0, None
    for entry in entries:
        if last is not None and entry.nbytes and (entry.start, entry.end) == (last.start, last.end):
            aliases.append((last.name, entry.name))
            continue
        if entry.start != reached:
            place = f"{where}:{data_start + min(entry.start, reached)}"
            if last is not None and entry.start < reached:
                raise FormatError(
                    f"{entry.name!r} starts {counted(reached - entry.start, 'byte')} before {last.name!r} ends",
                    where=place,
                )
            raise FormatError(
                f"{counted(entry.start - reached, 'byte')} before {entry.name!r}, of no tensor", where=place
            )
        reached = entry.end
        last = entry if entry.nbytes or last is None else last
    if reached > payload_nbytes and last is not None:
        raise FormatError(
            f"{last.name!r} ends at byte {data_start + reached:,}, the file has {data_start + payload_nbytes:,} "
            f"({reached - payload_nbytes:,} missing)",
            where=where,
            hint="the copy was cut; fetch or save it again, or keep what is whole: ckpt verify SRC --salvage OUT",
        )
    if reached < payload_nbytes:
        raise FormatError(
            f"{counted(payload_nbytes - reached, 'byte')} after the last tensor, of none",
            where=f"{where}:{data_start + reached}",
            hint="two writes into one file, or a header of another file; the tensors that it names alone: ckpt verify "
            "SRC --salvage OUT",
        )
    return tuple(aliases)


def has_type(dtype: DType, shape: Sequence[int]) -> bool:
    """Whether a header has words for a tensor of this type and shape."""
    return dtype.safetensors is not None and (dtype is not _FP4 or len(shape) > 0)


def entry_fields(dtype: DType, shape: Sequence[int]) -> tuple[str, list[int]]:
    """The header's words for a dtype and shape: the inverse of what `parse_header` makes of them.

    >>> entry_fields(DTYPES["float4_e2m1fn_x2"], (2, 4))
    ('F4', [2, 8])

    Raises:
        Unsupported: the format has no such type.
    """
    if dtype.safetensors is None:
        raise Unsupported(f"safetensors has no {dtype.name}")
    if dtype is _FP4:
        if not shape:
            raise Unsupported("safetensors has no packed fp4 scalar")
        return dtype.safetensors, [*shape[:-1], shape[-1] * 2]
    return dtype.safetensors, list(shape)


def build_header(
    tensors: Iterable[tuple[str, DType, Sequence[int]]],
    metadata: Mapping[str, str],
    origins: Mapping[str, int] | None = None,
) -> tuple[bytes, Header]:
    """``(bytes, header)`` of a file with ``tensors`` (name, dtype, shape) in that order; the payload follows the bytes.

    Padded with spaces so that the payload starts at a multiple of `ALIGNMENT`, or with ``origins``, bytes of other
    files at which tensors begin, so that most payload has the same place within a block as there.

    Raises:
        Unsupported: the format has no such dtype or name, or a tensor is no whole number of bytes.
    """
    listed: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    entries, start = [], 0
    for name, dtype, shape in tensors:
        if name == _METADATA or not _is_text(name):
            raise Unsupported(
                f"a safetensors header can call no tensor {name!r}", hint="rename it with ckpt edit, or --exclude it"
            )
        word, stored_shape = entry_fields(dtype, shape)
        nbytes, rest = divmod(prod(shape) * dtype.bits, 8)
        if rest:
            raise Unsupported(f"{name!r}: {dtype.name} of shape {list(shape)} is no whole number of bytes")
        listed[name] = {"dtype": word, "shape": stored_shape, "data_offsets": [start, start + nbytes]}
        entries.append(Entry(name, dtype, tuple(shape), start, start + nbytes))
        start += nbytes
    text = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    place = _place_in_block(entries, origins or {})
    step, rest = (ALIGNMENT, 0) if place is None else (BLOCK_NBYTES, place)
    text += b" " * ((rest - 8 - len(text)) % step)
    return len(text).to_bytes(8, "little") + text, Header(tuple(entries), dict(metadata), 8 + len(text))


def _is_text(name: str) -> bool:
    """Whether it has a UTF-8 form: half of a surrogate pair, which a pickle can hold, has none."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _place_in_block(entries: Sequence[Entry], origins: Mapping[str, int]) -> int | None:
    """Where in a block the payload has to begin for most bytes to lie in theirs as in ``origins``; None for anywhere.

    Only multiples of 8 count, as the library pads to.
    """
    wanted: Counter[int] = Counter()
    for entry in entries:
        if entry.name in origins and (origins[entry.name] - entry.start) % 8 == 0:
            wanted[(origins[entry.name] - entry.start) % BLOCK_NBYTES] += entry.nbytes
    return max(wanted, key=lambda place: (wanted[place], -place), default=None)
