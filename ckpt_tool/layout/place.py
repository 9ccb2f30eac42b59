"""To place tensors is to say, for every rank of a mesh, which boxes of which tensors it holds.

Axes and what they do:

- ``tp`` cuts as the tensor's rule says; ``ep`` spreads experts; ``pp`` spreads layers over stages;
- ``dp``, ``edp``, ``dp_shard``, ``fsdp`` (and ``ep`` for tensors that are no experts) together are the data-parallel
  ranks, which cut, in one grid, what the others left, or replicate it;
- ``cp``, ``dp_replicate`` and ``ddp`` replicate.

Boxes are in global coordinates, columns padded behind with offset 0 and size 1. Knows nothing of files or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.geometry.grid import chunk_bounds
from ckpt_tool.layout.mesh import Mesh
from ckpt_tool.layout.pieces import Cut, Pieces, cut_pieces
from ckpt_tool.layout.placement import Flat, Placement, Replicate, Shard, TensorLayout
from ckpt_tool.layout.resolve import Default, Notes, Resolved, is_for_everyone, resolve
from ckpt_tool.layout.rules import RuleSet
from ckpt_tool.layout.stages import LayerStages, StageOptions, layer_stages
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["AXES", "DataParallelMode", "Placed", "place"]

DataParallelMode: TypeAlias = Literal["shard", "replicate", "flat"]

_DATA_AXES = ("dp", "edp", "dp_shard", "fsdp")
_REPLICATING_AXES = ("cp", "dp_replicate", "ddp")
AXES = frozenset({"tp", "pp", "ep", *_DATA_AXES, *_REPLICATING_AXES})
"""Every axis that means something to a layout."""
_DATA_PLACEMENTS: dict[DataParallelMode, Placement] = {"shard": Shard(0), "replicate": Replicate(), "flat": Flat()}


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """One row per box that a rank holds, sorted by tensor, then rank, then place in the rank's own tensor."""

    mesh: Mesh
    tensor: npt.NDArray[np.int32]  # int32[n], index into the names that were given
    rank: npt.NDArray[np.int32]  # int32[n]
    replica: npt.NDArray[np.int32]  # int32[n], 0 for the first rank that holds this box of this tensor, then 1, 2 ...
    offsets: Int64Array  # int64[n, D]
    sizes: Int64Array  # int64[n, D]
    layouts: tuple[TensorLayout, ...]
    """One per tensor."""
    stages: LayerStages
    """Stage and model chunk of each layer; all on stage 0 for a mesh without ``pp``."""
    notes: tuple[str, ...]
    """What was assumed, stripped or cut unevenly."""

    def __len__(self) -> int:
        """Number of boxes."""
        return len(self.tensor)


def place(
    fqns: Sequence[str],
    shapes: Sequence[Sequence[int]],
    mesh: Mesh,
    rules: RuleSet | None,
    *,
    dp_mode: DataParallelMode = "shard",
    default: Default | None = None,
    stages: StageOptions | None = None,
    numbered: Mapping[int, str] | None = None,
) -> Placed:
    """Which box of which tensor every rank holds.

    Boxes that differ are disjoint and together cover each tensor; equal ones are counted by ``replica``. Empty boxes
    are dropped, except that a tensor without elements keeps one. A cut that does not divide follows ``torch.chunk``.

    Args:
        fqns: names of tensors.
        shapes: global shapes.
        mesh: the ranks.
        rules: what tensor, expert and pipeline parallelism do to which names; not looked at, and may be None, for a
            mesh without these.
        dp_mode: ``shard`` cuts dimension 0 of what tensor parallelism left (FSDP2), ``flat`` its row-major elements,
            or those of each fused part (ZeRO, distributed optimizers), ``replicate`` nothing (DDP).
        default: what happens to names without a rule: cut by ``tp`` along dimension 0, or replicated by all but the
            data-parallel axes.
        stages: how layers are spread where an even spread is not wanted.
        numbered: names of the parameters that an optimizer numbers.

    Raises:
        LayoutError: a name without a rule, a rule that does not fit a shape, an axis that means nothing here.
    """
    for axis in mesh.axes:
        if axis not in AXES:
            raise LayoutError(f"mesh {mesh} has an axis {axis!r}", hint=f"known are {', '.join(sorted(AXES))}")
    notes = Notes()
    exact = [tuple(shape) for shape in shapes]
    if mesh.size("tp") == mesh.size("pp") == mesh.size("ep") == 1:
        layouts = tuple(
            TensorLayout(is_whole=is_for_everyone(fqn, shape)) for fqn, shape in zip(fqns, exact, strict=True)
        )
        resolved = Resolved(layouts, n_layers=0, n_experts=0)
    elif rules is None:
        raise LayoutError(f"mesh {mesh} needs rules for its tensors", hint="name a family, or give --rules FILE")
    else:
        resolved = resolve(fqns, exact, rules, default=default, numbered=numbered or {}, notes=notes)
    layers = layer_stages(resolved.n_layers, mesh.size("pp"), stages or StageOptions())
    if mesh.size("pp") > 1 and resolved.n_layers:
        notes.add("layers over stages", str(layers))
        without = sorted(set(range(mesh.size("pp"))) - set(layers.stage.tolist()))
        if without:
            notes.add("stages without layers", ", ".join(map(str, without)))
    placer = _Placer(mesh, dp_mode, layers, resolved.n_experts, max((len(shape) for shape in exact), default=0))
    pieces = [placer.pieces(shape, layout) for shape, layout in zip(exact, resolved.layouts, strict=True)]
    for fqn, shape, layout, piece in zip(fqns, exact, resolved.layouts, pieces, strict=True):
        _note_uneven(fqn, shape, layout, mesh, notes)
        if piece.n_idle and prod(shape):
            notes.add(f"too small for all its ranks, {counted(piece.n_idle, 'rank', 'have')} nothing of it", fqn)
    if resolved.n_experts % mesh.size("ep"):
        notes.add(f"experts do not divide by ep={mesh.size('ep')}, the last ranks hold fewer", f"{resolved.n_experts}")
    n_boxes = np.array([len(piece.rank) for piece in pieces], dtype=np.int64)
    return Placed(
        mesh=mesh,
        tensor=np.repeat(np.arange(len(fqns), dtype=np.int32), n_boxes),
        rank=_joined([piece.rank for piece in pieces], np.zeros(0, dtype=np.int32)),
        replica=_joined([piece.replica for piece in pieces], np.zeros(0, dtype=np.int32)),
        offsets=np.concatenate([np.zeros((0, placer.width), dtype=np.int64), *(piece.offsets for piece in pieces)]),
        sizes=np.concatenate([np.zeros((0, placer.width), dtype=np.int64), *(piece.sizes for piece in pieces)]),
        layouts=resolved.layouts,
        stages=layers,
        notes=notes.sentences(),
    )


