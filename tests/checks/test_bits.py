"""Values that are no numbers, found in raw bits, against numpy and ml_dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.checks.bits import GRANULE, bit_patterns, granules, hold_numbers, scan_non_finite
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
    found = scan_non_finite(bits, patterns)
    assert found is not None
    assert found.nan.tolist() == np.flatnonzero(np.isnan(values)).tolist()
    assert found.inf.tolist() == np.flatnonzero(np.isinf(values)).tolist()
    finite = bits[np.isfinite(values)]
    assert scan_non_finite(finite, patterns) is None


@pytest.mark.parametrize("name", ["float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_wide_types(name: str, value: float) -> None:
    """One value among the largest and smallest numbers of the type, of either sign."""
    info = np.finfo(name)
    values = np.array([info.max, info.min, info.tiny, -0.0, value, 1.0], dtype=name)
    patterns = bit_patterns(dtype(name))
    assert patterns is not None
    bits = values.view(f"u{values.itemsize}")
    found = scan_non_finite(bits, patterns)
    assert found is not None
    assert found.nan.tolist() == ([4] if np.isnan(value) else [])
    assert found.inf.tolist() == ([] if np.isnan(value) else [4])
    rest = np.delete(bits, 4)
    assert scan_non_finite(rest, patterns) is None


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz"])
@pytest.mark.parametrize("factor", [0.01, 1.0, 100.0])
def test_a_quick_look_never_misses_one(name: str, factor: float) -> None:
    """Whatever the size of the other values and wherever it lies, what is no number is not taken for one."""
    patterns = bit_patterns(dtype(name))
    assert patterns is not None
    values = np.clip(np.random.default_rng(0).standard_normal(3 * GRANULE + 5) * factor, -200, 200)
    numbers = values.astype(dtype(name).as_numpy()).view(f"u{patterns.nbytes}")
    assert scan_non_finite(numbers, patterns) is None
    worst = [patterns.only] if patterns.only is not None else [patterns.smallest, patterns.smallest | 1]
    signs = [0] if patterns.only is not None else [0, 1 << (8 * patterns.nbytes - 1)]
    for at in (0, GRANULE, len(numbers) - 1):
        for pattern in (each | sign for each in worst for sign in signs):
            bits = numbers.copy()
            bits[at] = pattern
            assert not hold_numbers(bits, granules(bits, patterns), patterns)
            found = scan_non_finite(bits, patterns)
            assert found is not None
            assert [*found.nan.tolist(), *found.inf.tolist()] == [at]


@pytest.mark.parametrize(("values", "expected"), [([1e-3, -1.5], True), ([30.0, -2.0], True), ([1e30, 1.0], False)])
def test_a_quick_look_is_enough_for_most(values: list[float], expected: bool) -> None:
    """Small values and large ones; only of huge ones, whose squares are none, it cannot tell."""
    patterns = bit_patterns(dtype("float32"))
    assert patterns is not None
    bits = np.array(values, dtype="f4").view("u4")
    assert hold_numbers(bits, granules(bits, patterns), patterns) is expected
    assert scan_non_finite(bits, patterns) is None


def test_integers_have_nothing_to_find() -> None:
    """Types that hold only numbers, or bytes, are not scanned."""
    names = ("int64", "uint8", "bool", "float4_e2m1fn_x2", "qint8")
    assert [bit_patterns(dtype(name)) for name in names] == [None] * len(names)
