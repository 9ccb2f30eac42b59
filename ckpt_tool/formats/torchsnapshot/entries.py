"""Entries of ``.snapshot_metadata``: what each rank has under each path, and where its bytes lie.

A path begins with the rank; keys in it are percent-encoded, and whether a key is a number is told by the entry of the
dict or list around it. Source: torchsnapshot 0.1.0, ``manifest.py`` and ``flatten.py``. Reads nothing.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.torchsnapshot.tree import CONTAINERS
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.urls import check_path

__all__ = ["Entry", "Metadata", "Shard", "parse_metadata"]

_MAX_NDIM = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """One stored box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    location: str
    start: int
    nbytes: int
    """-1 for all of the file."""
    is_raw: bool
    """Whether the bytes are the elements; else the file is torch.save's."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one rank has under one path."""

    rank: int
    path: KeyPath
    kind: str
    """As the manifest calls it."""
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    """Of the whole, None where no entry tells it."""
    shards: tuple[Shard, ...] = ()
    is_replicated: bool = False
    value: Any = None
    location: str = ""

    @property
    def fqn(self) -> str:
        """Keys joined by dots."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class Metadata:
    """All of it."""

    version: str
    world_size: int
    entries: tuple[Entry, ...]
    int_keyed: tuple[str, ...]
    """Dicts with integer keys, which a path cannot tell from lists."""


def parse_metadata(text: bytes, where: str) -> Metadata:
    """The manifest of a snapshot.

    Raises:
        FormatError: damaged.
        Unsupported: written as YAML that is no JSON.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith((b"manifest:", b"version:")):
            raise Unsupported(
                "a manifest in YAML, as torchsnapshot wrote before 0.1.0", where=where, hint="save it again with 0.1.0"
            ) from error
        raise FormatError(f"not JSON: {str(error)[:200]}", where=where) from error
    try:
        rows: Mapping[str, Mapping[str, Any]] = document["manifest"]
        keys = {path: row.get("keys") for path, row in rows.items() if row.get("type") in CONTAINERS}
        lists = {path for path, row in rows.items() if row.get("type") == "list"}
        entries = []
        for path, row in rows.items():
            rank, keyed = _key_path(path, keys, lists, where)
            entries += list(_entry(rank, keyed, row, f"{where}: {path}"))
        version, world_size = str(document["version"]), int(document["world_size"])
    except (AttributeError, KeyError, TypeError, ValueError, struct.error) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"no manifest of a snapshot: {error!r}"[:300], where=where) from error
    int_keyed = dict.fromkeys(
        ".".join(map(str, _key_path(path, keys, lists, where)[1]))
        for path, own in keys.items()
        if path not in lists and own and any(type(key) is int for key in own) and "/" in path
    )
    return Metadata(version, world_size, tuple(entries), tuple(int_keyed))


def _key_path(path: str, keys: Mapping[str, Any], lists: set[str], where: str) -> tuple[int, KeyPath]:
    """Rank and keys of a path.

    Raises:
        FormatError: it does not begin with a rank.
    """
    rank, *parts = path.split("/")
    if not rank.isdecimal() or len(rank) > 9:
        raise FormatError(f"the path {path!r} does not begin with a rank", where=where)
    found: list[str | int] = []
    above = rank
    for part in parts:
        text = unquote(part)
        own = keys.get(above)
        is_number = above in lists or (own is not None and text.isdecimal() and int(text) in own and text not in own)
        found.append(int(text) if is_number and text.isdecimal() else text)
        above = f"{above}/{part}"
    return int(rank), tuple(found)


def _entry(rank: int, path: KeyPath, row: Mapping[str, Any], where: str) -> Iterator[Entry]:
    kind = row["type"]
    if kind in CONTAINERS:
        if kind != "list" and path and not row["keys"]:  # an empty list cannot be told from one whose entries follow
            yield Entry(rank, path, "value", value={}, is_replicated=False)
    elif kind == "Tensor":
        shape = _numbers(row["shape"], where)
        shard = _shard(row, (0,) * len(shape), shape, where)
        yield Entry(rank, path, kind, str(row["dtype"]), shape, (shard,), bool(row["replicated"]))
    elif kind in ("ShardedTensor", "DTensor", "ChunkedTensor"):
        found = _sharded(rank, path, row, where)
        yield from [found] if found is not None else ()
    elif kind == "object":
        location = check_path(str(row["location"]), root=where)
        yield Entry(rank, path, kind, location=location, is_replicated=bool(row["replicated"]))
    else:
        yield Entry(rank, path, "value", value=_value(kind, row["serialized_value"], where))


def _sharded(rank: int, path: KeyPath, row: Mapping[str, Any], where: str) -> Entry | None:
    """The entry of a tensor in parts; None for a rank that has none of them."""
    parts = row["chunks"] if row["type"] == "ChunkedTensor" else row["shards"]
    shards = []
    if not parts and "dtype" not in row:
        return None
    dtypes = {str(part["tensor"]["dtype"]) for part in parts} or {str(row["dtype"])}
    if len(dtypes) != 1:
        raise FormatError(f"{counted(len(parts), 'part')} of {counted(len(dtypes), 'type')}", where=where)
    for part in parts:
        sizes = _numbers(part["sizes"], where)
        if _numbers(part["tensor"]["shape"], where) != sizes:
            raise FormatError(f"a part of sizes {list(sizes)} holds {part['tensor']['shape']}", where=where)
        shards.append(_shard(part["tensor"], _numbers(part["offsets"], where), sizes, where))
    shape = _numbers(row["shape"], where) if "shape" in row else None
    return Entry(rank, path, row["type"], dtypes.pop(), shape, tuple(shards), bool(row.get("replicated", False)))


def _shard(tensor: Mapping[str, Any], offsets: tuple[int, ...], sizes: tuple[int, ...], where: str) -> Shard:
    if len(offsets) != len(sizes):
        raise FormatError(f"offsets {list(offsets)} of sizes {list(sizes)}", where=where)
    location = check_path(str(tensor["location"]), root=where)
    serializer = tensor["serializer"]
    if serializer not in ("buffer_protocol", "torch_save"):
        return Shard(offsets, sizes, location, 0, -1, is_raw=False)
    start, end = (0, -1) if tensor["byte_range"] is None else _numbers(tensor["byte_range"], where)
    if end != -1 and end < start:
        raise FormatError(f"bytes {start:,} to {end:,}", where=where)
    return Shard(offsets, sizes, location, start, end - start if end != -1 else -1, serializer == "buffer_protocol")


def _numbers(values: Any, where: str) -> tuple[int, ...]:
    found = tuple(values)
    if len(found) > _MAX_NDIM or any(type(n) is not int or not 0 <= n < 1 << 60 for n in found):
        raise FormatError(f"{str(found)[:100]} are no sizes", where=where)
    return found


def _value(kind: str, text: str, where: str) -> Any:
    if kind == "int":
        return int(text)
    if kind == "str":
        return text
    if kind == "bool":
        return text == "True"
    if kind == "bytes":
        return base64.b64decode(text)
    if kind == "float":
        return struct.unpack("<d", base64.b64decode(text))[0]
    raise FormatError(f"a value of the unknown type {kind!r}", where=where)
