from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.trust.diff import diff
from ckpt_tool.compare.report import STATUSES, DiffReport, Measures, TensorDiff
from ckpt_tool.compare.tiles import common_box
from ckpt_tool.errors import CoverageError, StorageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.storage.memory import MemoryStore
from tests.checks.synthetic import FakeReader, checkpoint_of, chunk, make, stored, tensor
from tests.storage.recording import RecordingStore
from tests.strategies import partitions, shapes
from tests.synthetic import make_source

Arrays = Mapping[str, npt.NDArray[Any]]


def opened(arrays: Arrays, n_files: int = 1, dtypes: Mapping[str, str] | None = None) -> Checkpoint:
    """A checkpoint of arrays, each cut into one chunk for each file."""
    manifest, files = stored(arrays, n_files, dtypes)
    return checkpoint_of(manifest, files)


def compared(a: Arrays, b: Arrays, **options: Any) -> DiffReport:
    """The diff of arrays in one file with the others in three."""
    return diff(opened(a), opened(b, 3), **options)


def row(report: DiffReport, fqn: str) -> TensorDiff:
    """What the report says of one tensor."""
    return next(each for each in report.tensors if each.fqn == fqn)


def measures(report: DiffReport, fqn: str) -> Measures:
    """The measures of one tensor."""
    found = row(report, fqn).measures
    assert found is not None
    return found


def random(*shape: int, seed: int = 0, dtype: str = "float32") -> npt.NDArray[Any]:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_every_status() -> None:
    """Each pair has the status that it should, worst first; the whole is not the same."""
    common = random(6, 4)
    a = {"same": common, "gone": common, "size": random(6, 4), "type": common, "moved": common}
    b = {"same": common, "new": common, "size": random(6, 5), "type": common.astype("f8"), "moved": common + 1}
    report = compared(a, b)
    assert {each.fqn: each.status for each in report.tensors} == {
        "gone": "only-a", "new": "only-b", "size": "shape", "type": "dtype", "moved": "differs", "same": "same",
    }  # fmt: skip
    assert [each.status for each in report.tensors] == list(STATUSES)
    assert report.counts == dict.fromkeys(STATUSES, 1)
    assert not report.is_same


def test_nothing_differs() -> None:
    """Equal arrays in other files, of every kind and no elements too, are the same."""
    arrays = {
        "w": random(17, 5), "scalar": np.array(3.5, "f4"), "empty": np.zeros((0, 4), "f4"), "i": np.arange(7),
        "flag": np.array([True, False]), "c": random(6).view("c8"), "z": random(4, dtype="f8").view("c16"),
    }  # fmt: skip
    report = compared(arrays, arrays)
    assert report.is_same
    assert report.counts["same"] == len(arrays)


def test_measures_and_place() -> None:
    """Count, distances, the first global index with both values, and the box around all differences."""
    a = random(40, 30)
    b = a.copy()
    b[11, 7] += 0.5
    b[31, 2] = -b[31, 2]
    found = measures(compared({"w": a}, {"w": b}), "w")
    assert (found.n_compared, found.n_differing) == (1200, 2)
    assert found.max_abs == max(abs(float(a[11, 7]) - float(b[11, 7])), 2 * abs(float(a[31, 2])))
    assert found.max_rel == pytest.approx(2.0)
    assert found.first_index == (11, 7)
    assert (found.first_a, found.first_b) == (str(a[11, 7]), str(b[11, 7]))
    assert found.bounds == ((11, 32), (2, 8))


def test_zero_dimensions_that_differ() -> None:
    """A scalar has the empty index."""
    found = measures(compared({"s": np.array(1.0)}, {"s": np.array(2.0)}), "s")
    assert (found.first_index, found.first_a, found.first_b, found.bounds) == ((), "1.0", "2.0", ())


@settings(max_examples=60)
@given(st.data())
def test_any_two_cuts_of_one_tensor(data: st.DataObject) -> None:
    """Whatever boxes either side is stored as, what differs is found at its global index and nothing else is."""
    shape = data.draw(shapes().filter(lambda s: 0 < int(np.prod(s)) < 300))
    a = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    b = a.copy()
    at = data.draw(st.none() | st.tuples(*(st.integers(0, size - 1) for size in shape)))
    if at is not None:
        b[at] = -1
    sides = []
    for array in (a, b):
        made = make_source({"w": array}, {"w": data.draw(partitions(shape))})
        sides.append(checkpoint_of(made.manifest, made.files, FakeReader(made.manifest)))
    report = diff(*sides, memory_budget_bytes=1 << 18, n_workers=1)
    assert report.is_same == (at is None)
    if at is not None:
        found = measures(report, "w")
        assert (found.n_differing, found.first_index, found.first_b) == (1, at, "-1")


@pytest.mark.parametrize("n_workers", [1, 3])
def test_pairs_larger_than_memory(n_workers: int) -> None:
    """Tensors far larger than the budget pass in small reads, each byte of each side once."""
    a = random(2000, 300)
    b = a.copy()
    b[1999, 299] = 7
    sides = []
    for array, n_files in ((a, 1), (b, 5)):
        manifest, files = stored({"w": array}, n_files)
        store = RecordingStore(MemoryStore(files))
        sides.append((checkpoint_of(manifest, files, store=store), store))
    budget = 1 << 18
    report = diff(sides[0][0], sides[1][0], memory_budget_bytes=budget, n_workers=n_workers, reasons=False)
    assert measures(report, "w").first_index == (1999, 299)
    for _, store in sides:
        assert store.nbytes == a.nbytes
        assert max(call.length for call in store.calls) * n_workers * 2 <= budget
    assert report.compared_nbytes == 2 * a.nbytes


