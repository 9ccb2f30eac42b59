"""Values that are no numbers, found in raw bits, against numpy and ml_dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.checks.bits import bit_patterns, scan_non_finite
from ckpt_tool.dtypes import DTYPES, dtype

SMALL = ["float16", "bfloat16", *(name for name in DTYPES if name.startswith("float8"))]


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_of_small_types(name: str) -> None:
    """All patterns of 8 and 16 bits are judged as the library that defines the type judges them."""
    width = dtype(name).bits // 8
    bits = np.arange(1 << (8 * width), dtype=f"u{width}")
    with np.errstate(invalid="ignore"):
        values = bits.view(dtype(name).as_numpy()).astype(np.float64)
    patterns = bit_patterns(dtype(name))
    assert patterns is not None
    found = scan_non_finite(bits, patterns, bits)
    assert found is not None
    assert found.nan.tolist() == np.flatnonzero(np.isnan(values)).tolist()
    assert found.inf.tolist() == np.flatnonzero(np.isinf(values)).tolist()
    finite = bits[np.isfinite(values)]
    assert scan_non_finite(finite, patterns, finite) is None


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_wide_types(name: str, value: float) -> None:
    """One value among the largest and smallest numbers of the type, of either sign."""
    info = np.finfo(name)
    values = np.array([info.max, info.min, info.tiny, -0.0, value, 1.0], dtype=name)
    patterns = bit_patterns(dtype(name))
    assert patterns is not None
    bits = values.view(f"u{values.itemsize}")
    found = scan_non_finite(bits, patterns, bits)
    assert found is not None
    assert found.nan.tolist() == ([4] if np.isnan(value) else [])
    assert found.inf.tolist() == ([] if np.isnan(value) else [4])
    rest = np.delete(bits, 4)
    assert scan_non_finite(rest, patterns, rest) is None


def test_integers_have_nothing_to_find() -> None:
    """Types that hold only numbers, or bytes, are not scanned."""
    names = ("int64", "uint8", "bool", "float4_e2m1fn_x2", "qint8")
    assert [bit_patterns(dtype(name)) for name in names] == [None] * len(names)
