"""Running a plan gives the bytes that numpy gives, whatever the cut, the buffers and the number of workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.engine.base import EngineOptions, Progress, RunReport
from ckpt_tool.engine.memory import read_boxes
from ckpt_tool.engine.run import run_plan
from ckpt_tool.errors import StorageError, UsageError
from ckpt_tool.formats.base import LayOut, Segment
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Chunk, FileEntry, FileRange, Manifest, TensorMeta
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, FileTable, TensorTable
from ckpt_tool.plan.build import make_plan
from ckpt_tool.storage.local.target import LocalTarget
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.target import open_target
from tests.storage.recording import RecordingStore
from tests.strategies import partitions, shapes
from tests.synthetic import layout_of, limits, make_source, make_target

OPTIONS = EngineOptions(memory_budget_bytes=1 << 20, n_workers=2, durable=False)


def run(plan: Any, layout: LayOut, files: dict[str, bytes], folder: Path, **target_options: Any) -> RunReport:
    """Run a plan into ``folder``; the last event."""
    options = {"overwrite": True, "resume": False, "durable": False, "single_file": False, **target_options}
    target = open_target(str(folder), **options)
    events = list(run_plan(plan, layout, MemoryStore(files), target, OPTIONS))
    assert isinstance(events[-1], RunReport)
    return events[-1]


def content(folder: Path, target: Manifest, fqn: str, dtype: str) -> npt.NDArray[Any]:
    """A tensor read back from raw target files by numpy."""
    row = target.tensors.index[fqn]
    array = np.zeros(target.tensors.shape_of(row), dtype=dtype)
    for chunk_row in target.chunks.rows_of(row).tolist():
        chunk = target.chunks.record(chunk_row, target.tensors, target.files)
        data = (folder / chunk.where.path).read_bytes()[chunk.where.offset : chunk.where.end]
        array[chunk.box.slices] = np.frombuffer(data, dtype=dtype).reshape(chunk.box.sizes)
    return array


@given(st.data(), st.integers(8, 80))
def test_any_cut_to_any_cut(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, tile: int) -> None:
    """Three tensors of different types, cut at random and cut anew, hold the same elements."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    generator = np.random.default_rng(0)
    for fqn, dtype in (("a", "int64"), ("b", "float32"), ("c", "uint8")):
        shape = data.draw(shapes(max_ndim=3))
        arrays[fqn] = generator.integers(0, 100, shape).astype(dtype)
    source = make_source(arrays, {fqn: data.draw(partitions(array.shape)) for fqn, array in arrays.items()})
    target = make_target(source.manifest, {fqn: data.draw(partitions(arrays[fqn].shape)) for fqn in ("c", "a", "b")})
    plan = make_plan(source.manifest, target, limits=limits(tile=tile))
    folder = tmp_path_factory.mktemp("run") / "out"
    run(plan, layout_of(target), source.files, folder)
    for fqn, array in arrays.items():
        assert content(folder, target, fqn, array.dtype.name).tolist() == array.tolist()


def test_seal_gets_the_crc_of_every_chunk(tmp_path: Path) -> None:
    """CRCs joined from pieces equal those of the whole chunks, and what seal returns is written."""
    array = np.arange(60, dtype=np.float32).reshape(10, 6)
    source = make_source({"w": array}, {"w": [Box((0, 0), (5, 6)), Box((5, 0), (5, 6))]})
    target = make_target(source.manifest, {"w": [Box((0, 0), (10, 3)), Box((0, 3), (10, 3))]})
    seen: list[int] = []

    def seal(crc32s: npt.NDArray[np.uint32]) -> list[Segment]:
        seen.extend(crc32s.tolist())
        return [Segment("t0", int(target.chunks.length[0]), b"tail")]

    files = FileTable(
        (FileEntry("t0", int(target.chunks.length[0]) + 4), FileEntry("t1", target.files.entries[1].nbytes))
    )
    layout = LayOut(target.replace(files=files), (), None, needs_crc32=True, seal=seal)
    run(make_plan(source.manifest, layout.manifest, limits=limits()), layout, source.files, tmp_path / "out")
    assert seen == [zlib.crc32(array[:, :3].tobytes()), zlib.crc32(array[:, 3:].tobytes())]
    assert (tmp_path / "out" / "t0").read_bytes().endswith(b"tail")


