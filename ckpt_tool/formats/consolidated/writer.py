"""The writer of ``consolidated.NN.pth``: a torch.save file for each tensor-parallel rank, as Meta's programs load them.

Each file is a flat dict with the rank's part of every weight, or all of it where ranks do not share it out. Which parts
these are is said by rules; Meta's names are those of the family ``torchtitan``, which cuts the embedding by rows as
Llama 3 does. Llama 2 cuts its columns: a rules file says so.
"""

from __future__ import annotations

import json
from math import prod

import numpy as np

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._torch_file.written import WrittenFile, check_dtypes, fresh_tensor
from ckpt_tool.formats._torch_file.written_files import WrittenFiles
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest
from ckpt_tool.formats.consolidated.sizes import dims_of
from ckpt_tool.manifest.model import FileEntry, MeshInfo
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "ConsolidatedWriter"]

_PARAMS = "params.json"
_SHOWN = 3


class ConsolidatedWriter:
    """Lays out ``consolidated.00.pth`` and so on, and ``params.json`` where the source has one."""

    name = "consolidated"
    per_rank = True

    def lay_out(self, request: WriteRequest) -> LayOut:
        """All files; that of rank 0 is written last. Checksums come with ``seal``, and are 0 until then.

        Raises:
            Unsupported: names that are not Meta's, objects, dtypes that torch lacks.
            LayoutError: ranks are of another kind than tensor-parallel ones, or lack one box of each weight.
        """
        _check(request)
        tensors, boxes = request.tensors, request.boxes
        table = _rows(request)
        written: list[WrittenFile] = []
        for rank, rows in enumerate(table):
            sizes = [boxes.sizes[row, : tensors.ndim[number]].tolist() for number, row in enumerate(rows.tolist())]
            parts = [
                fresh_tensor(key, kind, tuple(one))
                for key, (kind, one) in enumerate(zip(tensors.dtypes, sizes, strict=True))
            ]
            value = dict(zip(tensors.fqns, parts, strict=True))
            nbytes = [kind.nbytes(prod(one)) for kind, one in zip(tensors.dtypes, sizes, strict=True)]
            written.append(WrittenFile.of(f"consolidated.{rank:02d}.pth", value, nbytes, rows.tolist()))
        files = WrittenFiles(written)
        file, offset = files.places(len(boxes))
        params = request.info.get("params")
        text = (json.dumps(params, indent=2) + "\n").encode() if params else b""
        n_files = len(written)
        note = f"no {_PARAMS}, for the source does not hold it: put the model's own beside the files"
        manifest = request.manifest(
            self.name,
            [*files.entries(), *([FileEntry(_PARAMS, len(text))] if text else [])],
            file=file,
            offset=offset,
            mesh=MeshInfo(("tp",), (n_files,), f"{counted(n_files, 'file')} consolidated.NN.pth")
            if n_files > 1
            else None,
            notes=[] if text else [note],
        )
        segments = [*files.segments(), *([Segment(_PARAMS, 0, text)] if text else [])]
        return LayOut(manifest, tuple(segments), written[0].path, needs_crc32=True, seal=files.seal)


def _check(request: WriteRequest) -> None:
    """Nothing, when these are weights of one of Meta's models, for tensor-parallel ranks.

    Raises:
        Unsupported: they are not.
        LayoutError: ranks are of another kind.
    """
    others = [
        f"{axis} {size}"
        for axis, size in zip(request.mesh_axes, request.mesh_sizes, strict=True)
        if axis != "tp" and size > 1
    ]
    if others:
        raise LayoutError(
            f"consolidated files are of tensor-parallel ranks, the target has {', '.join(others)}",
            hint="use --tp alone; one file without it",
        )
    check_dtypes(request.tensors)
    if not any(len(dims_of(fqn) or ()) > 1 for fqn in request.tensors.fqns):  # other libraries call norms the same
        shown = ", ".join(request.tensors.fqns[:_SHOWN])
        raise Unsupported(
            f"none of {counted(len(request.tensors), 'tensor')} has one of Meta's names: {shown}",
            hint="consolidated files have names like layers.0.attention.wq.weight; where SRC has such, --names source "
            "keeps them",
        )
    if request.blobs:
        raise Unsupported(f"consolidated files hold weights, and there are {counted(len(request.blobs), 'object')}")


def _rows(request: WriteRequest) -> IntArray:
    """int64[n_ranks, n_tensors]: the row of each rank's box of each tensor."""
    boxes, n_tensors = request.boxes, len(request.tensors)
    place = boxes.rank.astype(np.int64) * n_tensors + boxes.tensor
    counts = np.bincount(place, minlength=request.world_size * n_tensors)
    wrong = np.flatnonzero(counts != 1)
    if len(wrong):
        rank, number = divmod(int(wrong[0]), n_tensors)
        raise LayoutError(
            f"rank {rank} has {int(counts[wrong[0]])} boxes, expected one of each weight on each rank",
            where=request.tensors.fqns[number],
        )
    rows = np.empty(len(counts), dtype=np.int64)
    rows[place] = np.arange(len(boxes))
    return rows.reshape(request.world_size, n_tensors)


WRITER = ConsolidatedWriter()
