"""Values that are no numbers, found in raw bits, against numpy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.checks.bits import bit_patterns, hold_numbers, scan_non_finite, union
from ckpt_tool.dtypes import DTYPES, dtype


def moved(bits: npt.NDArray[Any], shift: int) -> npt.NDArray[Any]:
    """A copy whose elements lie ``shift`` bytes behind multiples of their size."""
    raw = np.empty(bits.nbytes + 8, dtype=np.uint8)[shift : shift + bits.nbytes]
    raw[:] = bits.view(np.uint8)
    return raw.view(bits.dtype)


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
@pytest.mark.parametrize("shift", [0, 1, 2, 7])
def test_a_quick_look_never_misses_one(name: str, factor: float, shift: int) -> None:
    """Whatever the size of the other values and wherever it lies, what is no number is not taken for one."""
    patterns = bit_patterns(dtype(name))
    assert patterns is not None
    values = np.clip(np.random.default_rng(0).standard_normal(3077) * factor, -200, 200)
    numbers = values.astype(dtype(name).as_numpy()).view(f"u{patterns.nbytes}")
    assert scan_non_finite(numbers, patterns) is None
    worst = [patterns.only] if patterns.only is not None else [patterns.smallest, patterns.smallest | 1]
    signs = [0] if patterns.only is not None else [0, 1 << (8 * patterns.nbytes - 1)]
    for at in (0, 1024, len(numbers) - 1):
        for pattern in (each | sign for each in worst for sign in signs):
            bits = moved(numbers, shift)
            bits[at] = pattern
            assert not hold_numbers(bits, patterns)
            found = scan_non_finite(bits, patterns)
            assert found is not None
            assert [*found.nan.tolist(), *found.inf.tolist()] == [at]


@pytest.mark.parametrize(("values", "expected"), [([1e-3, -1.5], True), ([30.0, -2.0], True), ([1e30, 1.0], False)])
def test_a_quick_look_is_enough_for_most(values: list[float], expected: bool) -> None:
    """Small values and large ones; only of huge ones, whose squares are none, it cannot tell."""
    patterns = bit_patterns(dtype("float32"))
    assert patterns is not None
    bits = np.array(values, dtype="f4").view("u4")
    assert hold_numbers(bits, patterns) is expected
    assert scan_non_finite(bits, patterns) is None


def test_integers_have_nothing_to_find() -> None:
    """Types that hold only numbers, or bytes, are not scanned."""
    names = ("int64", "uint8", "bool", "float4_e2m1fn_x2", "qint8")
    assert [bit_patterns(dtype(name)) for name in names] == [None] * len(names)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 9), st.integers(0, 300), st.integers(0, 7))
def test_union_wherever_elements_lie(width: int, seed: int, n: int, shift: int) -> None:
    """The bitwise or is that of the elements, for each element that alone has a bit."""
    bits = np.zeros(n, dtype=f"u{width}")
    chosen = np.random.default_rng(seed).integers(0, max(n, 1), 3)
    if n:
        bits[chosen] = [1, 0x40, 0x81]
        bits[chosen[0]] |= np.array(1 << (8 * width - 2), dtype=bits.dtype)
    assert union(moved(bits, shift)) == int(np.bitwise_or.reduce(bits))
