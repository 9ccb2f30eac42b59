from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.compare.differences import Tally, same_bits, tally, ulp_distances
from ckpt_tool.dtypes import dtype

FLOATS = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


def bits(values: Any, name: str) -> npt.NDArray[Any]:
    """Values of a type as raw numbers of its width."""
    kind = dtype(name)
    return np.array(values).astype(kind.as_numpy()).view(f"u{kind.itemsize}")


@given(st.binary(min_size=64, max_size=64), st.binary(min_size=64, max_size=64), st.sampled_from(sorted(FLOATS)))
def test_measures_are_those_of_a_plain_reference(left: bytes, right: bytes, name: str) -> None:
    """Counts and distances of arbitrary bits are what numpy says element by element."""
    kind = dtype(name)
    a, b = (np.frombuffer(data, dtype=f"u{kind.itemsize}").copy() for data in (left, right))
    a[::3] = b[::3]
    found, first, mask = tally(a, b, kind, kind)
    with np.errstate(invalid="ignore"):  # a NaN that signals
        x, y = (each.view(FLOATS[name]).astype(np.float64) for each in (a, b))
    differs, both_nan = a != b, np.isnan(x) & np.isnan(y)
    finite = differs & np.isfinite(x) & np.isfinite(y)
    assert found.n_compared == len(a)
    assert found.n_differing == np.count_nonzero(differs & ~both_nan)
    assert found.n_nan_payload == np.count_nonzero(differs & both_nan)
    assert found.n_non_finite == np.count_nonzero(differs & ~both_nan & ~finite)
    assert found.is_same == (not differs.any())
    assert mask.tolist() == differs.tolist()
    assert (first.position if first else None) == (int(np.argmax(differs)) if differs.any() else None)
    with np.errstate(over="ignore"):
        apart = np.minimum(np.abs(x[finite] - y[finite]), np.finfo(np.float64).max)
    assert found.max_abs == pytest.approx(apart.max(initial=0), rel=1e-6)
    size = np.maximum(np.abs(x[finite]), np.abs(y[finite]))
    assert found.n_signed_zero == np.count_nonzero(size == 0)
    relative = np.divide(apart, size, out=np.zeros_like(apart), where=size > 0)
    assert found.max_rel == pytest.approx(relative.max(initial=0), rel=1e-6)


@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
@pytest.mark.parametrize("start", [0.0, -0.0, 1.0, -2.5, 6e-8])
def test_ulp_counts_representable_steps(name: str, start: float) -> None:
    """Three times the next number is three steps, across zero too."""
    kind = FLOATS[name]
    value = stepped = np.array([start], dtype=kind)
    for _ in range(3):
        stepped = np.nextafter(stepped, np.array([-9.0], dtype=kind))
    found = ulp_distances(value.view(f"u{value.itemsize}"), stepped.view(f"u{value.itemsize}"), dtype(name))
    assert found is not None
    assert found.tolist() == [3]


def test_ulp_of_bfloat16_and_float8() -> None:
    """Types that numpy lacks are counted by their bits."""
    assert tally(bits([1.0], "bfloat16"), bits([1.0078125], "bfloat16"), *[dtype("bf16")] * 2)[0].max_ulp == 1
    kind = dtype("float8_e4m3fn")
    assert tally(bits([1.0, -1.0], kind.name), bits([1.25, -1.125], kind.name), kind, kind)[0].max_ulp == 2
    unsigned = dtype("float8_e8m0fnu")
    assert tally(np.array([3], "u1"), np.array([200], "u1"), unsigned, unsigned)[0].max_ulp == 197


def test_nan_equals_nan_by_bits() -> None:
    """NaN of one payload is the same; of two it is counted apart and measured by nothing."""
    kind = dtype("float32")
    a = np.array([0x7FC00000, 0x7FC00000, 0x3F800000], dtype="u4")
    assert tally(a, a.copy(), kind, kind)[0].is_same
    b = np.array([0x7FC00000, 0x7FC00001, 0x3F800000], dtype="u4")
    found, first, _ = tally(a, b, kind, kind)
    assert (found.n_differing, found.n_nan_payload, found.max_abs, found.max_ulp) == (0, 1, 0.0, 0)
    assert not found.is_same
    assert first is not None
    assert (first.position, first.a, first.b) == (1, "nan", "nan")


def test_infinities_are_differences_without_distance() -> None:
    """A number against NaN or infinity differs, and measures are those of the others."""
    kind = dtype("float32")
    found, first, _ = tally(bits([1.0, np.inf, 2.0], "fp32"), bits([np.nan, 1.0, 2.5], "fp32"), kind, kind)
    assert (found.n_differing, found.n_non_finite, found.max_abs) == (3, 2, 0.5)
    assert first is not None
    assert (first.a, first.b) == ("1.0", "nan")


