"""The file of one rank that writes its boxes as items, behind which its objects go."""

from __future__ import annotations

import numpy as np

from ckpt_tool.formats._dcp.placed_items import GrowingFiles, check_dtypes, place_boxes
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.formats.joint import RankLayOut
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.manifest.tables import TensorTable

__all__ = ["items_of_rank"]


def items_of_rank(tensors: TensorTable, boxes: BoxTable, path: str) -> RankLayOut:
    """The items of ``boxes``, all in the file ``path``.

    Raises:
        Unsupported: dtypes that torch cannot hold.
    """
    used = distinct(boxes.tensor)
    own = tensors.take(used)
    check_dtypes(own)
    width = own.shape.shape[1]
    rows = np.searchsorted(used, boxes.tensor).astype(np.int32)
    columns = BoxTable(rows, boxes.offsets[:, :width], boxes.sizes[:, :width], boxes.rank)
    files = GrowingFiles()
    kinds = list(place_boxes(own, columns, files, lambda _: path).kinds(np.arange(len(boxes))))
    return RankLayOut(
        files={path: files.nbytes.get(path, 0)},
        paths=(path,) * len(boxes),
        order=np.arange(len(boxes)),
        heads=tuple(kind.head for kind in kinds),
        rear=lambda row, crc32: kinds[row].rear(crc32 if kinds[row].payload_nbytes else 0),
        object_path=lambda _: path,
    )
