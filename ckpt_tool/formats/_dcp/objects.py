"""Objects of a checkpoint that are not tensors: each is an item too, a torch.save zip of a Python value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._dcp.items import item_fault
from ckpt_tool.formats._merged import read_merged
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._zip.directory import Read, read_directory, read_member
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.storage.virtual.decode import decoded_blocks

__all__ = ["ZSTD_KIND", "load_blobs", "reader_of"]

ZSTD_KIND = "torch_save+zstd"
"""``Blob.kind`` of an object whose zip is compressed."""


def load_blobs(source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
    """All blobs of ``manifest``, those of ``rows`` loaded; nothing in them is executed.

    Requests: one per object at most; objects within ``store.cost.max_gap_bytes`` of each other share one.

    Raises:
        FormatError: an object's zip or pickle is damaged.
        UnsafePickle: a pickle asks for something that can do harm.
    """
    blobs = list(manifest.blobs)
    wanted = [row for row in sorted(set(rows)) if not blobs[row].is_loaded and blobs[row].where is not None]
    places = [where for row in wanted if (where := blobs[row].where) is not None]
    for where, row in zip(places, wanted, strict=True):
        fault = item_fault(source.listing.sizes, where, blobs[row].fqn)
        if fault is not None:
            raise fault
    paths = sorted({where.path for where in places})
    number = {path: index for index, path in enumerate(paths)}
    columns = [
        np.array(column, dtype=np.int64)
        for column in ([number[w.path] for w in places], [w.offset for w in places], [w.length for w in places])
    ]
    for position, view in read_merged(source.store, paths, *columns):
        blob, where = blobs[wanted[position]], places[position]
        data = bytes(view)
        if blob.kind == ZSTD_KIND:
            data = b"".join(decoded_blocks(source.store, where, "zstd"))
        value = _value(data, f"{where.path}:{where.offset} ({blob.fqn})")
        blobs[wanted[position]] = replace(blob, value=value, is_loaded=True)
    return tuple(blobs)


def reader_of(data: bytes) -> Read:
    """``read(offset, length)`` over bytes that are in memory."""

    def read(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    return read


def _value(data: bytes, where: str) -> Any:
    """The inert value of a torch.save zip."""
    read = reader_of(data)
    directory = read_directory(read, len(data), where=where)
    member = directory.record("data.pkl")
    if member is None:
        raise FormatError("the zip has no data.pkl, expected what torch.save writes", where=where)
    return load_pickle(read_member(read, member, where=where), where=f"{where} data.pkl")
