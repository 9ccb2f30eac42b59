"""What writers of whole tensors ask of a request: one box of each tensor, and all of it."""

from __future__ import annotations

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.sizes import counted

__all__ = ["whole_rows"]


def whole_rows(request: WriteRequest, what: str) -> IntArray:
    """int64[n_tensors]: the row of each tensor's box, -1 for a tensor without elements.

    Args:
        request: what is to be written.
        what: the format, as the subject of ``... holds whole tensors``.

    Raises:
        LayoutError: a tensor is cut, repeated or absent.
    """
    tensors, boxes = request.tensors, request.boxes
    rows = np.full(len(tensors), -1, dtype=np.int64)
    rows[boxes.tensor] = np.arange(len(boxes))
    counts = np.bincount(boxes.tensor, minlength=len(tensors))
    is_wrong = (counts != 1) & ~((counts == 0) & (tensors.numel == 0))
    if len(boxes):
        width = tensors.shape.shape[1]
        is_cut = (boxes.sizes[:, :width] != tensors.shape[boxes.tensor]).any(axis=1)
        is_wrong[boxes.tensor[is_cut]] = True
    wrong = np.flatnonzero(is_wrong)
    if len(wrong):
        fqn = tensors.fqns[int(wrong[0])]
        raise LayoutError(
            f"expected one whole box of each tensor, but {counted(len(wrong), 'tensor', 'are')} cut, repeated or "
            f"absent; {fqn!r} has {counted(int(counts[wrong[0]]), 'box')}",
            hint=f"{what} holds whole tensors: choose --to dcp, rank-files or torch-ranks for a sharded layout",
        )
    rows[tensors.numel == 0] = -1
    return rows
