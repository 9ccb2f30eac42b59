"""The sidecar of a ``.metadata`` that is being written: what reading it will give, from the same columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from ckpt_tool.formats._dcp.item_lengths import item_lengths
from ckpt_tool.formats._dcp.metadata_pickle import WrittenChunks, WrittenItem, WrittenTensor
from ckpt_tool.formats._dcp.pickle_rows import Column
from ckpt_tool.formats._dcp.table import Tables, rank_of
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.formats.dcp.metadata_pickle import VERSION
from ckpt_tool.formats.dcp.sidecar import Facts, Sidecar
from ckpt_tool.manifest.items import ItemTable
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, KeyPath
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable

__all__ = ["sidecar_of"]


def sidecar_of(
    tensors: TensorTable,
    written: Sequence[WrittenTensor],
    chunks: WrittenChunks,
    objects: Sequence[tuple[str, KeyPath, WrittenItem]],
    save_id: str,
) -> Sidecar:
    """Tables as ``tabulate`` makes them of the metadata, and where payloads begin; files end with their last items."""
    n_chunks = [one.n_chunks for one in written]
    tensor = np.repeat(np.arange(len(tensors), dtype=np.int32), n_chunks)
    is_full = (chunks.sizes > 0).all(axis=1)
    full = np.flatnonzero(is_full)
    boxes = BoxTable(tensor[full], chunks.offsets[full], chunks.sizes[full], np.zeros(len(full), dtype=np.int32))
    _, head_nbytes, _ = item_lengths(tensors, boxes)
    number: dict[str, int] = {}
    for path in [chunks.paths[at] for at in _in_order_of_use(chunks.file)] + [item.path for _, _, item in objects]:
        number.setdefault(path, len(number))
    file = np.array([number.get(path, -1) for path in chunks.paths], dtype=np.int64)[chunks.file]
    ends = np.zeros(len(number), dtype=np.int64)
    np.maximum.at(ends, file, chunks.offset + chunks.length)
    for _, _, item in objects:
        ends[number[item.path]] = max(ends[number[item.path]], item.offset + item.length)
    ranks = np.array([rank_of(path) for path in number], dtype=np.int64)
    return Sidecar(
        Tables(
            tensors,
            ChunkTable.from_columns(
                tensor=boxes.tensor, offsets=boxes.offsets, sizes=boxes.sizes, file=file[full],
                offset=chunks.offset[full], length=chunks.length[full],
            ),
            FileTable(tuple(FileEntry(path, nbytes) for path, nbytes in zip(number, ends.tolist(), strict=True))),
            tuple(
                Blob(fqn, "torch_save", FileRange(item.path, item.offset, item.length), path=path)
                for fqn, path, item in objects
            ),
            dict(sorted(Counter(ranks[file[~is_full]].tolist()).items())),
            ItemTable.of_full(len(number)).with_rows(file[~is_full], chunks.offset[~is_full], chunks.length[~is_full]),
        ),
        Facts(VERSION, save_id, is_flattened=True),
        chunks.offset[full] + head_nbytes,
    )  # fmt: skip


def _in_order_of_use(numbers: Column) -> list[int]:
    """Each number once, in the order in which they first come."""
    used, first = np.unique(numbers, return_index=True)
    in_order: list[int] = used[np.argsort(first)].tolist()
    return in_order
