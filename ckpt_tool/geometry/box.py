"""A box is a half-open n-D region of a tensor, in elements.

Every function states its coordinate space. *Global* coordinates count from the tensor's first element, *local* ones
from the first element of a named box. Knows nothing of dtypes, bytes or files.
"""

from __future__ import annotations

from math import prod

from ckpt_tool.errors import LayoutError
from ckpt_tool.records import dataclass

__all__ = ["Box", "difference", "intersect"]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """``offsets[d] <= index[d] < offsets[d] + sizes[d]`` for every dimension ``d``, in global coordinates.

    >>> Box((2, 0), (3, 4)).volume
    12
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that both corners have one rank and no negative number."""
        if len(self.offsets) != len(self.sizes):
            raise LayoutError(f"box offsets {self.offsets} and sizes {self.sizes} differ in their number of dimensions")
        if any(n < 0 for n in (*self.offsets, *self.sizes)):
            raise LayoutError(f"box offsets {self.offsets} and sizes {self.sizes} must not be negative")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box of a whole tensor: ``intersect(Box.whole(shape), b) == b`` for every box ``b`` of that tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a box of no dimensions."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index of each dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """An index for a numpy array of the whole tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def relative_to(self, origin: Box) -> Box:
        """This box in local coordinates of ``origin``; ``b.relative_to(b)`` starts at zero.

        Raises:
            LayoutError: this box starts before ``origin``.
        """
        return Box(tuple(o - p for o, p in zip(self.offsets, origin.offsets, strict=True)), self.sizes)

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is one of this box; true for an empty ``other``."""
        if other.volume == 0:
            return True
        return all(
            o <= p and p + t <= o + s
            for o, s, p, t in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def __str__(self) -> str:
        """As numpy would slice it.

        >>> str(Box((2, 0), (3, 4)))
        '[2:5, 0:4]'
        """
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offsets, self.sizes, strict=True)) + "]"


def intersect(a: Box, b: Box) -> Box | None:
    """The common region of two boxes in global coordinates, None when they share no element.

    ``intersect(b, b) == b`` for every box that is not empty.
    """
    offsets = tuple(max(p, q) for p, q in zip(a.offsets, b.offsets, strict=True))
    sizes = tuple(min(p, q) - o for p, q, o in zip(a.ends, b.ends, offsets, strict=True))
    return Box(offsets, sizes) if all(s > 0 for s in sizes) else None


def difference(a: Box, b: Box) -> list[Box]:
    """Disjoint boxes that cover ``a`` without ``b``, at most two per dimension, in global coordinates.

    ``difference(b, b) == []``; the volumes of the result and of ``intersect(a, b)`` add up to that of ``a``.

    >>> [str(piece) for piece in difference(Box((0, 0), (4, 4)), Box((1, 1), (2, 9)))]
    ['[0:1, 0:4]', '[3:4, 0:4]', '[1:3, 0:1]']
    """
    common = intersect(a, b)
    if common is None:
        return [a] if a.volume else []
    pieces: list[Box] = []
    offsets, sizes = list(a.offsets), list(a.sizes)
    for dim in range(a.ndim):
        for start, stop in (
            (offsets[dim], common.offsets[dim]),
            (common.ends[dim], offsets[dim] + sizes[dim]),
        ):
            if stop > start:
                pieces.append(
                    Box(
                        (*offsets[:dim], start, *offsets[dim + 1 :]),
                        (*sizes[:dim], stop - start, *sizes[dim + 1 :]),
                    )
                )
        offsets[dim], sizes[dim] = common.offsets[dim], common.sizes[dim]
    return pieces
