from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpt_tool.cli.render_values import array_text, object_text
from ckpt_tool.dtypes import dtype


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        ("a\nb", "'a\\nb'"),
        ({"a": [1, (2, 3)], "b": {}}, "{a: [1, (2, 3)], b: {}}"),
        (b"123", "<3 bytes>"),
        (np.zeros((2, 3), np.float32), "<array float32 [2, 3]>"),
        (np.float64(0.5), "0.5"),
        ({"param_dtype": dtype("bf16")}, "{param_dtype: torch.bfloat16}"),
        ("x" * 10**6, "'" + "x" * 38 + "…"),
    ],
)
def test_objects(value: Any, expected: str) -> None:
    """Plain values read as Python writes them; arrays and bytes are named, not printed."""
    assert object_text(value, width=40) == expected


def test_objects_of_any_depth_and_length_end() -> None:
    """A value nested 100,000 deep, or of a million items, is a short line."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert len(object_text(deep, width=40)) <= 80
    assert len(object_text(list(range(10**6)), width=40)) <= 40
    while deep:  # taken apart by hand: the interpreter would recurse
        deep = deep[0]


def test_arrays_are_aligned_whatever_their_type() -> None:
    """Types that numpy does not know are printed in columns too."""
    values = np.array([[1.5, -2], [100, 0.25]])
    assert array_text(values.astype(ml_dtypes.bfloat16), width=80) == ["[[  1.5   -2.  ]", " [100.     0.25]]"]
    assert array_text(np.array([1, -2]).astype(ml_dtypes.int4), width=80) == ["[ 1 -2]"]


def test_large_arrays_are_shown_at_their_edges() -> None:
    """A large array is shortened, unless the whole is asked for."""
    array = np.arange(10_000).reshape(100, 100)
    assert len(array_text(array, width=80)) < 60
    assert "..." in "".join(array_text(array, width=80))
    assert "..." not in "".join(array_text(array, width=80, is_whole=True))
