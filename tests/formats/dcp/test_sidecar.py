"""A sidecar says what ``.metadata`` says, spares the heads of items, and is believed only while it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tool.checks.strays import stray_findings
from ckpt_tool.formats.base import Source, WriteRequest, WriterOptions
from ckpt_tool.formats.dcp import sidecar as module
from ckpt_tool.formats.dcp.reader import READER
from ckpt_tool.formats.dcp.sidecar import SIDECAR_NAME
from ckpt_tool.formats.dcp.writer import WRITER
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.dcp.written import boxes_of, numbers, table, write
from tests.storage.recording import RecordingStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

N_ROWS = 64
Files = dict[str, bytes]


def request(n_rows: int = N_ROWS, *, sidecar: bool | None = True) -> WriteRequest:
    """Tensors of several dimensions, one without elements, one with a box for each row, and an object."""
    tensors = table(**{"model.scalar": (), "model.none": (0, 4), "model.w": (n_rows, 3), "model.v": (5,)})
    tensors = replace(tensors, paths=tuple(tuple(fqn.split(".")) for fqn in tensors.fqns))
    rows: list[tuple[int, Sequence[int], Sequence[int], int]] = [
        (2, (row, 0), (1, 3), row % 3) for row in range(n_rows)
    ]
    rows += [(0, (), (), 0), (3, (0,), (2,), 1), (3, (2,), (3,), 2)]
    blobs = (Blob("optimizer.lr", "value", None, value=0.5, path=("optimizer", "lr"), is_loaded=True),)
    return WriteRequest(tensors, boxes_of(tensors, rows), 3, blobs=blobs, options=WriterOptions(sidecar=sidecar))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """A checkpoint with a sidecar, small as it is."""
    monkeypatch.setattr(module, "_MIN_METADATA_NBYTES", 0)
    wanted = request()
    write(WRITER.lay_out(wanted), numbers(wanted.tensors), tmp_path)
    return {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def opened(files: Files) -> tuple[RecordingStore, Source]:
    """A source that counts its reads."""
    store = RecordingStore(MemoryStore(files))
    return store, Source(store, store.listing())


def same(one: Manifest, other: Manifest) -> bool:
    """Whether two manifests say the same, row by row."""
    columns = ("tensor", "offsets", "sizes", "file", "offset", "length", "rank", "flags")
    return (
        all(np.array_equal(getattr(one.chunks, name), getattr(other.chunks, name)) for name in columns)
        and list(one.tensors) == list(other.tensors)
        and list(one.files) == list(other.files)
        and (one.blobs, one.info, one.notes) == (other.blobs, other.info, other.notes)
    )


def test_it_says_what_the_metadata_says(files: Files) -> None:
    """Manifest and places are those of the long way, with no read of any item."""
    without = {name: data for name, data in files.items() if name != SIDECAR_NAME}
    (_, plain), (store, quick) = opened(without), opened(files)
    expected, found = READER.read(plain), READER.read(quick)
    assert same(expected, found)
    rows = np.arange(len(found.chunks))
    exact = expected.replace(chunks=READER.resolve(plain, expected, rows))
    assert same(exact, found.replace(chunks=READER.resolve(quick, found, rows)))
    assert {call.path for call in store.calls} == {".metadata", SIDECAR_NAME}
    half = READER.resolve(quick, found, rows[::2])
    assert (half.flags[1::2] == found.chunks.flags[1::2]).all()
    assert (half.offset[::2] == exact.chunks.offset[::2]).all()


def _other_metadata(files: Files) -> None:
    other = request(N_ROWS - 1)
    layout = WRITER.lay_out(other)
    files[".metadata"] = next(part.data for part in layout.segments if part.path == ".metadata")


def _same_length(files: Files) -> None:
    data = bytearray(files[".metadata"])
    data[-60] ^= 1  # in the identifier of the save
    files[".metadata"] = bytes(data)


def _longer_file(files: Files) -> None:
    files["__1_0.distcp"] += b"x"


def _cut(files: Files) -> None:
    files[SIDECAR_NAME] = files[SIDECAR_NAME][:-700]


def _empty(files: Files) -> None:
    files[SIDECAR_NAME] = b""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_other_metadata, ".metadata is not the one that it was made of"),
        (_same_length, ".metadata is not the one that it was made of"),
        (_longer_file, "__1_0.distcp has not the length that it knows"),
        (_cut, "it is damaged"),
        (_empty, "it is damaged"),
    ],
)
def test_what_does_not_fit_is_not_believed(files: Files, change: Callable[[Files], None], why: str) -> None:
    """The metadata is read as if there were none, and a note says why."""
    change(files)
    _, source = opened(files)
    found = READER.read(source)
    _, plain = opened({name: data for name, data in files.items() if name != SIDECAR_NAME})
    expected = READER.read(plain)
    assert found.notes[-1].startswith(f"{SIDECAR_NAME} is not used: ")
    assert why in found.notes[-1]
    assert same(found.replace(notes=found.notes[:-1]), expected)
    assert SIDECAR_NAME not in source.remembered


@pytest.mark.parametrize("column", ["tensor", "file", "offsets", "payload_offset", "item_length"])
def test_numbers_that_point_nowhere(files: Files, column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar whose numbers lead out of tensors, files or items is damaged, whatever its digest says."""
    _, source = opened(files)
    sidecar = module.read_sidecar(source)
    assert isinstance(sidecar, module.Sidecar)
    chunks = sidecar.tables.chunks
    columns: dict[str, dict[str, Any]] = {
        "tensor": {"tensor": chunks.tensor + 3},
        "file": {"file": chunks.file - 1},
        "offsets": {"offsets": chunks.offsets + 2},
        "item_length": {"length": chunks.length + 1000},
        "payload_offset": {},
    }
    changed = columns[column]
    bad = replace(
        sidecar,
        tables=replace(sidecar.tables, chunks=chunks.replace(**changed)),
        payload_offset=sidecar.payload_offset + (2_000 if column == "payload_offset" else 0),
    )
    files[SIDECAR_NAME] = module.sidecar_bytes(bad, files[".metadata"])
    _, source = opened(files)
    assert "it is damaged" in str(module.read_sidecar(source))


def test_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default from many chunks on; as asked for otherwise."""

    def has_sidecar(sidecar: bool | None) -> bool:
        return SIDECAR_NAME in {part.path for part in WRITER.lay_out(request(sidecar=sidecar)).segments}

    assert [has_sidecar(asked) for asked in (None, True, False)] == [False, True, False]
    monkeypatch.setattr("ckpt_tool.formats.dcp.writer.MIN_CHUNKS", N_ROWS)
    assert [has_sidecar(asked) for asked in (None, True, False)] == [True, True, False]


def test_torch_and_verify_pass_over_it(files: Files, tmp_path: Path) -> None:
    """The real loader loads beside it, and it is no stray file."""
    state = {"model": {"w": torch.zeros(N_ROWS, 3)}}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["model"]["w"].numpy().tobytes() == numbers(request().tensors)["model.w"].data
    _, source = opened(files)
    assert not list(stray_findings(READER.read(source), source.listing))
