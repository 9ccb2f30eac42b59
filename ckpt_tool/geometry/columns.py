"""A column is a numpy array with one row per box: ``offsets`` and ``sizes`` are ``int64[n, ndim]``, aligned.

Here are only the names of the column types and the step from columns to records; what the rows mean is said
where they are made.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.box import Box

__all__ = ["BoolArray", "Int64Array", "boxes_from_columns", "distinct", "kept", "one_of_each"]

Scalar = TypeVar("Scalar", bound=np.generic)

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def boxes_from_columns(offsets: Int64Array, sizes: Int64Array) -> list[Box]:
    """One `Box` per row, in row order and in the columns' own coordinates."""
    rows: Iterable[tuple[list[int], list[int]]] = zip(offsets.tolist(), sizes.tolist(), strict=True)
    return [Box(tuple(o), tuple(s)) for o, s in rows]


def distinct(values: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """int64[m]: the values that occur in a column, ascending; `numpy.unique` without loading `numpy.ma` (8 ms).

    >>> distinct(np.array([3, 1, 3])).tolist()
    [1, 3]
    """
    ordered = np.sort(values, axis=None)
    is_first = np.ones(len(ordered), dtype=np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first].astype(np.int64)


def kept(column: npt.NDArray[Scalar], rows: Int64Array) -> npt.NDArray[Scalar]:
    """``column[rows]`` of ascending rows, each once; the column itself, not a copy, where that is all of it.

    >>> column = np.array([3, 1, 3])
    >>> kept(column, np.arange(3)) is column
    True
    """
    return column if len(rows) == len(column) else column[rows]


def one_of_each(*columns: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """int64[m]: a row of each combination of values in aligned columns, ascending by the values, first column first.

    >>> one_of_each(np.array([3, 1, 3]), np.array([0, 2, 0])).tolist()
    [1, 0]
    """
    order = np.lexsort(columns[::-1])
    is_first = np.zeros(len(order), dtype=np.bool_)
    is_first[:1] = True
    for column in columns:
        ordered = column[order]
        is_first[1:] |= ordered[1:] != ordered[:-1]
    return order[is_first]