def test_cast_is_reported(tmp_path: Path) -> None:
    """float32 to bfloat16 rounds to nearest even; the report counts changed values and the largest error."""
    array = np.array([1.0, 1.0 + 2**-20, -2.5, np.nan, np.inf, 3.0 + 2**-7], dtype=np.float32)
    source = make_source({"w": array}, {"w": [Box((0,), (6,))]})
    target = make_target(source.manifest, {"w": [Box((0,), (6,))]}, dtypes={"w": "bf16"})
    report = run(
        make_plan(source.manifest, target, limits=limits(tile=8)), layout_of(target), source.files, tmp_path / "out"
    )
    bits = np.frombuffer((tmp_path / "out" / "t0").read_bytes(), dtype=np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    assert values[[0, 1, 2, 4]].tolist() == [1.0, 1.0, -2.5, np.inf]
    assert np.isnan(values[3])
    assert [(c.fqn, c.source, c.target, c.n_changed) for c in report.casts] == [("w", "float32", "bfloat16", 2)]
    assert report.casts[0].max_abs_error == 2**-7


def strided_manifest(array: npt.NDArray[Any], strides: tuple[int, ...], flags: int, nbytes: int) -> Manifest:
    """One chunk that covers ``array`` with strides in elements and flags."""
    tensors = TensorTable.from_records([TensorMeta("w", _dtype(array), array.shape, "model", ("w",))])
    files = FileTable((FileEntry("f", nbytes),))
    chunk = Chunk("w", Box.whole(array.shape), FileRange("f", 0, nbytes), strides, flags, None)
    return Manifest("synthetic", "", tensors, ChunkTable.from_records([chunk], tensors, files), files)


def _dtype(array: npt.NDArray[Any]) -> Any:
    from ckpt_tool.dtypes import dtype

    return dtype(array.dtype.name)


@given(st.permutations([0, 1, 2]), st.data(), st.integers(8, 400))
def test_strided_storage_reads_as_numpy_would(order: list[int], data: st.DataObject, tile: int) -> None:
    """A tensor saved transposed, and any slice of it, reads as its values, with and without room for a whole span."""
    array = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    stored = np.ascontiguousarray(array.transpose(order))
    strides = tuple(int(stored.strides[order.index(dim)] // 4) for dim in range(3))
    manifest = strided_manifest(array, strides, 0, array.nbytes)
    box = data.draw(st.sampled_from([Box.whole((3, 4, 5)), Box((1, 0, 2), (2, 3, 1)), Box((0, 3, 0), (3, 1, 5))]))
    store = MemoryStore({"f": stored.tobytes()})
    (result,) = read_boxes(manifest, store, [("w", box)], limits=limits(tile=tile, odd=tile * 2))
    assert result.tolist() == array[box.slices].tolist()


def test_expanded_storage() -> None:
    """Stride 0: one stored element stands for a row."""
    array = np.broadcast_to(np.array([[1.5], [2.5]], dtype=np.float32), (2, 3))
    manifest = strided_manifest(array, (1, 0), 0, 8)
    (result,) = read_boxes(
        manifest, MemoryStore({"f": np.array([1.5, 2.5], "<f4").tobytes()}), [("w", Box.whole((2, 3)))], limits=limits()
    )
    assert result.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("flags", "stored", "expected"),
    [
        (ChunkFlag.BIG_ENDIAN, np.array([1.5, -2.0], ">f4"), np.array([1.5, -2.0], "f4")),
        (ChunkFlag.BIG_ENDIAN, np.array([1 + 2j, 3 - 4j], ">c8"), np.array([1 + 2j, 3 - 4j], "c8")),
        (ChunkFlag.CONJUGATE, np.array([1 + 2j, 3 - 4j], "<c16"), np.array([1 - 2j, 3 + 4j], "c16")),
        (ChunkFlag.NEGATE, np.array([1.5, -0.0], "<f8"), np.array([-1.5, 0.0], "f8")),
        (ChunkFlag.NEGATE, np.array([7, -128], "<i1"), np.array([-7, -128], "i1")),
        (ChunkFlag.NEGATE | ChunkFlag.CONJUGATE, np.array([1 + 2j], "<c8"), np.array([-1 + 2j], "c8")),
    ],
)
def test_stored_bits_become_values(flags: int, stored: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Byte order and torch's lazy views are undone on reading, bit for bit."""
    manifest = strided_manifest(expected, (1,), int(flags), stored.nbytes)
    (result,) = read_boxes(
        manifest, MemoryStore({"f": stored.tobytes()}), [("w", Box.whole(expected.shape))], limits=limits()
    )
    assert result.tobytes() == expected.tobytes()


def test_a_thin_slice_reads_about_its_own_bytes() -> None:
    """Two columns of a wide matrix cost their rows' runs, not the matrix."""
    array = np.arange(64 * 65536, dtype=np.float32).reshape(64, 65536)
    source = make_source({"w": array}, {"w": [Box.whole((64, 65536))]}, n_files=1)
    store = RecordingStore(MemoryStore(source.files))
    (result,) = read_boxes(source.manifest, store, [("w", Box((0, 8), (64, 2)))], limits=limits(tile=1 << 20))
    assert result.tolist() == array[:, 8:10].tolist()
    assert sum(call.length for call in store.calls) == 64 * 2 * 4


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Progress never falls and ends at the number of bytes planned."""
    array = np.zeros((100, 3), dtype=np.float32)
    source = make_source({"w": array}, {"w": [Box.whole((100, 3))]})
    target = make_target(source.manifest, {"w": [Box.whole((100, 3))]})
    plan = make_plan(source.manifest, target, limits=limits())
    destination = open_target(str(tmp_path / "out"), overwrite=False, resume=False, durable=False, single_file=False)
    events = list(run_plan(plan, layout_of(target), MemoryStore(source.files), destination, OPTIONS))
    done = [event.done_nbytes for event in events if isinstance(event, Progress)]
    assert done == sorted(done)
    assert done[-1] == array.nbytes


def test_remote_target_is_written_in_order() -> None:
    """A target without seek gets headers, payload and tails in file order, the commit file last."""
    import fsspec

    array = np.arange(24, dtype=np.float32).reshape(6, 4)
    source = make_source({"w": array}, {"w": [Box((0, 0), (3, 4)), Box((3, 0), (3, 4))]})
    plain = make_target(source.manifest, {"w": [Box((0, 0), (6, 2)), Box((0, 2), (6, 2))]})
    chunks = plain.chunks.replace(offset=plain.chunks.offset + 8)
    sizes = [int(plain.chunks.length[i]) + 8 for i in range(2)]
    files = FileTable((FileEntry("t0", sizes[0]), FileEntry("t1", sizes[1]), FileEntry("index", 4)))
    target = plain.replace(chunks=chunks, files=files)
    segments = (Segment("index", 0, b"last"), Segment("t0", 0, b"header00"), Segment("t1", 0, b"head"))
    plan = make_plan(source.manifest, target, limits=limits(tile=8))
    url = "memory://ordered/out"
    destination = open_target(url, overwrite=True, resume=False, durable=True, single_file=False)
    list(run_plan(plan, LayOut(target, segments, "index"), MemoryStore(source.files), destination, OPTIONS))
    files_written = fsspec.filesystem("memory")
    assert files_written.cat("/ordered/out/t0") == b"header00" + array[:, :2].tobytes()
    assert files_written.cat("/ordered/out/t1") == b"head\0\0\0\0" + array[:, 2:].tobytes()
    assert files_written.cat("/ordered/out/index") == b"last"


CHILD = """
import sys, os, signal
import numpy as np
from pathlib import Path
from ckpt_tool.engine import moving
from ckpt_tool.engine import run as engine_run, worker as engine_worker
from ckpt_tool.engine.base import EngineOptions, Progress
from ckpt_tool.geometry.box import Box
from ckpt_tool.plan.build import make_plan
from ckpt_tool.storage.forks import can_fork
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.local.target import LocalTarget
from ckpt_tool.storage.target import open_target
from tests.synthetic import layout_of, limits, make_source, make_target
folder, kill_at, resume, n_workers = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume", int(sys.argv[4])
array = np.arange(4000, dtype=np.float32).reshape(100, 40)
source = make_source({"w": array}, {"w": [Box((0, 0), (50, 40)), Box((50, 0), (50, 40))]})
target = make_target(source.manifest, {"w": [Box((0, 0), (100, 20)), Box((0, 20), (100, 20))]})
plan = make_plan(source.manifest, target, limits=limits(tile=320, unit=960))
moving._JOURNAL_BYTES = 1500
engine_worker._PROGRESS_BYTES = 1
out = open_target(folder, overwrite=False, resume=resume, durable=True, single_file=False)
store = MemoryStore(source.files)
if n_workers > 1:  # the source in files, so that copies of the process share the work
    (data := Path(folder).with_suffix(".source")).mkdir(exist_ok=True)
    for name, content in source.files.items():
        (data / name).write_bytes(content)
    store = LocalStore(str(data))
    assert can_fork()
events = engine_run.run_plan(plan, layout_of(target), store, out, EngineOptions(1 << 20, n_workers))
for number, event in enumerate(events):
    if number == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
print(event.resumed_nbytes)
"""


@pytest.mark.parametrize(("kill_at", "n_workers"), [(0, 1), (1, 1), (9, 1), (23, 1), (40, 1), (1, 2), (23, 2), (40, 2)])
def test_killed_run_resumes_to_the_same_bytes(tmp_path: Path, kill_at: int, n_workers: int) -> None:
    """SIGKILL at several points leaves no target; --resume skips what the journal has and ends with the same bytes."""
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

    def child(folder: Path, kill: int, mode: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", CHILD, str(folder), str(kill), mode, str(n_workers)],
            capture_output=True, text=True, check=False, env={**os.environ, **one_thread},
        )  # fmt: skip

    whole = child(tmp_path / "whole", -1, "new")
    assert whole.returncode == 0, whole.stderr
    killed = child(tmp_path / "out", kill_at, "new")
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    resumed = child(tmp_path / "out", -1, "resume")
    assert resumed.returncode == 0, resumed.stderr
    for name in ("t0", "t1"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["t0", "t1"]
    if kill_at >= 23:
        assert int(resumed.stdout) > 0


def test_resume_refuses_another_plan(tmp_path: Path) -> None:
    """An unfinished target that was begun with another plan is not continued."""
    array = np.arange(12, dtype=np.float32)
    source = make_source({"w": array}, {"w": [Box.whole((12,))]})
    target = make_target(source.manifest, {"w": [Box.whole((12,))]})
    plan = make_plan(source.manifest, target, limits=limits())
    first = LocalTarget(str(tmp_path / "out"), overwrite=False, resume=False, durable=True, single_file=False)
    Path(first.journal_path).write_text(json.dumps({"version": 1, "plan": "0" * 16}) + "\n")
    first.abandon()
    again = open_target(str(tmp_path / "out"), overwrite=False, resume=True, durable=True, single_file=False)
    with pytest.raises(UsageError, match="begun from another source or with other options"):
        list(run_plan(plan, layout_of(target), MemoryStore(source.files), again, OPTIONS))


def test_no_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space is compared with the planned size first."""
    source = make_source({"w": np.zeros(12, np.float32)}, {"w": [Box.whole((12,))]})
    target = make_target(source.manifest, {"w": [Box.whole((12,))]})
    plan = make_plan(source.manifest, target, limits=limits())
    out = open_target(str(tmp_path / "out"), overwrite=False, resume=False, durable=True, single_file=False)
    monkeypatch.setattr(out, "free_bytes", lambda: 10)
    with pytest.raises(StorageError, match="needs 48 B, 10 B are free"):
        list(run_plan(plan, layout_of(target), MemoryStore(source.files), out, OPTIONS))


def test_failure_of_one_worker_reaches_the_caller(tmp_path: Path) -> None:
    """A read that fails in a thread is raised by the iterator, and nothing gets the final name."""
    array = np.arange(4000, dtype=np.float32)
    source = make_source({"w": array}, {"w": [Box.whole((4000,))]})
    target = make_target(source.manifest, {"w": [Box.whole((4000,))]})
    plan = make_plan(source.manifest, target, limits=limits())
    short = {path: data[:1000] for path, data in source.files.items()}
    with pytest.raises(StorageError):
        run(plan, layout_of(target), short, tmp_path / "out")
    assert not (tmp_path / "out").exists()
