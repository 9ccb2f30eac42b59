"""The boxes that ranks hold by rules, and those of them that they store: all, one for a group, or each byte once."""

from __future__ import annotations

import os
from typing import Literal

import numpy as np
import numpy.typing as npt

from ckpt_tool.api.convert.mesh import DATA_AXES
from ckpt_tool.api.rules import rules_for
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.layout.mesh import Mesh
from ckpt_tool.layout.place import Placed, place
from ckpt_tool.layout.stages import StageOptions
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.plan.assign import choose_replicas
from ckpt_tool.records import dataclass

__all__ = ["Storing", "boxes_by_rules", "numbered_parameters", "placed_by_rules"]


@dataclass(frozen=True, eq=False)
class Storing:
    """What becomes of replicas."""

    policy: str
    """``all`` for every one, ``groups`` for one in each data-parallel group, ``once`` for one."""
    may_cut: npt.NDArray[np.bool_] | None
    """bool[n_tensors]: whose boxes ranks may store in parts where an even load needs that; None for no tensor's."""


def boxes_by_rules(
    manifest: Manifest,
    tensors: TensorTable,
    mesh: Mesh,
    stages: StageOptions,
    *,
    rules: str | os.PathLike[str] | None,
    default: Literal["shard0", "replicate"] | None,
    dp_mode: Literal["shard", "replicate"],
    storing: Storing,
) -> tuple[BoxTable, list[str]]:
    """The boxes that ranks store by the rules of a family, and notes on how they were found."""
    placed, evidence = placed_by_rules(manifest, tensors, mesh, stages, rules=rules, default=default, dp_mode=dp_mode)
    return _stored(placed, tensors, mesh, storing), [*evidence, *placed.notes]


def placed_by_rules(
    manifest: Manifest,
    tensors: TensorTable,
    mesh: Mesh,
    stages: StageOptions | None = None,
    *,
    rules: str | os.PathLike[str] | None,
    default: Literal["shard0", "replicate"] | None,
    dp_mode: Literal["shard", "replicate"],
) -> tuple[Placed, tuple[str, ...]]:
    """The boxes that ranks hold by the rules of a family, and how the family was told where the mesh needs rules.

    Args:
        manifest: tells the names of parameters that an optimizer numbers.
        tensors: what is placed.
        mesh: the ranks.
        stages: how layers are spread, where an even spread is not wanted.
        rules: a rules file, which adds to or overrides the family that the names fit.
        default: what happens to names without a rule; None to stop with their list.
        dp_mode: whether data-parallel ranks ``replicate`` or ``shard``.

    Raises:
        LayoutError: names that no rule covers, or a mesh that does not fit them.
        UsageError: a rules file that is none.
    """
    needs_rules = any(mesh.size(axis) > 1 for axis in ("tp", "pp", "ep"))
    rule_set, evidence = rules_for(tensors.fqns, rules, is_optional=default is not None or not needs_rules)
    placed = place(
        tensors.fqns,
        tensors.shapes,
        mesh,
        rule_set,
        dp_mode=dp_mode,
        default=default,
        stages=stages,
        numbered=numbered_parameters(manifest),
    )
    return placed, evidence if needs_rules else ()


def _stored(placed: Placed, tensors: TensorTable, mesh: Mesh, storing: Storing) -> BoxTable:
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


def numbered_parameters(manifest: Manifest) -> dict[int, str]:
    """Names of the parameters that an optimizer numbers; empty with several optimizers, whose numbers may differ."""
    if not any(isinstance(key, int) for path in manifest.tensors.paths or () for key in path):
        return {}
    from ckpt_tool.manifest.optimizer import optimizer_views  # 5 ms of start-up, and most optimizers use names

    views = optimizer_views(manifest)
    return dict(views[0].names) if len(views) == 1 else {}
