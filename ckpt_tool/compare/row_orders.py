"""A row order says which row of one tensor each row of another is; the known ones have names.

Rows are told apart by a number each, as probes make them. Pure; knows no bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["RowOrder", "find_order", "known_order"]


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Row ``i`` of B is row ``rows[i]`` of A."""

    rows: Int64Array  # int64[n]
    kind: str
    text: str


def find_order(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> RowOrder | None:
    """How B's rows come out of A's; None where they are in the same order, or not the same rows.

    Equal rows are taken in their order.

    >>> find_order(np.array([5, 6, 7, 8], "u8"), np.array([7, 8, 5, 6], "u8")).kind
    'halves-swapped'
    """
    if len(a) != len(b) or not len(a):
        return None
    order_a, order_b = np.argsort(a, kind="stable"), np.argsort(b, kind="stable")
    if not np.array_equal(a[order_a], b[order_b]):
        return None
    rows = np.empty(len(a), dtype=np.int64)
    rows[order_b] = order_a
    if np.array_equal(a, b):
        return None
    return known_order(rows, lambda candidate: np.array_equal(a[candidate], b))


def known_order(rows: Int64Array, fits: Callable[[Int64Array], bool]) -> RowOrder:
    """The order with the name that it has, if it is one that frameworks use.

    Args:
        rows: int64[n], a permutation.
        fits: whether another order explains as much; equal rows may stand in any order.
    """
    for name in (_rolled, _axes_swapped, _fused):
        found = name(rows)
        if found is not None and fits(found.rows):
            return found
    moved = np.flatnonzero(rows != np.arange(len(rows)))
    example = int(moved[0]) if len(moved) else 0
    text = f"B holds A's rows in another order ({len(moved):,} moved; row {example:,} is A's {int(rows[example]):,})"
    return RowOrder(rows, "rows-reordered", text)


def _rolled(rows: Int64Array) -> RowOrder | None:
    n, shift = len(rows), int(rows[0])
    rolled = np.roll(np.arange(n), -shift)
    if shift * 2 == n:
        return RowOrder(rolled, "halves-swapped", "the two halves of the rows are swapped, as gate and up may be")
    return RowOrder(rolled, "rows-rolled", f"B's rows begin with A's row {shift:,} and go on behind its last")


def _axes_swapped(rows: Int64Array) -> RowOrder | None:
    """Rows as ``[outer, a, b, inner]`` in A and ``[outer, b, a, inner]`` in B."""
    n = len(rows)
    moved = np.flatnonzero(rows != np.arange(n))
    inner = int(moved[0])
    if not inner:
        return None
    b, rest = divmod(int(rows[inner]), inner)
    a, rest_a = divmod(int(np.argmax(rows == inner)), inner)
    if rest or rest_a or a < 2 or b < 2 or n % (a * b * inner):
        return None
    outer = n // (a * b * inner)
    swapped = np.arange(n).reshape(outer, a, b, inner).swapaxes(1, 2).reshape(-1)
    if inner == 1 and 2 in {a, b}:
        said = "interleaved pairs, A's halves" if a == 2 else "halves, A's interleaved pairs"
        return RowOrder(swapped, "rotary-order", f"rotary rows: B's heads of {counted(a * b, 'row')} are {said}")
    groups = f" in each of {counted(outer, 'group')}" if outer > 1 else ""
    text = (
        f"blocks of {counted(inner, 'row')}{groups}: [{a}, {b}] in A, [{b}, {a}] in B, as fused parts in rank order are"
    )
    return RowOrder(swapped, "rank-order", text)


def _fused(rows: Int64Array) -> RowOrder | None:
    """Query, key and value one behind the other on one side, group by group on the other."""
    grouped = _grouped(rows)
    if grouped is not None:
        order, groups, q, kv = grouped
        text = (
            f"fused qkv: A holds q, k, v whole, B {counted(groups, 'group')} of {q:,} + {kv:,} + {counted(kv, 'row')}"
        )
        return RowOrder(order, "fused-qkv-order", text)
    inverse = _grouped(np.argsort(rows))
    if inverse is None:
        return None
    order, groups, q, kv = inverse
    text = f"fused qkv: B holds q, k, v whole, A {counted(groups, 'group')} of {q:,} + {kv:,} + {counted(kv, 'row')}"
    return RowOrder(np.argsort(order), "fused-qkv-order", text)


def _grouped(rows: Int64Array) -> tuple[Int64Array, int, int, int] | None:
    """``(order, groups, q rows, k or v rows of a group)`` that the first runs of ``rows`` speak for."""
    n = len(rows)
    moved = np.flatnonzero(rows != np.arange(n))
    q = int(moved[0])
    if not q or int(rows[q]) % q:
        return None
    groups = int(rows[q]) // q
    if groups < 2 or n % groups or (n // groups - q) % 2 or n // groups <= q:
        return None
    kv = (n // groups - q) // 2
    index = np.arange(n)
    parts = (
        index[: groups * q].reshape(groups, q),
        index[groups * q : groups * (q + kv)].reshape(groups, kv),
        index[groups * (q + kv) :].reshape(groups, kv),
    )
    return np.concatenate(parts, axis=1).reshape(-1), groups, q, kv
