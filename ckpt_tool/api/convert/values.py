"""Small tensors as objects, for targets that have them inside of their own."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.subset import only_tensors

__all__ = ["as_values"]


def as_values(
    checkpoint: Checkpoint, manifest: Manifest, blobs: Sequence[Blob], fqns: Sequence[str]
) -> tuple[Manifest, tuple[Blob, ...]]:
    """``manifest`` without the tensors ``fqns``, and ``blobs`` with their values behind them, as arrays.

    Tensors over the same bytes are read once.
    """
    if not fqns:
        return manifest, tuple(blobs)
    wanted = [manifest.tensor(fqn) for fqn in fqns]
    chunks = manifest.chunks
    places = []
    for fqn in fqns:
        rows = chunks.rows_of(manifest.tensor_id(fqn))
        columns = (chunks.file, chunks.offset, chunks.length)
        places.append(tuple(tuple(column[rows].tolist()) for column in columns))
    first = dict(zip(reversed(places), reversed(fqns), strict=True))
    names = list(first.values())
    arrays = checkpoint.read([(fqn, Box.whole(manifest.tensor(fqn).shape)) for fqn in names])
    values = dict(zip(names, arrays, strict=True))
    found = [
        Blob(meta.fqn, "value", None, values[first[place]], meta.path, None, is_loaded=True)
        for meta, place in zip(wanted, places, strict=True)
    ]
    gone = set(fqns)
    kept = [row for row, fqn in enumerate(manifest.tensors.fqns) if fqn not in gone]
    return only_tensors(manifest, kept), (*blobs, *found)
