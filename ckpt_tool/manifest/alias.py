"""A second name for a tensor's bytes: a row of its own with the same chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ckpt_tool.manifest.model import Manifest, TensorMeta
from ckpt_tool.manifest.tables import ChunkTable, TensorTable

__all__ = ["same_bytes", "with_aliases"]


def with_aliases(manifest: Manifest, names: Sequence[tuple[int, TensorMeta]]) -> Manifest:
    """``manifest`` with tensors added behind its own, each ``(row, record)`` over the chunks of the tensor at ``row``.

    Dtype and shape of a record are those of that tensor.
    """
    if not names:
        return manifest
    tensors = TensorTable.from_records([*manifest.tensors, *(meta for _, meta in names)])
    order, starts = manifest.chunks.by_tensor
    n_chunks = [
        int(starts[row + 1] - starts[row]) if row + 1 < len(starts) else 0 for row, _ in names
    ]  # tensors behind the last chunk's have none
    rows = np.concatenate([order[starts[row] : starts[row] + n] for (row, _), n in zip(names, n_chunks, strict=True)])
    own = np.repeat(np.arange(len(names)) + len(manifest.tensors), n_chunks)
    every = manifest.chunks.take(np.concatenate([np.arange(len(manifest.chunks)), rows]))
    column = np.concatenate([manifest.chunks.tensor, own]).astype(np.int32)
    return replace(manifest, tensors=tensors, chunks=every.replace(tensor=column))


def same_bytes(chunks: ChunkTable, first: int, second: int) -> bool:
    """Whether the chunks of two tensors are the same ranges of the same files."""
    places = [
        {*zip(chunks.file[rows].tolist(), chunks.offset[rows].tolist(), chunks.length[rows].tolist(), strict=True)}
        for rows in (chunks.rows_of(first), chunks.rows_of(second))
    ]
    return bool(places[0]) and places[0] == places[1]
