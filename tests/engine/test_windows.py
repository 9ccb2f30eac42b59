"""What is written from mapped files is what is written from files that are read, and a file that shrinks is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.engine import tile_reader, windows
from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.engine.pool import UnitWorker, run_units
from ckpt_tool.engine.tile_digests import TileDigests
from ckpt_tool.engine.tile_reader import TileReader
from ckpt_tool.engine.worker import Worker
from ckpt_tool.errors import StorageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.model import Plan
from ckpt_tool.storage.forks import CopyKilled
from ckpt_tool.storage.local import LocalStore
from ckpt_tool.storage.target import LocalTarget, open_target
from tests.strategies import partitions, shapes
from tests.synthetic import limits, make_source, make_target

# The process of the tests has threads of numpy's, which hold nothing that is used here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


class Noted:
    """A sink that keeps what it was given."""

    def __init__(self) -> None:
        self.written: dict[tuple[str, int], int] = {}

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Take each byte once."""
        for place, byte in enumerate(data.tobytes(), start=offset):
            assert self.written.setdefault((path, place), byte) is byte


class Counting(LocalStore):
    """Counts requests."""

    n_reads = 0

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """As any local store."""
        self.n_reads += 1
        super().read_into(path, offset, buffer)


def moved(plan: Plan, folder: Path, *, mapped_bytes: int, crc32: bool) -> tuple[Any, list[UnitRecord], int]:
    """Bytes by place, the records of all units, and the number of reads."""
    store, sink = Counting(str(folder)), Noted()
    reader = TileReader(
        plan.source, plan.tiles, plan.reads, store, ahead_bytes=0, n_workers=1, mapped_bytes=mapped_bytes
    )
    worker = Worker(plan, reader, sink, with_crc32=crc32, digests=TileDigests(plan, None))
    records = [worker.run_unit(unit, lambda _: None) for unit in range(plan.tiles.n_units)]
    store.close()
    return sink.written, records, store.n_reads


def check(cuts: Sequence[Sequence[Box]], shape: tuple[int, ...], tile: int, folder: Path, *, least: int) -> None:
    """Move two tensors, of which one is cast, from the first of ``cuts`` to the second, with and without windows."""
    generator = np.random.default_rng(0)
    arrays = {name: generator.standard_normal(shape).astype("f4") for name in ("a", "b")}
    source = make_source(arrays, dict.fromkeys(arrays, cuts[0]))
    target = make_target(source.manifest, dict.fromkeys(arrays, cuts[1]), dtypes={"b": "bf16"})
    plan = make_plan(source.manifest, target, limits=limits(tile))
    for path, content in source.files.items():
        (folder / path).write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_LEAST_MAPPED_BYTES", least)
        patch.setattr(tile_reader, "_LEAST_SLAB_BYTES", least)
        for crc32 in (False, True):
            read = moved(plan, folder, mapped_bytes=0, crc32=crc32)
            mapped = moved(plan, folder, mapped_bytes=200, crc32=crc32)
            assert mapped[:2] == read[:2]
            assert mapped[2] == 0 or least > 1


@settings(max_examples=20)
@given(st.data(), st.integers(8, 300), st.sampled_from([1, 24]))
def test_any_cut(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, tile: int, least: int) -> None:
    """Bytes, checksums, digests and effects of casts are those of files that are read."""
    shape = data.draw(shapes(max_ndim=3))
    cuts = [data.draw(partitions(shape)) for _ in range(2)]
    check(cuts, shape, tile, tmp_path_factory.mktemp("source"), least=least)


@pytest.mark.parametrize("tile", [24, 40, 72, 200])
def test_rows_to_columns(tmp_path: Path, tile: int) -> None:
    """Tiles that lie in one file, and in several, of which pieces are packed."""
    rows = [Box((first, 0), (n, 6)) for first, n in ((0, 1), (1, 5), (6, 2))]
    check([rows, [Box((0, 0), (8, 2)), Box((0, 2), (8, 4))]], (8, 6), tile, tmp_path, least=1)


class FakeWorker:
    """Does nothing, but for what befalls a copy at its third unit."""

    def __init__(self, mishap: Callable[[], None]) -> None:
        self._mishap = mishap

    def ahead(self, units: Sequence[int]) -> AbstractContextManager[None]:
        """Nothing to fetch."""
        return nullcontext()

    def run_unit(self, unit: int, progress: Callable[[int], None]) -> UnitRecord:
        """Say where it was done, in place of a checksum."""
        if unit == 3:
            self._mishap()
        return UnitRecord(unit, ((0, os.getpid()),), (), ())


def test_units_of_a_copy_that_a_file_has_ended_are_done_here() -> None:
    """Each once; a copy that anything else has ended is an error."""

    def make_worker(number: int) -> Callable[[bool], UnitWorker]:
        return lambda is_copy: FakeWorker(lambda: os.kill(os.getpid(), number) if is_copy else None)

    records = list(run_units(range(9), make_worker(signal.SIGBUS), n_workers=2, in_processes=True))
    done = {record.unit: record.crc32[0][1] for record in records if isinstance(record, UnitRecord)}
    assert sorted(done) == sorted(record.unit for record in records if isinstance(record, UnitRecord))
    assert sorted(done) == list(range(9))
    assert done[3] == os.getpid()
    with pytest.raises(CopyKilled, match="killed by SIGKILL"):
        list(run_units(range(9), make_worker(signal.SIGKILL), n_workers=2, in_processes=True))


class Shrinking:
    """A sink before whose second write the source is cut."""

    def __init__(self, target: LocalTarget, source: Path) -> None:
        self._target, self._source = target, source
        self._n_writes = 0

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """As the target does."""
        self._n_writes += 1
        if self._n_writes == 2:
            os.truncate(self._source, 4096)
        self._target.write(path, offset, data)


def test_a_file_that_shrinks_after_it_was_mapped_is_named(tmp_path: Path) -> None:
    """The system refuses to write what is not there any more, and that is not the target's fault."""
    array = np.arange(1 << 20, dtype="u1").reshape(4, 1 << 18)
    source = make_source({"w": array}, {"w": [Box.whole(array.shape)]}, n_files=1)
    (tmp_path / "source").mkdir()
    (tmp_path / "source/f0").write_bytes(source.files["f0"])
    manifest = make_target(source.manifest, {"w": [Box.whole(array.shape)]}, n_files=1)
    plan = make_plan(source.manifest, manifest, limits=limits(tile=1 << 18, unit=1 << 19))
    target = open_target(str(tmp_path / "out"), overwrite=False, resume=False, durable=False, single_file=False)
    assert isinstance(target, LocalTarget)
    target.create("t0", array.nbytes)

    def make_worker(is_copy: bool) -> UnitWorker:
        store = LocalStore(str(tmp_path / "source"))
        mapped_bytes = (1 << 19) * is_copy
        reader = TileReader(
            plan.source, plan.tiles, plan.reads, store, ahead_bytes=0, n_workers=1, mapped_bytes=mapped_bytes
        )
        return Worker(plan, reader, Shrinking(target, tmp_path / "source/f0"), with_crc32=False)

    with pytest.raises(StorageError, match=r"source/f0:\d+: expected [\d,]+ bytes, got .* before the end of the file"):
        list(run_units(range(plan.tiles.n_units), make_worker, n_workers=2, in_processes=True))
    target.abandon(discard=True)
