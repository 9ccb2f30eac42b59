"""Whether two unpickled values say the same, compared as data: nothing of theirs is called but numpy's and ours."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_tool.formats._pickle.nodes import Stub

__all__ = ["same_value"]


def same_value(a: Any, b: Any) -> bool:
    """Whether two unpickled values say the same; NaN equals NaN, objects are equal when their class and state are."""
    compared: set[tuple[int, int]] = set()
    waiting = [(a, b)]
    while waiting:
        left, right = waiting.pop()
        if left is right or (id(left), id(right)) in compared:
            continue
        compared.add((id(left), id(right)))
        # Each file has class records of its own, so that stubs of one class have different types.
        is_comparable = type(left) is type(right) or (isinstance(left, Stub) and isinstance(right, Stub))
        parts = _paired(left, right) if is_comparable else None
        if parts is None:
            return False
        waiting += parts
    return True


def _paired(left: Any, right: Any) -> list[tuple[Any, Any]] | None:
    """Parts of two values of one type that must be equal for these to be; None when they differ already."""
    if isinstance(left, np.ndarray):
        is_same = left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        return [] if is_same else None
    if isinstance(left, Stub):
        if left.cls != right.cls:
            return None
        pairs = [(getattr(left, name), getattr(right, name)) for name in ("args", "kwargs", "state")]
        return [*pairs, (list(left.entries), list(right.entries)), (list(left.items), list(right.items))]
    if isinstance(left, dict):
        if len(left) != len(right):
            return None
        return [*zip(left, right, strict=True), *zip(left.values(), right.values(), strict=True)]
    if isinstance(left, (list, tuple)):
        return list(zip(left, right, strict=True)) if len(left) == len(right) else None
    is_same = left == right or (left != left and right != right)  # noqa: PLR0124 - NaN
    return [] if is_same else None
