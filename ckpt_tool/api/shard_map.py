"""A shard map says how one tensor is cut into stored boxes, and in which file each lies."""

from __future__ import annotations

import os
from typing import Any

from ckpt_tool.api.checkpoint import Checkpoint, open_checkpoint
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.records import dataclass

__all__ = ["ShardBox", "ShardMap", "shard_map"]


@dataclass(frozen=True, slots=True)
class ShardBox:
    """One stored box of a tensor."""

    box: Box
    """In global coordinates of the tensor."""
    file: str
    offset: int | None
    """Byte of the file, None while it is not resolved."""
    length: int
    rank: int | None


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Where the boxes of one tensor lie."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    boxes: tuple[ShardBox, ...]
    """Boxes that hold something, by offsets, replicas in order of rank; those without elements are left out."""
    n_empty: int
    """Chunks without elements."""

    def to_json(self) -> dict[str, Any]:
        """Schema ``ckpt-tool/map/1``: ``schema fqn dtype shape nbytes``, ``chunks[]`` as ``manifest.codec`` lists them.

        An offset is null while it is not resolved.
        """
        return {
            "schema": "ckpt-tool/map/1",
            "fqn": self.fqn,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "chunks": [
                {
                    "fqn": self.fqn,
                    "offsets": list(found.box.offsets),
                    "sizes": list(found.box.sizes),
                    "file": found.file,
                    "offset": found.offset,
                    "length": found.length,
                    "rank": found.rank,
                }
                for found in self.boxes
            ],
        }


def shard_map(checkpoint: Checkpoint | str | os.PathLike[str], fqn: str, *, exact: bool = False) -> ShardMap:
    """The boxes of one tensor, with file and rank.

    Args:
        checkpoint: an open checkpoint (it stays open), or where one is.
        fqn: the tensor.
        exact: find the place of each box in its file, which costs some formats a request per box.

    Raises:
        NotFound: no such tensor; the hint names the nearest ones.
    """
    if not isinstance(checkpoint, Checkpoint):
        with open_checkpoint(checkpoint) as opened:
            return shard_map(opened, fqn, exact=exact)
    manifest = checkpoint.resolve([fqn]) if exact else checkpoint.manifest
    meta, chunks = manifest.tensor(fqn), manifest.chunks
    rows = chunks.rows_of(manifest.tensor_id(fqn))
    full = [row for row in rows.tolist() if chunks.volume[row] > 0]
    boxes = [
        ShardBox(
            chunks.box(row, len(meta.shape)),
            manifest.files.paths[chunks.file[row]],
            None if chunks.flags[row] & ChunkFlag.UNRESOLVED else int(chunks.offset[row]),
            meta.dtype.nbytes(int(chunks.volume[row])),
            None if chunks.rank[row] < 0 else int(chunks.rank[row]),
        )
        for row in full
    ]
    boxes.sort(key=lambda found: (found.box.offsets, found.box.sizes, -1 if found.rank is None else found.rank))
    return ShardMap(fqn, meta.dtype.name, meta.shape, meta.nbytes, tuple(boxes), len(rows) - len(full))
