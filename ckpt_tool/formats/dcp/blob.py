"""A safetensors blob inside a ``.distcp``: what ``SerializationFormat.SAFETENSORS`` writes behind a file's objects.

Storage records of its tensors all name the blob's first byte, and as length the tensor's own bytes; the header says
where each tensor lies. It is keyed by fqn alone, so of two chunks of one tensor in one file only the last survives: the
chunk's offsets, which the header keeps too, tell which. Source: torch 2.13 ``filesystem.py::_write_files_from_queue``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpt_tool.dtypes import DType, from_safetensors
from ckpt_tool.errors import FormatError
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["BlobTensor", "header_nbytes", "parse_blob"]

_MAX_HEADER_NBYTES = 1 << 30
_SHARDING = "DCP_SHARDING_INFO"


@dataclass(frozen=True, slots=True)
class BlobTensor:
    """One tensor of a blob."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    """Of the first element, in bytes from the blob's first byte."""
    length: int
    saved_offsets: tuple[int, ...] | None
    """Offsets of the chunk in the global tensor, None where the header does not say."""


def header_nbytes(head: bytes, available_nbytes: int, where: str) -> int:
    """Bytes of the blob up to its payload, from its first nine bytes.

    Raises:
        FormatError: neither a zip nor a safetensors blob starts here.
    """
    length = int.from_bytes(head[:8], "little")
    if head[8:9] != b"{" or not 2 <= length <= min(_MAX_HEADER_NBYTES, available_nbytes - 8):
        raise FormatError("expected a torch.save zip or a safetensors blob here, found neither", where=where)
    return 8 + length


def parse_blob(header: bytes, where: str) -> dict[str, BlobTensor]:
    """Tensors of a blob by fqn; ``header`` is all of it up to the payload.

    Raises:
        FormatError: no JSON, or an entry that contradicts itself.
    """
    try:
        entries = json.loads(header[8:])
        sharding = json.loads(entries.pop("__metadata__", {}).get(_SHARDING, "{}"))
        return {fqn: _tensor(entry, sharding.get(fqn), len(header)) for fqn, entry in entries.items()}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise FormatError(error.message, where=where) from None
        raise FormatError(f"the header of the safetensors blob is damaged: {error}", where=where) from None


def _tensor(entry: Mapping[str, Any], sharding: Mapping[str, Any] | None, start: int) -> BlobTensor:
    dtype, shape, (begin, end) = from_safetensors(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape, begin, end)
    if dtype is None or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise FormatError(f"unknown dtype or odd numbers in the safetensors entry {dict(entry)!r}")
    if dtype.name == "float4_e2m1fn_x2" and shape:  # safetensors counts both values of a byte
        shape = (*shape[:-1], shape[-1] // 2)
    numel = 1
    for size in shape:
        numel *= size
    if end - begin != dtype.nbytes(numel):
        raise FormatError(
            f"{dtype.name}{list(shape)} takes {counted(dtype.nbytes(numel), 'byte')}, the entry has {end - begin:,}"
        )
    saved = None if sharding is None else tuple(sharding["saved_offsets"])
    return BlobTensor(dtype, shape, start + begin, end - begin, saved)