@pytest.mark.parametrize(
    ("name", "a", "b", "distance"),
    [
        ("int8", -128, 127, 255),
        ("uint8", 3, 250, 247),
        ("int64", -(2**63), 2**63 - 1, 2**64 - 1),
        ("uint64", 0, 2**64 - 1, 2**64 - 1),
        ("bool", 0, 1, 1),
    ],
)
def test_integers_are_exact(name: str, a: int, b: int, distance: int) -> None:
    """The distance of integers does not wrap around."""
    kind = dtype(name)
    one, other = (np.array([value], dtype=kind.as_numpy()).view(f"u{kind.itemsize}") for value in (a, b))
    found = tally(one, other, kind, kind)[0]
    assert (found.n_differing, found.max_abs, found.max_ulp) == (1, float(distance), None)


def test_complex_numbers() -> None:
    """Complex elements differ by either part; the distance is that of the plane."""
    for name, width in (("complex64", np.complex64), ("complex128", np.complex128)):
        kind = dtype(name)
        a, b = np.array([1 + 1j, 2, 3], width), np.array([1 + 1j, 2 + 3j, 7], width)
        raw = "u8" if name == "complex64" else "c16"
        found, first, _ = tally(a.view(raw), b.view(raw), kind, kind)
        assert (found.n_differing, found.max_abs) == (2, 4.0)
        assert first is not None
        assert first.position == 1


def test_types_that_are_only_bytes() -> None:
    """Packed and quantized elements are counted, shown as bytes, and not measured."""
    kind = dtype("float4_e2m1fn_x2")
    found, first, _ = tally(np.array([1, 2], "u1"), np.array([1, 0x2A], "u1"), kind, kind)
    assert (found.n_differing, found.max_abs, found.max_rel, found.max_ulp) == (1, None, None, None)
    assert first is not None
    assert (first.a, first.b) == ("0x02", "0x2a")


def test_types_that_have_no_common_values() -> None:
    """Packed elements against numbers differ all, and no cast explains it."""
    found = tally(np.array([1, 2], "u1"), bits([1.0, 2.0], "fp32"), dtype("float4_e2m1fn_x2"), dtype("fp32"))[0]
    assert (found.n_differing, found.n_uncast, found.max_abs) == (2, 2, None)


@pytest.mark.parametrize(("wide", "narrow"), [("fp32", "bf16"), ("fp32", "fp16"), ("fp64", "fp32"), ("bf16", "fp8")])
def test_rounding_is_recognised(wide: str, narrow: str) -> None:
    """A tensor and its cast differ by value and by nothing that rounding does not explain, in both directions."""
    values = np.random.default_rng(0).standard_normal(100)
    a = bits(values, wide)
    with np.errstate(over="ignore"):
        rounded = a.view(dtype(wide).as_numpy()).astype(dtype(narrow).as_numpy())
    b = rounded.view(f"u{dtype(narrow).itemsize}")
    for found in (tally(a, b, dtype(wide), dtype(narrow))[0], tally(b, a, dtype(narrow), dtype(wide))[0]):
        assert found.n_differing > 50
        assert (found.n_uncast, found.max_ulp) == (0, None)
    b[7] ^= 1
    assert tally(a, b, dtype(wide), dtype(narrow))[0].n_uncast == 1


def test_exact_widening_is_equal() -> None:
    """Values that both types hold do not differ, NaN and zeros of either sign included."""
    values = [1.5, -2.0, 0.0, np.nan, np.inf]
    found = tally(bits(values, "fp32"), bits(values, "bf16"), dtype("fp32"), dtype("bf16"))[0]
    assert (found.n_differing, found.n_uncast) == (0, 0)
    assert tally(bits([1, 2], "int64"), bits([1, 2], "int32"), dtype("int64"), dtype("int32"))[0].n_differing == 0
    found = tally(bits([-1], "int64"), bits([2**64 - 1], "uint64"), dtype("int64"), dtype("uint64"))[0]
    assert found.n_differing == 1
    far = 2**53 + 1  # no float64
    found = tally(bits([far], "int64"), bits([far - 1], "uint64"), dtype("int64"), dtype("uint64"))[0]
    assert found.n_differing == 1


def test_tallies_add_up() -> None:
    """The tally of parts is that of the whole."""
    generator = np.random.default_rng(1)
    a, b = (generator.standard_normal(20_000).astype(np.float32).view("u4") for _ in range(2))
    b[:5000] = a[:5000]
    kind = dtype("float32")
    total = Tally()
    for low, high in ((0, 7), (7, 12_000), (12_000, 20_000)):
        total.add(tally(a[low:high], b[low:high], kind, kind)[0])
    whole, first, _ = tally(a, b, kind, kind)
    assert total == whole
    assert first is not None
    assert first.position == 5000


@given(st.binary(max_size=40), st.integers(0, 39))
def test_same_bits(data: bytes, at: int) -> None:
    """Equal bytes are the same, and any other byte is seen, whatever the length."""
    a = np.frombuffer(data, dtype="u1")
    assert same_bits(a, a.copy())
    if at < len(a):
        b = a.copy()
        b[at] ^= 1
        assert not same_bits(a, b)
