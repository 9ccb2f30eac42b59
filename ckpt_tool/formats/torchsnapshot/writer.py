"""The writer of torchsnapshot: a slab of raw bytes for each rank, and ``.snapshot_metadata``.

A tensor in one piece is listed as replicated, so that ranks of any number restore it. One that is cut is a
``ShardedTensor`` where it is an item's own key, as a module's weights are, for this is where torchsnapshot 0.1.0
restores those over other ranks; it refuses a snapshot that has them deeper, as the state of an optimizer lies. There it
is a ``ChunkedTensor``, which each rank restores whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats._element_types import check_types
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.formats._torch_file.written import WrittenFile, blob_entry, weights_only_notes
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest
from ckpt_tool.formats.torchsnapshot.tree import CONTAINERS, Leaf, trees
from ckpt_tool.manifest.model import Blob, FileEntry
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "TorchSnapshotWriter"]

_METADATA = ".snapshot_metadata"
_VERSION = "0.1.0"
_RAW = frozenset(
    {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}
)  # fmt: skip


class TorchSnapshotWriter:
    """Lays out ``batched/rank_<NNNNN>``, ``objects/<NNNNN>`` and ``.snapshot_metadata``, which is written last."""

    name = "torchsnapshot"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """All files.

        Raises:
            Unsupported: dtypes that torchsnapshot has not as plain bytes, objects that cannot be pickled, names that
                contradict each other.
            LayoutError: a tensor has no box, or a rank is outside of the world.
        """
        check_objects(request.blobs, request.blob_bytes)
        plan = _Plan(request)
        manifest_rows = plan.manifest()
        document = {"version": _VERSION, "world_size": request.world_size, "manifest": manifest_rows}
        text = json.dumps(document, indent=2, ensure_ascii=False).encode()
        plan.segments.append(Segment(_METADATA, 0, text))
        entries = (*plan.entries, FileEntry(_METADATA, len(text)))
        notes = weights_only_notes(plan.pickled)
        manifest = request.manifest(
            self.name, entries, file=plan.file, offset=plan.offset, blobs=request.blobs, notes=notes
        )
        return LayOut(manifest, tuple(plan.segments), _METADATA)


@dataclass
class _Plan:
    """Places of boxes, and the files of objects."""

    request: WriteRequest
    entries: list[FileEntry] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    pickled: list[Blob] = field(default_factory=list)
    """Objects with a file of their own."""
    file: IntArray = field(init=False)
    """int64[n_boxes]: file of each box."""
    offset: IntArray = field(init=False)
    """int64[n_boxes]: byte of that file at which it begins."""
    rows: list[IntArray] = field(init=False)
    """Rows of the boxes of each tensor, those without elements left out."""

    def __post_init__(self) -> None:
        _check(self.request)
        boxes, tensors = self.request.boxes, self.request.tensors
        nbytes = boxes.nbytes(tensors)
        self.file, self.offset = np.zeros(len(boxes), np.int64), np.zeros(len(boxes), np.int64)
        # Wide elements first: every box is then aligned to its elements.
        order = np.lexsort((np.arange(len(boxes)), -tensors.bits[boxes.tensor], boxes.rank))
        starts = np.searchsorted(boxes.rank[order], np.arange(self.request.world_size + 1))
        for rank, (low, high) in enumerate(pairwise(starts.tolist())):
            rows = order[low:high]
            ends = np.cumsum(nbytes[rows])
            if len(rows) and ends[-1]:
                self.file[rows], self.offset[rows] = len(self.entries), ends - nbytes[rows]
                self.entries.append(FileEntry(f"batched/rank_{rank:05d}", int(ends[-1])))
        filled = np.flatnonzero(nbytes)
        by_tensor = filled[np.argsort(boxes.tensor[filled], kind="stable")]
        starts = np.searchsorted(boxes.tensor[by_tensor], np.arange(len(tensors) + 1))
        self.rows = [by_tensor[low:high] for low, high in pairwise(starts.tolist())]

    def manifest(self) -> dict[str, Any]:
        """Every rank's entries, by rank and path."""
        shared, own = trees(self.request)
        plain = {path for path, _ in shared.described}
        common = {path: self._leaf(path, leaf, is_shared=True) for path, leaf in shared.leaves}
        found: dict[str, Any] = {}
        for rank in range(self.request.world_size):
            tree = own.get(rank, shared)
            for path, row in tree.described:
                if row["type"] in CONTAINERS:
                    found[f"{rank}/{path}"] = row
                elif path not in plain:
                    found[f"{rank}/{path}"] = {**row, "replicated": False}
                elif rank == 0:
                    found[f"{rank}/{path}"] = row
            for path, leaf in tree.leaves:
                if path not in common:
                    found[f"{rank}/{path}"] = self._leaf(path, leaf, is_shared=False)
                elif leaf.tensor is not None and common[path]["type"] == "ShardedTensor":
                    shards = self._shards(leaf.tensor, rank)
                    found[f"{rank}/{path}"] = {"type": "ShardedTensor", "shards": shards}
                elif rank == 0:
                    found[f"{rank}/{path}"] = common[path]
        return found

    def _leaf(self, path: str, leaf: Leaf, *, is_shared: bool) -> Mapping[str, Any]:
        """The entry of a tensor or an object; that of a sharded tensor without its shards."""
        if leaf.tensor is None:
            return self._object(path, leaf, is_shared=is_shared)
        meta = self.request.tensors.record(leaf.tensor)
        rows = self.rows[leaf.tensor]
        sizes = self.request.boxes.sizes[rows, : len(meta.shape)].tolist()
        if sizes == [list(meta.shape)]:
            return self._tensor(int(rows[0]), meta.shape, is_replicated=is_shared)
        if is_shared and len(rows) and path.count("/") == 1:
            return {"type": "ShardedTensor"}
        return {
            "type": "ChunkedTensor",
            "dtype": f"torch.{meta.dtype.name}",
            "shape": list(meta.shape),
            "chunks": self._shards(leaf.tensor, None),
            "replicated": is_shared,
        }

    def _shards(self, tensor: int, rank: int | None) -> list[dict[str, Any]]:
        """The boxes of a tensor, or those of one rank."""
        rows, boxes = self.rows[tensor], self.request.boxes
        if rank is not None:
            rows = rows[boxes.rank[rows] == rank]
        ndim = int(self.request.tensors.ndim[tensor])
        return [
            {"offsets": offsets, "sizes": sizes, "tensor": self._tensor(row, sizes, is_replicated=False)}
            for row, offsets, sizes in zip(
                rows.tolist(), boxes.offsets[rows, :ndim].tolist(), boxes.sizes[rows, :ndim].tolist(), strict=True
            )
        ]

    def _tensor(self, row: int, sizes: Sequence[int], *, is_replicated: bool) -> dict[str, Any]:
        kind = self.request.tensors.dtypes[self.request.boxes.tensor[row]]
        start = int(self.offset[row])
        return {
            "type": "Tensor",
            "location": self.entries[self.file[row]].path,
            "serializer": "buffer_protocol",
            "dtype": f"torch.{kind.name}",
            "shape": list(sizes),
            "replicated": is_replicated,
            "byte_range": [start, start + kind.nbytes(int(np.prod(sizes, dtype=np.int64)))],
        }

    def _object(self, path: str, leaf: Leaf, *, is_shared: bool) -> Mapping[str, Any]:
        """The entry of an object, which gets a file: in its original bytes if given, else pickled anew.

        Raises:
            Unsupported: it cannot be pickled.
        """
        blob = leaf.blob or Blob(path.replace("/", "."), "value", None, leaf.value, is_loaded=True)
        raw = None if leaf.blob is None else self.request.blob_bytes.get(blob.fqn)
        location = f"objects/{len(self.pickled):05d}"
        if raw is None:
            file = WrittenFile.of(location, blob_entry(blob)[1], (), ())
            parts = sorted((*file.heads(), *file.tail(())), key=lambda segment: segment.offset)
            raw = b"".join(segment.data for segment in parts)
        self.pickled.append(blob)
        self.entries.append(FileEntry(location, len(raw)))
        self.segments.append(Segment(location, 0, bytes(raw)))
        kind = type(leaf.value)
        return {
            "type": "object",
            "location": location,
            "serializer": "torch_save",
            "obj_type": f"builtins.{kind.__name__ if kind.__module__ == 'builtins' else 'object'}",
            "replicated": is_shared,
        }


def _check(request: WriteRequest) -> None:
    """Nothing, when all tensors can be stored and have a box.

    Raises:
        Unsupported: torchsnapshot has not their dtype, or not as plain bytes.
        LayoutError: no box, or one of another world.
    """
    tensors, boxes = request.tensors, request.boxes
    check_types(
        tensors, f"torchsnapshot {_VERSION} has no plain bytes of", lambda kind, _: kind.name in _RAW, other="dcp"
    )
    ranks = boxes.rank
    if len(ranks) and not (int(ranks.min()) >= 0 and int(ranks.max()) < request.world_size):
        raise LayoutError(f"a box is of rank {int(ranks.max()):,}, the target has {request.world_size:,}")
    absent = (np.bincount(boxes.tensor, minlength=len(tensors)) == 0) & (tensors.numel > 0)
    if absent.any():
        fqn = tensors.fqns[int(np.flatnonzero(absent)[0])]
        raise LayoutError(
            f"{counted(int(absent.sum()), 'tensor', 'have')} no box on any rank, {fqn!r} is one", where=fqn
        )


WRITER = TorchSnapshotWriter()
