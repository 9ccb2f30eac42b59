"""Which of the boxes that ranks hold are stored, and by whom: each of them, one for a group, or each byte once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt_tool.api.convert.mesh import DATA_AXES
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.layout.mesh import Mesh
from ckpt_tool.layout.place import Placed
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.plan.assign import choose_replicas
from ckpt_tool.records import dataclass

__all__ = ["Storing", "stored_boxes"]


@dataclass(frozen=True, eq=False)
class Storing:
    """What becomes of replicas."""

    policy: str
    """``all`` for every one, ``groups`` for one in each data-parallel group, ``once`` for one."""
    may_cut: npt.NDArray[np.bool_] | None
    """bool[n_tensors]: whose boxes ranks may store in parts where an even load needs that; None for no tensor's."""


def stored_boxes(placed: Placed, tensors: TensorTable, mesh: Mesh, storing: Storing) -> BoxTable:
    """The boxes that are written, by tensor and rank."""
    policy, may_cut = storing.policy, storing.may_cut
    rows = np.arange(len(placed.tensor))
    offsets, sizes = placed.offsets, placed.sizes
    if policy != "all":
        group = placed.tensor.astype(np.int64)
        if policy == "groups":  # replicas on other model-parallel ranks are needed there
            coords = mesh.coords()
            kept = [i for i, axis in enumerate(mesh.axes) if axis not in DATA_AXES]
            place_number = np.zeros(mesh.world_size, dtype=np.int64)
            for axis in kept:
                place_number = place_number * mesh.sizes[axis] + coords[:, axis]
            group = group * mesh.world_size + place_number[placed.rank]
        same = exact_duplicates(offsets, sizes, group)
        rank = placed.rank.astype(np.int64)
        nbytes = np.prod(sizes, axis=1) * tensors.bits[placed.tensor] // 8
        if policy == "once" and may_cut is not None:
            from ckpt_tool.plan.shared_boxes import shared_boxes  # a start-up that other policies need not have

            is_cut = (may_cut & (tensors.bits % 8 == 0))[placed.tensor]
            stored = shared_boxes(same, rank, offsets, sizes, nbytes, is_cut, mesh.world_size)
            rows, offsets, sizes = stored.row, stored.offsets, stored.sizes
        else:
            rows = choose_replicas(same, rank, nbytes, mesh.world_size)
            offsets, sizes = offsets[rows], sizes[rows]
    order = np.lexsort((placed.rank[rows], placed.tensor[rows]))
    return BoxTable(placed.tensor[rows[order]], offsets[order], sizes[order], placed.rank[rows[order]])
