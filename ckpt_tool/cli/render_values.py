"""Values as text: arrays as numpy prints them, and inert objects of a checkpoint, cut where they are long."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tool.dtypes import DType
from ckpt_tool.sizes import counted

__all__ = ["array_text", "object_text"]

_ELEMENTS_SHOWN = 2000
_EDGE = 6
_MAX_DEPTH = 30  # deeper than any line is wide


def array_text(array: Any, *, width: int, is_whole: bool = False) -> list[str]:
    """Lines of an array as numpy prints it; only the edges of a large one, unless the whole is asked for."""
    import numpy as np

    if array.dtype.kind == "V" and array.dtype.type is not np.void:  # ml_dtypes: numpy aligns only what it knows
        array = array.astype(np.int32 if "int" in array.dtype.name else np.float32)
    threshold = sys.maxsize if is_whole else _ELEMENTS_SHOWN
    return np.array2string(array, max_line_width=width, threshold=threshold, edgeitems=_EDGE).splitlines()


def object_text(value: Any, *, width: int) -> str:
    """One line for an inert value, about as long as ``width`` at most; only as much of it is looked at.

    >>> object_text({"lr": 0.1, "betas": (0.9, 0.95)}, width=40)
    '{lr: 0.1, betas: (0.9, 0.95)}'
    >>> object_text(list(range(1000)), width=30)
    '[0, 1, 2, 3, 4, … 1,000 items]'
    """
    text = "".join(_pieces(value, width, 0))
    if len(text) <= width:
        return text
    if not isinstance(value, Mapping | list | tuple | set):
        return text[: width - 1] + "…"
    end = f"… {counted(len(value), 'item')}{_closing(value)}"
    kept, comma, _ = text[: max(width - len(end), 1)].rpartition(", ")
    return f"{kept}{comma}{end}" if comma else f"{text[0]}{end}"


def _closing(value: Any) -> str:
    return "}" if isinstance(value, Mapping | set) else "]" if isinstance(value, list) else ")"


def _pieces(value: Any, budget: int, depth: int) -> Iterator[str]:
    """Text of a value, piece by piece, with an end once about ``budget`` characters are out."""
    if depth > _MAX_DEPTH:
        yield "…"
    elif isinstance(value, Mapping):
        yield "{"
        yield from _joined(((f"{key}: ", item) for key, item in value.items()), budget, depth)
        yield "}"
    elif type(value) in {list, tuple, set}:
        yield "[" if type(value) is list else "(" if type(value) is tuple else "{"
        yield from _joined((("", item) for item in value), budget, depth)
        yield _closing(value)
    elif isinstance(value, str):
        yield repr(value[: budget + 1])
    elif isinstance(value, bytes):
        yield f"<{counted(len(value), 'byte')}>"
    elif isinstance(value, DType):
        yield f"torch.{value.name}"
    elif hasattr(value, "dtype") and hasattr(value, "ndim"):
        yield f"<array {value.dtype} {list(value.shape)}>" if value.ndim else str(value)
    else:
        yield repr(value)


def _joined(items: Iterator[tuple[str, Any]], budget: int, depth: int) -> Iterator[str]:
    used = 0
    for at, (key, item) in enumerate(items):
        text = f"{', ' if at else ''}{key}" + "".join(_pieces(item, max(budget - used, 0), depth + 1))
        yield text
        used += len(text)
        if used > budget:
            return
