"""A digest is the same for every cut of the same bytes, and another for any other bytes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.checksum import crc32_combine
from ckpt_tool.errors import CoverageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.runs import byte_runs, contiguous_strides
from ckpt_tool.manifest.digest import ContentDigest, Part, content_digest, run_part, shifted_crc32s
from tests.strategies import cuts, partitions, shapes

Bytes = npt.NDArray[np.uint8]
TYPES = ("u1", "<u2", "<f4", "<f8", "<c16")


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """Row-major bytes."""
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=np.uint8)


def digest(array: npt.NDArray[Any]) -> ContentDigest:
    """Of an array, in one run."""
    part = run_part(as_bytes(array), 0, array.nbytes, wide=True)
    return content_digest(part, array.dtype.name, array.shape, array.nbytes, wide=True)


def of_boxes(array: npt.NDArray[Any], boxes: Sequence[Box]) -> ContentDigest:
    """Of an array, box by box."""
    total, data = Part(), as_bytes(array)
    for box in boxes:
        runs = byte_runs(box, contiguous_strides(array.shape), array.itemsize * 8)
        for start in runs.starts().tolist() if box.volume else ():
            total += run_part(data[start : start + runs.nbytes], start, array.nbytes, wide=True)
    return content_digest(total, array.dtype.name, array.shape, array.nbytes, wide=True)


def noise(shape: Sequence[int], dtype: str = "<f4", seed: int = 0) -> npt.NDArray[Any]:
    """Random bits as numbers of a type."""
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8).view(dtype).reshape(shape)


@given(st.data(), shapes(max_ndim=4), st.sampled_from(TYPES), st.randoms(use_true_random=False))
def test_no_cut_and_no_order_changes_it(data: st.DataObject, shape: tuple[int, ...], dtype: str, random: Any) -> None:
    """Grids, flat ranges and nested boxes, in any order, give the digest of the whole."""
    array = noise(shape, dtype)
    boxes = data.draw(partitions(shape))
    random.shuffle(boxes)
    assert of_boxes(array, boxes) == digest(array)


@given(st.data(), st.integers(0, 70_000))
def test_no_run_changes_it(data: st.DataObject, n: int) -> None:
    """Runs may begin and end within words and within rows of weights."""
    array = noise((n,), "u1")
    bounds = [0, *data.draw(cuts(n)), n]
    total = Part()
    for first, last in pairwise(bounds):
        total += run_part(array[first:last], first, n, wide=True)
    assert content_digest(total, "uint8", (n,), n, wide=True) == digest(array)


def test_crc32_is_that_of_zlib() -> None:
    """The cheap digest is what any program computes from the tensor's bytes."""
    array = noise((33, 7))
    assert digest(array).crc32 == zlib.crc32(array.tobytes())


def test_values_do_not_change() -> None:
    """Digests that were written stay readable: these values are part of the format."""
    array = np.arange(20_000, dtype="<u2").reshape(100, 200)
    found = digest(array)
    assert (found.crc32, found.wide) == (0xBE994274, 0xDB2688529C3E15A2BBCE1D9854137D5C)


@given(st.lists(st.tuples(st.integers(0, 0xFFFFFFFF), st.integers(0, 1 << 45)), max_size=40))
def test_shifts_in_columns(pairs: list[tuple[int, int]]) -> None:
    """Columns shift as one by one."""
    values, lengths = [v for v, _ in pairs], [n for _, n in pairs]
    expected = [crc32_combine(v, 0, n) for v, n in pairs]
    padded = shifted_crc32s(values * 20, lengths * 20)
    assert padded.tolist() == expected * 20


def test_incomplete() -> None:
    """A sum over less than the tensor is no digest."""
    with pytest.raises(CoverageError, match=r"expected 12, got 8"):
        content_digest(run_part(noise((8,), "u1"), 0, 12, wide=False), "uint8", (12,), 12, wide=False)


