"""Part of a manifest: some tensors with their chunks over the same files, or some files with what lies in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import FileTable

__all__ = ["only_files", "only_tensors"]


def only_tensors(manifest: Manifest, rows: Sequence[int]) -> Manifest:
    """``manifest`` with only the tensors at ``rows``, in that order, and their chunks, in table order."""
    if list(rows) == list(range(len(manifest.tensors))):
        return manifest
    new_number = np.full(len(manifest.tensors), -1, dtype=np.int64)
    new_number[list(rows)] = np.arange(len(rows))
    kept = np.flatnonzero(new_number[manifest.chunks.tensor] >= 0)
    tensors = manifest.tensors.take(rows)
    width = tensors.shape.shape[1]
    chunks = manifest.chunks.take(kept)
    chunks = chunks.replace(
        tensor=new_number[chunks.tensor].astype(np.int32),
        offsets=chunks.offsets[:, :width],
        sizes=chunks.sizes[:, :width],
        strides=None if chunks.strides is None else chunks.strides[:, :width],
    )
    return manifest.replace(tensors=tensors, chunks=chunks)


def only_files(manifest: Manifest, is_kept: Sequence[bool]) -> Manifest:
    """``manifest`` with the chunks that lie in some of its files (one mark per file), and these files alone."""
    mask = np.array(is_kept, dtype=np.bool_)
    new_number = np.cumsum(mask) - 1
    chunks = manifest.chunks.take(np.flatnonzero(mask[manifest.chunks.file]))
    return manifest.replace(
        chunks=chunks.replace(file=new_number[chunks.file].astype(np.int32)),
        files=FileTable(tuple(entry for entry, kept in zip(manifest.files, is_kept, strict=True) if kept)),
        items=None if manifest.items is None else manifest.items.take_files(np.flatnonzero(mask)),
    )
