"""A mesh is the grid of ranks, one named axis per kind of parallelism; ranks count row-major, the last axis fastest.

Axis names are free, as checkpoints use many; what an axis does to a tensor is decided in `ckpt_tool.layout.place`.
"""

from __future__ import annotations

import re
from math import prod

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Mesh", "default_mesh", "parse_mesh"]

_AXIS = r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*([0-9]+)\s*"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes with their sizes, slowest first.

    >>> Mesh(("dp", "tp"), (2, 4)).coord(5)
    {'dp': 1, 'tp': 1}
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that names are unique and sizes positive."""
        if len(self.axes) != len(self.sizes):
            raise LayoutError(
                f"mesh has {len(self.axes)} axes {self.axes} and {counted(len(self.sizes), 'size')} {self.sizes}"
            )
        if len(set(self.axes)) != len(self.axes):
            raise LayoutError(f"mesh names an axis twice: {', '.join(self.axes)}")
        if any(size < 1 for size in self.sizes):
            raise LayoutError(f"sizes of mesh axes must be at least 1, got {self}", hint="leave the axis out")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along an axis; 1 for one that the mesh does not have."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def coord(self, rank: int) -> dict[str, int]:
        """Place of a rank along each axis.

        Raises:
            LayoutError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"mesh {self} has ranks 0 to {self.world_size - 1:,}, there is no rank {rank:,}")
        return dict(zip(self.axes, (int(c) for c in np.unravel_index(rank, self.sizes)), strict=True))

    def coords(self) -> Int64Array:
        """``int64[world_size, n_axes]``: place of every rank along each axis; row ``r`` is ``coord(r)``."""
        return np.indices(self.sizes, dtype=np.int64).reshape(len(self.axes), self.world_size).T

    def __str__(self) -> str:
        """As `parse_mesh` reads it: ``parse_mesh(str(mesh)) == mesh``."""
        return ",".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))


def parse_mesh(text: str) -> Mesh:
    """The mesh that a text names, slowest axis first; the empty text is the mesh of one rank without axes.

    >>> parse_mesh("pp=2,dp=4,tp=2").world_size
    16

    Raises:
        LayoutError: not of this form.
    """
    parts = [part for part in text.split(",") if part.strip()]
    matches = [re.fullmatch(_AXIS, part) for part in parts]
    for part, match in zip(parts, matches, strict=True):
        if match is None:
            raise LayoutError(
                f"{part.strip()!r} in mesh {text!r} is not an axis with its size",
                hint='write it as "pp=2,dp=4,tp=2", slowest axis first',
            )
    found = [match for match in matches if match is not None]
    return Mesh(tuple(match[1] for match in found), tuple(int(match[2]) for match in found))


def default_mesh(*, tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, cp: int = 1) -> Mesh:
    """Megatron's rank order: tp fastest, then cp, then dp, pp slowest. Axes of size 1 are kept.

    Experts are spread inside the data-parallel axis: with ``ep > 1`` that becomes ``edp`` times ``ep``, ep faster
    (Megatron-Core, ``parallel_state``, order ``tp-cp-ep-dp-pp`` with ``cp=1``).

    >>> str(default_mesh(tp=2, pp=2, dp=4)), str(default_mesh(dp=4, ep=2))
    ('pp=2,dp=4,cp=1,tp=2', 'pp=1,edp=2,ep=2,cp=1,tp=1')

    Raises:
        LayoutError: a size below 1, or ``ep`` does not divide ``dp``.
    """
    if ep == 1:
        return Mesh(("pp", "dp", "cp", "tp"), (pp, dp, cp, tp))
    if ep < 1 or dp < 1 or dp % ep:
        below = next((n for n in range(min(dp, ep), 0, -1) if dp % n == 0), 1)
        raise LayoutError(
            f"experts are spread over the data-parallel ranks, so ep must divide dp; got ep={ep}, dp={dp}",
            hint=f"use --ep {below}, or --dp {-(-max(dp, 1) // max(ep, 1)) * max(ep, 1)}",
        )
    return Mesh(("pp", "edp", "ep", "cp", "tp"), (pp, dp // ep, ep, cp, tp))
