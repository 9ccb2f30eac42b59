"""Small made-up manifests for tests of what is printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_tool.api.inspect import Inspection, TensorRow
from ckpt_tool.api.shard_map import ShardBox, ShardMap
from ckpt_tool.cli.text import Line, plain
from ckpt_tool.dtypes import dtype
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Chunk, FileEntry, FileRange, Manifest, MeshInfo, TensorMeta
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable

Placed = tuple[str, Sequence[int], Sequence[int], int]
"""A box: file, offsets, sizes, rank."""


def row(fqn: str, shape: Sequence[int], name: str = "bfloat16", parts: Sequence[int] | None = None) -> TensorRow:
    """A listed tensor, stored whole unless it has parts."""
    meta = TensorMeta(fqn, dtype(name), tuple(shape), "model", (fqn,))
    cut = tuple(parts) if parts is not None else (1,) * len(shape)
    n_chunks = 1
    for n in cut:
        n_chunks *= n
    return TensorRow(fqn, name, tuple(shape), meta.nbytes, "model", n_chunks, cut, 1)


def shard_map(shape: Sequence[int], boxes: Iterable[Placed], fqn: str = "w") -> ShardMap:
    """A map of a float32 tensor."""
    found = [
        ShardBox(Box(tuple(offsets), tuple(sizes)), file, None, 4 * Box(tuple(offsets), tuple(sizes)).volume, rank)
        for file, offsets, sizes, rank in boxes
    ]
    nbytes = TensorMeta(fqn, dtype("float32"), tuple(shape), "model", (fqn,)).nbytes
    return ShardMap(fqn, "float32", tuple(shape), nbytes, tuple(found), 0)


def manifest(
    tensors: Iterable[tuple[str, str, Sequence[int], str]],
    chunks: Iterable[tuple[str, str, Sequence[int], Sequence[int], int]],
) -> Manifest:
    """A manifest of (fqn, dtype, shape, section) and (fqn, file, offsets, sizes, rank); boxes lie back to back."""
    table = TensorTable.from_records(
        TensorMeta(fqn, dtype(name), tuple(shape), section, (fqn,)) for fqn, name, shape, section in tensors
    )
    ends: dict[str, int] = {}
    records = []
    for fqn, file, offsets, sizes, rank in chunks:
        box = Box(tuple(offsets), tuple(sizes))
        length = table.dtypes[table.index[fqn]].nbytes(box.volume)
        start = ends.get(file, 0)
        ends[file] = start + length
        records.append(Chunk(fqn, box, FileRange(file, start, length), None, 0, rank))
    files = FileTable(tuple(FileEntry(path, nbytes) for path, nbytes in ends.items()))
    return Manifest(
        format="dcp",
        root="run/step-7",
        tensors=table,
        chunks=ChunkTable.from_records(records, table, files),
        files=files,
        mesh=MeshInfo(("dp",), (2,), "made up"),
        info={"step": 7, "torch_version": "2.13.0"},
        notes=("one thing to know",),
    )


def inspection(found: Manifest) -> Inspection:
    """An inspection of all of a manifest, with shards."""
    return Inspection("run/step-7", found, len(found.tensors), 7, 2, has_shards=True)


def text(lines: Iterable[Line]) -> str:
    """Lines as they are printed without colour."""
    return "\n".join(plain(found).rstrip() for found in lines)