def test_columns_against_rows() -> None:
    """A side that is cut by columns is read once too, in whole rows of its boxes."""
    a = random(64, 48)
    by_columns = make_source({"w": a}, {"w": [Box((0, 0), (64, 16)), Box((0, 16), (64, 32))]})
    store = RecordingStore(MemoryStore(by_columns.files))
    other = checkpoint_of(by_columns.manifest, by_columns.files, FakeReader(by_columns.manifest), store)
    assert diff(opened({"w": a}), other).is_same
    assert [call.length for call in store.calls] == [64 * 16 * 4, 64 * 32 * 4]


def test_quick_reads_nothing() -> None:
    """Names, shapes and types are compared without a request; values may differ."""
    manifest, files = stored({"w": random(4, 4), "x": random(3)})
    store = RecordingStore(MemoryStore(files))
    side = checkpoint_of(manifest, files, store=store)
    report = diff(side, opened({"w": random(4, 4, seed=1), "x": random(5)}), quick=True)
    assert store.calls == ()
    assert (report.is_quick, report.counts["same"], report.counts["shape"]) == (True, 1, 1)
    assert (row(report, "x").shape_a, row(report, "x").shape_b) == ((3,), (5,))


def test_nan_and_infinities() -> None:
    """NaN of equal bits are equal; other payloads are counted apart; a NaN against a number is a difference."""
    a = np.array([np.nan, np.nan, 1.0, np.nan, np.inf], dtype="f4")
    b = a.copy()
    assert compared({"w": a}, {"w": b}).is_same
    b.view("u4")[1] ^= 1
    report = compared({"w": a}, {"w": b})
    assert row(report, "w").status == "differs"
    assert (measures(report, "w").n_differing, measures(report, "w").n_nan_payload) == (0, 1)
    b[2] = np.nan
    found = measures(compared({"w": a}, {"w": b}), "w")
    assert (found.n_differing, found.n_non_finite, found.first_index, found.first_a) == (1, 1, (1,), "nan")


def test_incomplete_tensors_are_refused() -> None:
    """A hole in a side is an error that names the tensor, never a silent equality."""
    manifest, files = stored({"w": random(6, 2)}, 3)
    holed = manifest.replace(chunks=manifest.chunks.take([0, 2]))
    with pytest.raises(CoverageError, match="w: no stored data for"):
        diff(checkpoint_of(holed, files), opened({"w": random(6, 2)}))


def test_errors_of_storage_come_through() -> None:
    """A file that is shorter than the manifest says ends the diff."""
    manifest, files = stored({"w": random(6, 2)})
    short = {path: data[:-4] for path, data in files.items()}
    with pytest.raises(StorageError):
        diff(checkpoint_of(manifest, short), opened({"w": random(6, 2)}), n_workers=2)


def test_progress_ends_at_all_bytes() -> None:
    """The last event says that all bytes of both sides are done."""
    seen: list[tuple[int, int]] = []
    a = random(900, 300)
    compared(
        {"w": a}, {"w": a}, memory_budget_bytes=1 << 18, progress=lambda p: seen.append((p.done_nbytes, p.total_nbytes))
    )
    assert seen[-1] == (2 * a.nbytes, 2 * a.nbytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) > 10


@pytest.mark.parametrize("budget", [1 << 20, 1 << 15])
def test_odd_storage(budget: int) -> None:
    """A side that is stored transposed, or with its bytes reversed, is the same, cut or whole."""
    a = random(30, 50)
    where = FileRange("f", 0, a.nbytes)
    box = Box((0, 0), a.shape)
    transposed = make([tensor("w", a.shape)], [chunk("w", box, where, strides=(1, 30))])
    reversed_bytes = make([tensor("w", a.shape)], [chunk("w", box, where, flags=ChunkFlag.BIG_ENDIAN)])
    for manifest, data in ((transposed, a.T.tobytes()), (reversed_bytes, a.byteswap().tobytes())):
        side = checkpoint_of(manifest, {"f": data})
        assert diff(side, opened({"w": a}, 3), memory_budget_bytes=budget, n_workers=1).is_same
        changed = a.copy()
        changed[29, 3] = 0
        report = diff(side, opened({"w": changed}, 3), memory_budget_bytes=budget, n_workers=1)
        assert measures(report, "w").first_index == (29, 3)


def test_elements_narrower_than_a_byte() -> None:
    """Packed six-bit elements are compared as bytes with their own type, by type alone with another."""
    kind = {"w": "float6_e2m3fn"}
    manifests = []
    for data in (b"abcdef", b"abcdeX"):
        manifest = stored({"w": np.zeros(8, "u1")}, dtypes=kind)[0]
        length = np.full(1, 6, dtype=np.int64)
        manifests.append((manifest.replace(chunks=manifest.chunks.replace(length=length)), {"part_0.bin": data}))
    sides = [checkpoint_of(*each) for each in manifests]
    assert diff(sides[0], sides[0]).is_same
    report = diff(*sides)
    assert (row(report, "w").status, measures(report, "w").n_differing) == ("differs", 1)
    assert row(diff(sides[0], opened({"w": np.zeros(8, "f4")})), "w").status == "dtype"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((4, 3), (4, 3), "[0:4, 0:3]"),
        ((4, 3), (4, 9), "[0:4, 0:3]"),
        ((), (), "[]"),
        ((4, 3), (5, 4), None),
        ((4,), (4, 1), None),
    ],
)
def test_common_box(a: Sequence[int], b: Sequence[int], expected: str | None) -> None:
    """Elements of equal index correspond where at most one dimension differs."""
    box = common_box(tuple(a), tuple(b))
    assert (None if box is None else str(box)) == expected
