"""The writer of Orbax: one step with one tree, each array in files of its own (zarr 2), not compressed.

What Orbax 0.12 restores where a checkpoint was saved with ``use_ocdbt=False``. A box is a chunk: boxes must form a
grid, as all of them do that cut dimensions evenly, and such as ``torch.chunk`` cuts along the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._element_types import check_types
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest
from ckpt_tool.formats.orbax.arrays import zarr2_name
from ckpt_tool.formats.orbax.leaves import NewLeaf, leaves_of, tree_document
from ckpt_tool.manifest.model import FileEntry
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "OrbaxWriter"]

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_COMMIT = "commit_success.txt"


class OrbaxWriter:
    """Lays out ``<name>/.zarray`` with chunks ``<name>/<i.j>``, ``_METADATA``, ``_CHECKPOINT_METADATA``.

    Leaves come back as numpy arrays where nothing else is asked for, as arrays of JAX by an abstract target; of objects
    that each rank has, the first is kept.
    """

    name = "orbax"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The files; ``commit_success.txt``, by which Orbax tells a step on an object store, is written last.

        Raises:
            Unsupported: dtypes that zarr lacks, names that collide or that no folder can have.
            LayoutError: boxes that form no grid.
        """
        check_types(request.tensors, "zarr has no elements of", lambda kind, _: zarr2_name(kind) is not None)
        leaves, notes = leaves_of(request)
        plan = _Plan(request)
        for leaf in leaves:
            plan.add(leaf)
        strings = {leaf.name: leaf.value for leaf in leaves if leaf.kind == "string"}
        documents = {
            "_METADATA": tree_document(leaves, plan.write_shapes),
            "_strings.json": strings,
            "_CHECKPOINT_METADATA": {
                "item_handlers": _HANDLER,
                "metrics": {},
                "performance_metrics": {},
                "init_timestamp_nsecs": None,
                "commit_timestamp_nsecs": None,
                "custom_metadata": {},
            },
        }
        for path, document in documents.items():
            if document:
                plan.add_file(path, json.dumps(document, separators=(",", ":")).encode())
        plan.add_file(_COMMIT, b"Checkpoint commit was successful.")
        manifest = request.manifest(
            self.name, plan.entries, file=plan.file, offset=np.zeros_like(plan.file), blobs=request.blobs, notes=notes
        )
        return LayOut(manifest, tuple(plan.segments), _COMMIT)


@dataclass
class _Plan:
    """Files and their heads, array by array."""

    request: WriteRequest
    entries: list[FileEntry] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    write_shapes: dict[str, list[int]] = field(default_factory=dict)
    file: npt.NDArray[np.int32] = field(init=False)
    """int32[n_boxes]: file of each box."""
    rows: list[IntArray] = field(init=False)
    """Rows of the boxes of each tensor."""

    def __post_init__(self) -> None:
        boxes = self.request.boxes
        self.file = np.zeros(len(boxes), dtype=np.int32)
        order = np.argsort(boxes.tensor, kind="stable")
        starts = np.searchsorted(boxes.tensor[order], np.arange(len(self.request.tensors) + 1))
        self.rows = [order[a:b] for a, b in pairwise(starts.tolist())]

    def add_file(self, path: str, data: bytes) -> None:
        """A file whose bytes are known."""
        self.entries.append(FileEntry(path, len(data)))
        self.segments.append(Segment(path, 0, data))

    def add(self, leaf: NewLeaf) -> None:
        """The array of a leaf, if it has one."""
        if leaf.tensor is not None:
            self._add_tensor(leaf.name, leaf.tensor)
        elif leaf.kind in ("scalar", "np.ndarray"):
            code = leaf.value.dtype.str
            self._describe(leaf.name, code, leaf.value.shape, leaf.value.shape)
            if leaf.value.size:
                self.add_file(f"{leaf.name}/{_key([0] * leaf.value.ndim)}", leaf.value.tobytes())

    def _add_tensor(self, name: str, number: int) -> None:
        meta = self.request.tensors.record(number)
        rows = self.rows[number] if meta.numel else self.rows[number][:0]
        ndim = len(meta.shape)
        offsets, sizes = self.request.boxes.offsets[rows, :ndim], self.request.boxes.sizes[rows, :ndim]
        chunks = _grid(meta.fqn, meta.shape, offsets, sizes) if meta.numel else meta.shape
        self._describe(name, _code(meta.dtype), meta.shape, chunks)
        nbytes = meta.dtype.nbytes(int(np.prod(chunks, dtype=np.int64)))
        indexes = (offsets // np.array(chunks, dtype=np.int64)).tolist() if meta.numel else []
        self.file[rows] = len(self.entries) + np.arange(len(rows))
        self.entries += [FileEntry(f"{name}/{_key(index)}", nbytes) for index in indexes]

    def _describe(self, name: str, code: str, shape: Sequence[int], chunks: Sequence[int]) -> None:
        self.write_shapes[name] = list(chunks)
        document = {
            "chunks": [max(n, 1) for n in chunks],
            "compressor": None,
            "dimension_separator": ".",
            "dtype": code,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(shape),
            "zarr_format": 2,
        }
        self.add_file(f"{name}/.zarray", json.dumps(document, separators=(",", ":")).encode())


def _key(index: Sequence[int]) -> str:
    """The file of a chunk by its place in the grid."""
    return ".".join(map(str, index)) if index else "0"


def _code(dtype: DType) -> str:
    code = zarr2_name(dtype)
    if code is None:
        raise Unsupported(f"zarr has no elements of {dtype.name}")
    return code


def _grid(fqn: str, shape: tuple[int, ...], offsets: IntArray, sizes: IntArray) -> tuple[int, ...]:
    """Shape of the chunks that boxes are, where the last ones of a dimension may be cut short by the tensor's end.

    A chunk is stored whole, so a short box must fill the front of it: nothing but single elements may stand before the
    dimension in which it is short.

    Raises:
        LayoutError: the boxes are no such grid.
    """
    chunk = sizes.max(axis=0, initial=1)
    expected = np.minimum(chunk, np.array(shape, dtype=np.int64) - offsets)
    is_grid = bool((offsets % chunk == 0).all() and (sizes == expected).all())
    in_front = np.concatenate([[1], np.cumprod(chunk)[:-1]]) if len(chunk) else chunk
    fills_front = bool(((sizes == chunk) | (in_front == 1)).all())
    n_cells = int(np.prod(-(-np.array(shape, dtype=np.int64) // chunk)))
    if is_grid and fills_front and len(np.unique(offsets, axis=0)) == len(offsets) == n_cells:
        return tuple(chunk.tolist())
    shown = ", ".join(str(row) for row in sizes[:3].tolist())
    raise LayoutError(
        f"Orbax holds a tensor as a grid of equal chunks, and {counted(len(sizes), 'box')} of {list(shape)} are none: "
        f"{shown}",
        where=fqn,
        hint="choose a mesh whose sizes divide the dimensions that it cuts, or ckpt export for whole tensors",
    )


WRITER = OrbaxWriter()