def differs(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[bool, bool]:
    """Whether the cheap and the wide sums differ."""
    one, other = digest(a), digest(b)
    return one.crc32 != other.crc32, one.wide != other.wide


@given(st.integers(0, 8 * 24_000 - 1))
def test_single_bits(bit: int) -> None:
    """Each bit counts."""
    array = noise((100, 60))
    data = as_bytes(array).copy()
    data[bit // 8] ^= 1 << (bit % 8)
    assert differs(array, data.view("<f4").reshape(100, 60)) == (True, True)


@given(st.integers(0, 99), st.integers(0, 99))
def test_swapped_rows(i: int, j: int) -> None:
    """Rows have their place."""
    array = noise((100, 60))
    swapped = array.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert differs(array, swapped) == (i != j, i != j)


def test_moved_data() -> None:
    """Shifts by an element, by a row, and by whole rows of weights are seen."""
    array = noise((4 * 4096,))
    assert [differs(array, np.roll(array, by)) for by in (1, 60, 4096, 8192)] == [(True, True)] * 4


def test_swapped_tensors() -> None:
    """Two tensors of one shape have digests of their own."""
    assert differs(noise((8, 8), seed=1), noise((8, 8), seed=2)) == (True, True)


def test_appended_zeros() -> None:
    """Zeros behind, which no sum of products sees, are seen by the shape."""
    array = noise((8, 8))
    longer = np.concatenate([array, np.zeros((1, 8), "<f4")])
    assert digest(array).wide == digest(longer).wide
    assert digest(array) != digest(longer)
    assert not digest(array).matches(digest(longer))
    zeros = np.zeros((4, 4), "<f4")
    assert digest(zeros) != digest(np.zeros((2, 8), "<f4"))
    assert digest(zeros) != digest(zeros.view("<i4"))


def test_wide_is_compared_where_both_have_it() -> None:
    """A digest without the wide sum still matches one with it, by what both have."""
    full = digest(noise((4,)))
    narrow = ContentDigest(full.dtype, full.shape, full.crc32)
    assert narrow.matches(full)
    assert full.matches(narrow)
    assert not full.matches(ContentDigest(full.dtype, full.shape, full.crc32, 1))


def corrupted(array: Bytes, kind: int, rng: np.random.Generator) -> Bytes:
    """A copy that differs: bits, a sign pair, a run of zeros, two words swapped, a run moved, a rectangle of signs."""
    changed = array.copy()
    words = changed.view("<u4")
    at = rng.integers(0, len(words), 4)
    if kind == 0:
        changed[rng.integers(0, len(changed), 3)] ^= rng.integers(1, 256, 3).astype(np.uint8)
    elif kind == 1:
        words[at[:2]] ^= np.uint32(1 << 31)
    elif kind == 2:
        words[at[0] : at[0] + 16] = 0
    elif kind == 3:
        words[at[:2]] = words[at[:2][::-1]]
    elif kind == 4:
        words[:] = np.roll(words, at[0])
    else:  # what products of row and column weights would miss if either repeated
        row, column, step = at[0] % 2, at[1] % 2048, at[2] % 2047 + 1
        for place in (row * 4096 + column, row * 4096 + column + step):
            words[place] ^= np.uint32(1 << 31)
            words[place + 4096] ^= np.uint32(1 << 31)
    return changed


def test_collisions() -> None:
    """Of 20,000 corruptions neither sum misses one."""
    rng = np.random.default_rng(7)
    array = noise((3 * 4096 * 4,), "u1")
    before = run_part(array, 0, len(array), wide=True)
    missed = [0, 0]
    n = 0
    for number in range(20_000):
        changed = corrupted(array, number % 6, rng)
        if np.array_equal(changed, array):
            continue
        n += 1
        after = run_part(changed, 0, len(array), wide=True)
        missed[0] += after.linear == before.linear
        missed[1] += after.lanes == before.lanes
    assert missed == [0, 0]
    assert n > 19_000


def test_lanes_are_unrelated() -> None:
    """Neither lane alone misses a pair of signs, and what one lane says of a change the other does not repeat."""
    array = np.zeros(2 * 4096, dtype="<u4")
    seen: list[set[int]] = [set(), set()]
    for place in range(0, len(array), 8):
        array[place] = 1
        lanes = run_part(array.view(np.uint8), 0, array.nbytes, wide=True).lanes
        array[place] = 0
        for lane in (0, 1):
            seen[lane].add(lanes[lane])
    assert [len(each) for each in seen] == [1024, 1024]
    assert not seen[0] & seen[1]
