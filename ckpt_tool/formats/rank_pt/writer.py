"""The writer of rank files: for each rank one torch.save file with its boxes as plain tensors, and their layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_tool.errors import LayoutError, Unsupported, UsageError
from ckpt_tool.formats._torch_file.entries import entries_of
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.formats._torch_file.written import (
    WrittenFile,
    blob_entry,
    check_dtypes,
    fresh_tensor,
    weights_only_notes,
)
from ckpt_tool.formats._torch_file.written_files import WrittenFiles
from ckpt_tool.formats.base import LayOut, WriteRequest
from ckpt_tool.formats.rank_pt.layout_entry import LAYOUT_KEY, describe_layout
from ckpt_tool.manifest.model import KeyPath, MeshInfo
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "TorchRanksWriter"]

_STEM = "checkpoint"


class TorchRanksWriter:
    """Lays out ``checkpoint_world_size_<W>_rank_<R>.pt``, a file for each rank, also for one that stores nothing.

    Each is a plain dict, nested as the key paths say, so that ``torch.load(weights_only=True)`` gives a rank its own
    boxes; a tensor of which a rank has several boxes is a list of them. ``__ckpt_layout__`` says which boxes they are.
    """

    name = "torch-ranks"
    per_rank = True

    def lay_out(self, request: WriteRequest) -> LayOut:
        """All files; that of rank 0 is written last.

        Objects of one rank go into its file, others into all. Checksums come with ``seal``, and are 0 until then.

        Raises:
            Unsupported: dtypes that torch lacks, objects that cannot be pickled, paths that contradict each other.
            LayoutError: a tensor has no box, or a rank is outside of the world.
        """
        check_dtypes(request.tensors)
        check_objects(request.blobs)
        by_rank = _rows_by_rank(request)
        stem = (request.options.file_name or _STEM).removesuffix(".pt")
        if "/" in stem:
            raise UsageError(f"{stem!r} is no file name", hint="name it like checkpoint.pt")
        files = WrittenFiles(
            _file(request, f"{stem}_world_size_{request.world_size}_rank_{rank}.pt", rank, rows)
            for rank, rows in enumerate(by_rank)
        )
        file, offset = files.places(len(request.boxes))
        mesh = (
            MeshInfo(request.mesh_axes, request.mesh_sizes, f"recorded in {LAYOUT_KEY}") if request.mesh_axes else None
        )
        manifest = request.manifest(
            self.name,
            files.entries(),
            file=file,
            offset=offset,
            blobs=request.blobs,
            mesh=mesh,
            notes=weights_only_notes(request.blobs),
        )
        manifest = manifest.replace(info={**manifest.info, "world_size": request.world_size})
        first = manifest.files.paths[0]
        return LayOut(manifest, tuple(files.segments()), first, needs_crc32=True, seal=files.seal)


def _rows_by_rank(request: WriteRequest) -> list[IntArray]:
    """Rows of the boxes of each rank, in the request's order."""
    boxes, tensors = request.boxes, request.tensors
    if len(boxes) and not (int(boxes.rank.min()) >= 0 and int(boxes.rank.max()) < request.world_size):
        lowest, highest = int(boxes.rank.min()), int(boxes.rank.max())
        raise LayoutError(f"expected ranks 0 to {request.world_size - 1:,}, got {lowest:,} to {highest:,}")
    absent = (np.bincount(boxes.tensor, minlength=len(tensors)) == 0) & (tensors.numel > 0)
    if absent.any():
        first = tensors.fqns[int(np.flatnonzero(absent)[0])]
        raise LayoutError(
            f"{counted(int(absent.sum()), 'tensor', 'have')} no box on any rank, {first!r} is one", where=first
        )
    order = np.argsort(boxes.rank, kind="stable")
    starts = np.searchsorted(boxes.rank[order], np.arange(request.world_size + 1))
    return [order[starts[r] : starts[r + 1]].astype(np.int64) for r in range(request.world_size)]


def _file(request: WriteRequest, path: str, rank: int, rows: IntArray) -> WrittenFile:
    """One rank's file: its boxes, the empty tensors that no rank has a box of (rank 0), its objects, the layout."""
    tensors = request.tensors
    held = [
        (int(request.boxes.tensor[row]), request.boxes.offsets[row].tolist(), request.boxes.sizes[row].tolist(), row)
        for row in rows.tolist()
    ]
    if rank == 0:
        has_box = np.bincount(request.boxes.tensor, minlength=len(tensors)) > 0
        width = tensors.shape.shape[1]
        held += [(row, [0] * width, tensors.shape[row].tolist(), -1) for row in np.flatnonzero(~has_box).tolist()]
    counts = np.bincount([tensor for tensor, _, _, _ in held], minlength=len(tensors)).tolist()
    seen = [0] * len(tensors)
    values: list[tuple[KeyPath, Any]] = []
    described: dict[int, tuple[str, KeyPath, tuple[int, ...], tuple[int, ...]]] = {}
    nbytes, filled = [], []
    for key, (tensor, offsets, sizes, row) in enumerate(held):
        meta = tensors.record(tensor)
        ndim = len(meta.shape)
        piece = fresh_tensor(key, meta.dtype, tuple(sizes[:ndim]))
        keys = meta.path or (meta.fqn,)
        values.append((keys if counts[tensor] == 1 else (*keys, seen[tensor]), piece))
        seen[tensor] += 1
        described[id(piece)] = (meta.fqn, keys, meta.shape, tuple(offsets[:ndim]))
        nbytes.append(meta.dtype.nbytes(piece.numel))
        filled.append(row if piece.numel else -1)
    values += [blob_entry(blob) for blob in request.blobs if blob.rank in (None, rank)]
    root = nest(values, int_keyed=request.info.get("int_keyed_dicts", ()))
    if not isinstance(root, dict) or LAYOUT_KEY in root:
        raise Unsupported(f"an entry is called {LAYOUT_KEY}, which is this format's own", where=path)
    named = {id(entry.value): entry.fqn for entry in entries_of(root).items}
    root[LAYOUT_KEY] = describe_layout(
        rank,
        request.world_size,
        request.mesh_axes,
        request.mesh_sizes,
        [(named[identity], *where) for identity, where in described.items()],
    )
    return WrittenFile.of(path, root, nbytes, filled)


WRITER = TorchRanksWriter()
