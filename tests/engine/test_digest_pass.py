"""A digest pass gives the CRC-32 of numpy's bytes for any cut, reads each byte once, and is not stopped by damage."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.engine import digest_pass
from ckpt_tool.engine.digest_pass import DigestPass, digest_tensors
from ckpt_tool.errors import CoverageError, StorageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Store
from ckpt_tool.storage.summing import SummingStore
from tests.storage.recording import RecordingStore
from tests.strategies import partitions, shapes
from tests.synthetic import Synthetic, limits, make_source


def taken(source: Synthetic, store: Store, *, n_workers: int = 1, wide: bool = False, tile: int = 64) -> DigestPass:
    """A pass over all tensors, with small tiles."""
    rows = range(len(source.manifest.tensors))
    summing = store if isinstance(store, SummingStore) else None
    return digest_tensors(
        source.manifest, rows, store, limits=limits(tile), wide=wide, n_workers=n_workers, summing=summing
    )


@given(st.data(), shapes(max_ndim=4), st.integers(1, 200), st.integers(1, 3))
def test_any_cut(data: st.DataObject, shape: tuple[int, ...], tile: int, n_workers: int) -> None:
    """Boxes, tiles and workers change nothing; what a store has summed is taken from it."""
    array = np.random.default_rng(1).integers(0, 1 << 16, shape).astype("<u2")
    source = make_source({"w": array, "b": np.arange(9)}, {"w": data.draw(partitions(shape)), "b": [Box((0,), (9,))]})
    plain = taken(source, MemoryStore(source.files), n_workers=n_workers, wide=True, tile=tile)
    summed = taken(source, SummingStore(MemoryStore(source.files)), n_workers=n_workers, wide=True, tile=tile)
    assert plain.digests == summed.digests
    expected = {row: zlib.crc32(source.arrays[fqn].tobytes()) for row, fqn in enumerate(source.manifest.tensors.fqns)}
    assert {row: digest.crc32 for row, digest in plain.digests.items()} == expected


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_copies_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide: bool) -> None:
    """Copies that map the files find what threads find that read them, tensors and files, and what cannot be read."""
    monkeypatch.setattr(digest_pass, "_LEAST_MAPPED_BYTES", 300)
    arrays = {name: np.random.default_rng(2).integers(0, 1 << 16, (40, 30)).astype("<u2") for name in "abc"}
    rows = [Box((0, 0), (25, 30)), Box((25, 0), (15, 30))]
    columns = [Box((0, 0), (40, 7)), Box((0, 7), (40, 23))]
    source = make_source(arrays, {"a": rows, "b": columns, "c": rows})
    for path, data in source.files.items():
        (tmp_path / path).write_bytes(data)
    paths = sorted(source.files)
    sums = []
    for in_copies in (False, True):
        monkeypatch.setattr(digest_pass, "can_share", lambda *_, answer=in_copies: answer)
        store = SummingStore(LocalStore(str(tmp_path)))
        found = taken(source, store, n_workers=2, wide=wide, tile=1000)
        sums.append((found, [store.file_crc32(path, len(source.files[path])) for path in paths]))
    assert sums[0] == sums[1]
    assert sums[0][1] == [zlib.crc32(source.files[path]) for path in paths]
    assert {digest.crc32 for digest in sums[0][0].digests.values()} == {
        zlib.crc32(array.tobytes()) for array in arrays.values()
    }
    os.truncate(tmp_path / paths[0], 100)
    damaged = taken(source, LocalStore(str(tmp_path)), n_workers=2, wide=wide, tile=1000)
    assert damaged.unread
    assert {type(error) for error in damaged.unread.values()} == {StorageError}


def test_each_byte_once() -> None:
    """As many bytes are read as the tensors have, and progress ends with all of them."""
    halves = [Box((0, 0), (20, 4)), Box((0, 4), (20, 4))]
    source = make_source({"w": np.arange(160, dtype="f4").reshape(20, 8)}, {"w": halves})
    store = RecordingStore(MemoryStore(source.files))
    seen: list[tuple[int, int]] = []
    digest_tensors(
        source.manifest, [0], store, limits=limits(64), wide=False, n_workers=1,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert store.nbytes == 640
    assert seen[-1] == (640, 640)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_damage_stops_nothing_else(n_workers: int) -> None:
    """A tensor with a hole, and one whose file is cut, have no digest and a reason; the others have theirs."""
    arrays = {name: np.arange(64, dtype="i4") for name in ("a", "hole", "cut", "z")}
    whole, half = [Box((0,), (64,))], [Box((0,), (32,))]
    source = make_source(arrays, {"a": whole, "hole": half, "z": whole, "cut": whole}, n_files=1)
    files = {path: data[:-100] for path, data in source.files.items()}
    found = taken(source, MemoryStore(files), n_workers=n_workers)
    index = source.manifest.tensors.index
    assert {row: type(error) for row, error in found.unread.items()} == {
        index["hole"]: CoverageError,
        index["cut"]: StorageError,
    }
    assert {row: digest.crc32 for row, digest in found.digests.items()} == dict.fromkeys(
        (index["a"], index["z"]), zlib.crc32(arrays["a"].tobytes())
    )


def test_nothing() -> None:
    """Tensors without elements have a digest, and no tensors none."""
    source = make_source({"e": np.zeros((0, 3), "f4")}, {"e": [Box((0, 0), (0, 3))]})
    assert taken(source, MemoryStore(source.files)).digests[0].crc32 == 0
    assert digest_tensors(source.manifest, [], MemoryStore({}), limits=limits(), wide=False, n_workers=1).digests == {}