class _Placer:
    """Pieces of tensors, computed once for each distinct shape, layout and set of ranks."""

    def __init__(self, mesh: Mesh, dp_mode: DataParallelMode, layers: LayerStages, n_experts: int, width: int) -> None:
        self.width = width
        self._mesh = mesh
        self._data = _DATA_PLACEMENTS[dp_mode]
        self._coord = dict(zip(mesh.axes, mesh.coords().T, strict=True))
        self._pp, self._ep = mesh.size("pp"), mesh.size("ep")
        self._stage_of_layer = layers.stage.tolist()
        self._owner_of_expert = np.repeat(np.arange(self._ep), np.diff(chunk_bounds(n_experts, self._ep))).tolist()
        self._cuts: dict[tuple[object, ...], Cut] = {}
        self._ranks: dict[tuple[int, int], Int64Array] = {}
        self._pieces: dict[tuple[object, ...], Pieces] = {}

    def pieces(self, shape: tuple[int, ...], layout: TensorLayout) -> Pieces:
        """The boxes of one tensor."""
        ranks_key = self._ranks_of(layout)
        cut_key = (shape, layout.tp, layout.parts, layout.ep, layout.is_expert, layout.is_whole)
        key = (cut_key, ranks_key)
        if key not in self._pieces:
            self._pieces[key] = cut_pieces(shape, self._cut(cut_key, layout), self._ranks[ranks_key], self.width)
        return self._pieces[key]

    def _ranks_of(self, layout: TensorLayout) -> tuple[int, int]:
        """Key into ``_ranks``: (stage, expert-parallel rank) that hold a tensor, -1 for all."""
        stage = {"first": 0, "last": self._pp - 1}.get(layout.stage, -1)
        if layout.stage == "layer" and layout.layer is not None:
            stage = self._stage_of_layer[layout.layer]
        owner = -1 if layout.expert is None else self._owner_of_expert[layout.expert]
        key = (stage if self._pp > 1 else -1, owner if self._ep > 1 else -1)
        if key not in self._ranks:
            holds = np.ones(self._mesh.world_size, dtype=np.bool_)
            for axis, place_of in zip(("pp", "ep"), key, strict=True):
                if place_of >= 0:
                    holds &= self._coord[axis] == place_of
            self._ranks[key] = np.flatnonzero(holds)
        return key

    def _cut(self, key: tuple[object, ...], layout: TensorLayout) -> Cut:
        if key not in self._cuts:
            data_axes = [
                axis for axis in self._mesh.axes if axis in _DATA_AXES or (axis == "ep" and not layout.is_expert)
            ]
            coord, parts = self._combined(data_axes)
            self._cuts[key] = Cut(
                ep=layout.ep,
                ep_coord=self._combined(["ep"])[0],
                ep_parts=self._mesh.size("ep"),
                tp=layout.tp,
                fused=layout.parts,
                tp_coord=self._combined(["tp"])[0],
                tp_parts=self._mesh.size("tp"),
                data=Replicate() if layout.is_whole else self._data,
                data_coord=coord,
                data_parts=parts,
            )
        return self._cuts[key]

    def _combined(self, axes: Sequence[str]) -> tuple[Int64Array, int]:
        """Place of every rank along several axes taken as one, the last of them fastest, and their joint size."""
        coord = np.zeros(self._mesh.world_size, dtype=np.int64)
        for axis in axes:
            if axis in self._coord:
                coord = coord * self._mesh.size(axis) + self._coord[axis]
        return coord, prod(self._mesh.size(axis) for axis in axes)


def _note_uneven(fqn: str, shape: tuple[int, ...], layout: TensorLayout, mesh: Mesh, notes: Notes) -> None:
    for axis, placement in (("ep", layout.ep), ("tp", layout.tp)):
        parts = mesh.size(axis)
        if isinstance(placement, Shard):
            lengths = layout.parts if axis == "tp" and layout.parts else (shape[placement.dim],)
            if any(length % parts for length in lengths):
                notes.add(f"{lengths[0]:,} does not divide by {axis}={parts}, cut by the rule of torch.chunk", fqn)


def _joined(columns: Sequence[npt.NDArray[np.int32]], empty: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.concatenate([empty, *columns])
