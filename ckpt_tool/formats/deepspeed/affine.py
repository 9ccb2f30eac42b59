"""An affine piece maps a strided view of a shard onto a strided view of the whole tensor; here it becomes boxes.

DeepSpeed (0.19, ``checkpoint/affine.py``) records for each tensor-parallel rank ``shard.as_strided(shape, dest) ==
full.as_strided(shape, source)``, offsets and strides in elements of dense row-major tensors. Almost every such view is
a box; one that is not is cut along its outer dimensions until its parts are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.geometry.box import Box, intersect
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Pair", "View", "box_pairs", "clipped"]

_MAX_PAIRS = 4096


@dataclass(frozen=True, slots=True)
class Pair:
    """Equal boxes of a shard and of the whole tensor, each in its own coordinates."""

    local: Box
    whole: Box


@dataclass(frozen=True, slots=True)
class View:
    """Arguments of ``as_strided`` for one tensor of a known shape."""

    offset: int
    strides: tuple[int, ...]
    of_shape: tuple[int, ...]


def clipped(pair: Pair, bounds: Box) -> Pair | None:
    """The part of ``pair`` whose whole box lies in ``bounds``; None when there is none."""
    common = intersect(pair.whole, bounds)
    if common is None:
        return None
    inside = common.relative_to(pair.whole)
    offsets = tuple(o + i for o, i in zip(pair.local.offsets, inside.offsets, strict=True))
    return Pair(Box(offsets, common.sizes), common)


def box_pairs(shape: tuple[int, ...], shard: View, whole: View) -> tuple[Pair, ...]:
    """Boxes that hold the same elements as the two views, in the views' order.

    >>> whole, shard = View(24, (48, 1), (4, 48)), View(0, (24, 1), (4, 24))
    >>> [(str(pair.local), str(pair.whole)) for pair in box_pairs((4, 24), shard, whole)]
    [('[0:4, 0:24]', '[0:4, 24:48]')]

    Raises:
        FormatError: a view reaches beyond its tensor.
        Unsupported: it takes too many boxes, or the tensors differ in their number of dimensions.
    """
    for view in (shard, whole):
        if not len(shape) == len(view.strides):
            raise FormatError(
                f"a piece of {counted(len(shape), 'dimension')} has {counted(len(view.strides), 'stride')}"
            )
        reach = view.offset + sum((n - 1) * s for n, s in zip(shape, view.strides, strict=True))
        if (
            view.offset < 0
            or min(view.strides, default=0) < 0
            or (0 not in shape and reach >= Box.whole(view.of_shape).volume)
        ):
            raise FormatError(f"a piece ends at element {reach:,} of a tensor of shape {list(view.of_shape)}")
    if len(shard.of_shape) != len(whole.of_shape):
        raise Unsupported(f"a shard {list(shard.of_shape)} of a tensor {list(whole.of_shape)}: other dimensions")
    if 0 in shape:
        return ()
    dims = [(n, a, b) for n, a, b in zip(shape, shard.strides, whole.strides, strict=True) if n > 1]
    dims = _factored(dims, shard, 1)
    dims = _factored(dims, whole, 2)
    found: list[Pair] = []
    _collect(found, dims, shard, whole)
    return tuple(found)


def _collect(found: list[Pair], dims: list[tuple[int, int, int]], shard: View, whole: View) -> None:
    local = _as_box([(n, a) for n, a, _ in dims], shard)
    target = _as_box([(n, b) for n, _, b in dims], whole)
    if local is not None and target is not None and local.sizes == target.sizes and _same_order(dims, shard, whole):
        if len(found) >= _MAX_PAIRS:
            raise Unsupported(f"a piece of a tensor-parallel shard is more than {counted(_MAX_PAIRS, 'box')}")
        found.append(Pair(local, target))
        return
    if not dims:
        raise Unsupported("a piece of a tensor-parallel shard is transposed")
    n, a, b = dims[0]
    if n > _MAX_PAIRS:
        raise Unsupported(f"a piece of a tensor-parallel shard is more than {counted(_MAX_PAIRS, 'box')}")
    for i in range(n):
        _collect(
            found,
            dims[1:],
            View(shard.offset + i * a, (), shard.of_shape),
            View(whole.offset + i * b, (), whole.of_shape),
        )


def _same_order(dims: Sequence[tuple[int, int, int]], shard: View, whole: View) -> bool:
    """Whether every dimension of the view runs along the same dimension of both tensors."""
    shard_steps, whole_steps = _steps(shard.of_shape), _steps(whole.of_shape)
    return all(shard_steps.get(a) == whole_steps.get(b) for _, a, b in dims)


def _steps(shape: Sequence[int]) -> dict[int, int]:
    """Dimension by stride, of those longer than 1."""
    return {s: d for d, (n, s) in enumerate(zip(shape, contiguous_strides(shape), strict=True)) if n > 1}


def _as_box(dims: Sequence[tuple[int, int]], view: View) -> Box | None:
    steps = _steps(view.of_shape)
    offsets = _unraveled(view.offset, view.of_shape)
    sizes = [1] * len(view.of_shape)
    for n, stride in dims:
        dim = steps.get(stride)
        if dim is None or sizes[dim] != 1 or offsets[dim] + n > view.of_shape[dim]:
            return None
        sizes[dim] = n
    return Box(tuple(offsets), tuple(sizes))


def _unraveled(position: int, shape: Sequence[int]) -> list[int]:
    return [position // step % max(n, 1) for n, step in zip(shape, contiguous_strides(shape), strict=True)]


def _factored(dims: Sequence[tuple[int, int, int]], view: View, which: int) -> list[tuple[int, int, int]]:
    """Dimensions that run over whole rows of the tensor, written as two: the rows, and the elements of each."""
    steps = _steps(view.of_shape)
    offsets = _unraveled(view.offset, view.of_shape)
    result: list[tuple[int, int, int]] = []
    for entry in dims:
        n, a, b = entry
        inner: list[tuple[int, int, int]] = []
        dim = steps.get((a, b)[which - 1])
        while dim is not None and n > view.of_shape[dim] and n % view.of_shape[dim] == 0 and offsets[dim] == 0:
            row = view.of_shape[dim]
            inner.insert(0, (row, a, b))
            n, a, b = n // row, a * row, b * row
            dim = steps.get((a, b)[which - 1])
        result += [(n, a, b), *inner]
    return result
