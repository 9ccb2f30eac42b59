"""The DCP writer against torch itself: what it lays out, torch loads, and almost byte for byte torch would write it."""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_tool.dtypes import DTYPES, opaque
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._dcp.written_items import ItemKinds, is_writable
from ckpt_tool.formats._pickle.nodes import Global
from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats.base import LayOut, Source, WriteRequest
from ckpt_tool.formats.dcp.reader import READER
from ckpt_tool.formats.dcp.writer import WRITER
from ckpt_tool.manifest.model import Blob, Manifest, TensorMeta
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.storage.open import open_store
from tests.formats.conformance import FIXTURES, Truth, all_rows, assemble, truth_of
from tests.formats.dcp.build import saved
from tests.formats.dcp.written import boxes_of, numbers, row_boxes, table, write
from tests.formats.recorded import checksums_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SOURCE = FIXTURES / "torch/dcp_fsdp2_4r_fp32"


def request(tensors: TensorTable, world_size: int = 1, **others: Any) -> WriteRequest:
    """A request of row-wise boxes."""
    return WriteRequest(tensors, row_boxes(tensors, world_size), world_size, **others)


def bits(value: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def at(state: Mapping[str, Any], path: tuple[str | int, ...]) -> Any:
    """The value at nested keys."""
    value: Any = state
    for key in path:
        value = value[key]
    return value


@pytest.fixture(scope="module")
def real() -> tuple[Source, Manifest]:
    """A real checkpoint, its objects loaded."""
    source = Source(*open_store(SOURCE / "ckpt"))
    manifest = READER.read(source)
    return source, manifest.replace(blobs=READER.load_blobs(source, manifest, range(len(manifest.blobs))))


@pytest.fixture(scope="module", params=["original", "anew"])
def copied(
    request: pytest.FixtureRequest, real: tuple[Source, Manifest], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, LayOut]:
    """That checkpoint laid out for three ranks and written; objects as their original bytes, or encoded anew."""
    source, manifest = real
    original = {}
    if request.param == "original":
        for blob in manifest.blobs:
            assert blob.where is not None
            original[blob.fqn] = source.store.read(blob.where.path, blob.where.offset, blob.where.length)
    boxes = row_boxes(manifest.tensors, 3)
    layout = WRITER.lay_out(WriteRequest(manifest.tensors, boxes, 3, blobs=manifest.blobs, blob_bytes=original))
    root = tmp_path_factory.mktemp(str(request.param))
    write(layout, truth_of(SOURCE)(), root)
    return root, layout


def test_torch_restores_the_whole(copied: tuple[Path, LayOut], real: tuple[Source, Manifest], tmp_path: Path) -> None:
    """The converter of torch rebuilds every tensor and every object at its nested keys."""
    dcp_to_torch_save(copied[0], tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=False)
    truth = truth_of(SOURCE)()
    for tensor in real[1].tensors:
        value = at(state, tensor.path)
        assert (value.shape, bits(value)) == (tensor.shape, truth[tensor.fqn].data), tensor.fqn
    for blob in real[1].blobs:
        assert at(state, blob.path) == blob.value, blob.fqn


def test_torch_loads_into_a_nested_state(copied: tuple[Path, LayOut], real: tuple[Source, Manifest]) -> None:
    """``dcp.load`` fills a nested state dict, and a flat one, in place."""
    truth = truth_of(SOURCE)()
    tensors = [t for t in real[1].tensors if t.fqn.startswith("model.")]
    empty = {t.path[-1]: torch.zeros(t.shape, dtype=getattr(torch, t.dtype.name)) for t in tensors}
    state: dict[str, Any] = {"model": empty, "step": 0}
    dcp.load(state, checkpoint_id=copied[0], no_dist=True)
    assert {f"model.{key}": bits(value) for key, value in empty.items()} == {t.fqn: truth[t.fqn].data for t in tensors}
    assert state["step"] == next(b.value for b in real[1].blobs if b.fqn == "step")
    flat = {"model.odd53": torch.zeros(5, 3)}
    dcp.load(flat, checkpoint_id=copied[0], no_dist=True)
    assert bits(flat["model.odd53"]) == truth["model.odd53"].data


def test_it_reads_back(copied: tuple[Path, LayOut], real: tuple[Source, Manifest]) -> None:
    """The reader finds the same tensors, objects and keys, resolved where the layout put them, and nothing wrong."""
    source = Source(*open_store(copied[0]))
    manifest = READER.read(source)
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    assert {fqn: assemble(source.store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns} == truth_of(SOURCE)()
    assert list(manifest.tensors) == list(real[1].tensors)
    laid_out = copied[1].manifest.chunks
    filled = laid_out.take(np.flatnonzero(laid_out.volume))
    expected = {
        (copied[1].manifest.files.paths[f], o) for f, o in zip(filled.file, filled.offset.tolist(), strict=True)
    }
    assert {(manifest.files.paths[f], o) for f, o in zip(chunks.file, chunks.offset.tolist(), strict=True)} == expected
    blobs = READER.load_blobs(source, manifest, range(len(manifest.blobs)))
    assert [(b.fqn, b.path, b.value) for b in blobs] == [(b.fqn, b.path, b.value) for b in real[1].blobs]
    assert list(READER.check(source, manifest)) == []
    for checksum in checksums_of(READER, source, manifest):
        where = checksum.where
        assert zlib.crc32(source.store.read(where.path, where.offset, where.length)) == checksum.crc32
    filled_fqns = {t.fqn for t in manifest.tensors if t.numel} | {blob.fqn for blob in blobs}
    assert {c.fqn for c in READER.checksums(source, manifest)} == {None, *filled_fqns}


def test_targets_that_cannot_go_back(tmp_path: Path) -> None:
    """Without the seal every item is whole but for its checksum, which then counts as not recorded."""
    tensors = table(a=(4, 3), b=(5,))
    write(WRITER.lay_out(request(tensors, 2)), numbers(tensors), tmp_path, is_sealed=False)
    state = {"a": torch.zeros(4, 3), "b": torch.zeros(5)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert {fqn: bits(value) for fqn, value in state.items()} == {t.fqn: numbers(tensors)[t.fqn].data for t in tensors}
    source = Source(*open_store(tmp_path))
    payloads = {(c.where.offset, c.where.length) for c in checksums_of(READER, source, READER.read(source))}
    chunks = READER.resolve(source, READER.read(source), np.arange(4))
    assert not payloads & set(zip(chunks.offset.tolist(), chunks.length.tolist(), strict=True))


def test_items_are_those_of_torch() -> None:
    """An item differs from what ``torch.save`` writes in the forty digits of its identifier and their checksum only."""
    value = torch.arange(30, dtype=torch.float32).reshape(5, 6)
    theirs = saved(value)
    kind = ItemKinds().kind(DTYPES["float32"], (5, 6))
    payload = value.numpy().tobytes()
    ours = kind.head + payload + kind.rear(zlib.crc32(payload))
    assert len(ours) == len(theirs)
    digits = theirs.index(b".data/serialization_id") + len(b".data/serialization_id")
    different = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    start = theirs.index(b"Z", digits) if b"Z" in theirs[digits : digits + 64] else digits
    assert min(different) >= start
    assert len(different) <= 40 + 4 + 4


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if is_writable(dtype)])
def test_every_dtype_of_torch(name: str, tmp_path: Path) -> None:
    """Every type of torch loads back with its bits."""
    dtype = DTYPES[name]
    tensors = TensorTable.from_records([TensorMeta("w", dtype, (3, 4), "model", ("w",))])
    truth = {"w": Truth(name, (3, 4), bytes(i % 2 for i in range(12 * dtype.itemsize)))}
    write(WRITER.lay_out(request(tensors)), truth, tmp_path)
    item = READER.read(Source(*open_store(tmp_path))).chunks
    stored = (tmp_path / "__0_0.distcp").read_bytes()[int(item.offset[0]) :][: int(item.length[0])]
    value = torch.load(io.BytesIO(stored), weights_only=True)
    assert (str(value.dtype), value.shape) == (f"torch.{name}", (3, 4))
    assert bytes(value.untyped_storage().tolist()) == truth["w"].data


def test_metadata_is_of_torchs_classes(tmp_path: Path) -> None:
    """The metadata unpickles into torch's own records, field by field."""
    tensors = table(w=(4, 3))
    layout = WRITER.lay_out(request(tensors, 2, blobs=(Blob("n", "value", None, value=1, is_loaded=True),)))
    metadata = pickle.loads(layout.segments[-1].data)
    assert type(metadata) is dcp.Metadata
    entry = metadata.state_dict_metadata["w"]
    assert entry.properties == dcp.metadata.TensorProperties(dtype=torch.float32)
    assert (entry.size, type(entry.size)) == (torch.Size((4, 3)), torch.Size)
    assert [(c.offsets, c.sizes) for c in entry.chunks] == [((0, 0), (2, 3)), ((2, 0), (2, 3))]
    assert metadata.planner_data == {"w": ("w",), "n": ("n",)}
    infos = {(index.fqn, index.offset, index.index): info for index, info in metadata.storage_data.items()}
    assert {key: info.relative_path for key, info in infos.items()} == {
        ("n", None, None): "__0_0.distcp",
        ("w", (0, 0), 0): "__0_0.distcp",
        ("w", (2, 0), 1): "__1_0.distcp",
    }
    assert infos["w", (2, 0), 1].offset == 0
    assert all(info.transform_descriptors is None for info in infos.values())
    assert (metadata.version, metadata.storage_meta.modules) == ("1.0.0", [])


def test_tensors_without_elements(tmp_path: Path) -> None:
    """Empty tensors get an item, with or without a box, and torch loads them (R22)."""
    tensors = table(none=(0,), flat=(0, 4), scalar=(), one=(1,))
    rows = [(1, (0, 0), (0, 4), 0), (2, (), (), 0), (3, (0,), (1,), 1)]
    layout = WRITER.lay_out(WriteRequest(tensors, boxes_of(tensors, rows), 2))
    write(layout, numbers(tensors), tmp_path)
    assert len(layout.manifest.chunks) == 3
    state = {t.fqn: torch.full(t.shape, 7.0) for t in tensors}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert {fqn: bits(value) for fqn, value in state.items()} == {t.fqn: numbers(tensors)[t.fqn].data for t in tensors}


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    """Parts without elements beside full ones, several at one place, do not hide each other (R2)."""
    tensors = table(w=(1, 17))
    write(WRITER.lay_out(request(tensors, 4)), numbers(tensors), tmp_path)
    state = {"w": torch.zeros(1, 17)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert bits(state["w"]) == numbers(tensors)["w"].data
    manifest = READER.read(Source(*open_store(tmp_path)))
    assert (len(manifest.chunks), manifest.info["n_empty_chunks"]) == (1, 1)


def test_an_empty_box_beside_a_full_one(tmp_path: Path) -> None:
    """A part without elements that begins where a full one does leaves the record to the full one."""
    tensors = table(w=(4,))
    for order in ([(0, (0,), (4,), 0), (0, (0,), (0,), 1)], [(0, (0,), (0,), 1), (0, (0,), (4,), 0)]):
        write(WRITER.lay_out(WriteRequest(tensors, boxes_of(tensors, order), 2)), numbers(tensors), tmp_path)
        state = {"w": torch.zeros(4)}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        assert bits(state["w"]) == numbers(tensors)["w"].data


def test_what_torch_has_not() -> None:
    """Types that torch lacks are listed with a tensor each."""
    records = [
        TensorMeta("a", opaque("X9", numel=1, nbytes=2), (4,), "model", ("a",)),
        TensorMeta("b", DTYPES["float6_e2m3fn"], (4,), "model", ("b",)),
        TensorMeta("c", DTYPES["float32"], (4,), "model", ("c",)),
    ]
    with pytest.raises(Unsupported, match=r"of X9 \('a'\), float6_e2m3fn \('b'\)"):
        WRITER.lay_out(request(TensorTable.from_records(records)))


def test_boxes_that_cannot_be() -> None:
    """A tensor without a box, and two boxes at one place, are refused."""
    tensors = table(a=(4,), b=(4,))
    with pytest.raises(LayoutError, match="b: no box"):
        WRITER.lay_out(WriteRequest(tensors, boxes_of(tensors, [(0, (0,), (4,), 0)]), 1))
    rows = [(0, (0,), (4,), 0), (1, (0,), (4,), 0), (0, (0,), (2,), 1)]
    with pytest.raises(LayoutError, match=r"a: two boxes begin at \[0\]: sizes \[4\] and \[2\]"):
        WRITER.lay_out(WriteRequest(tensors, boxes_of(tensors, rows), 2))


def test_objects_that_need_a_word() -> None:
    """Objects of foreign classes and repeated ones are written with a note, those with tensors of their own are not."""
    tensors = table(a=(4,))
    foreign = Global("my.config", "Settings")(3)
    blobs = (
        Blob("n", "value", None, value=1, is_loaded=True),
        Blob("n", "value", None, value=2, is_loaded=True, rank=1),
        Blob("cfg", "value", None, value={"settings": foreign}, is_loaded=True),
    )
    layout = WRITER.lay_out(request(tensors, blobs=blobs))
    assert layout.manifest.notes == (
        "cfg holds objects of my.config.Settings, which torch.load reads with weights_only=False only",
        "of 1 object there are several copies, of which the first is kept: n",
    )
    assert [(blob.fqn, blob.value) for blob in layout.manifest.blobs] == [("n", 1), ("cfg", {"settings": foreign})]
    held = TensorRef(StorageRef(DTYPES["float32"], "0", "cpu", 4), 0, (4,), (1,), DTYPES["float32"])
    with pytest.raises(Unsupported, match="1 object with tensors inside, whose bytes are not at hand: x"):
        WRITER.lay_out(request(tensors, blobs=(Blob("x", "value", None, value=[held], is_loaded=True),)))
    with pytest.raises(Unsupported, match="1 object whose value was not loaded: x"):
        WRITER.lay_out(request(tensors, blobs=(Blob("x", "torch_save", None),)))


def test_equal_requests_give_equal_bytes() -> None:
    """A layout follows from its request alone, so a run that is resumed ends with the same bytes."""
    tensors = table(a=(4, 3), b=(5,))
    first, second = (WRITER.lay_out(request(tensors, 2)) for _ in range(2))
    assert list(first.segments) == list(second.segments)
    assert first.commit_path == ".metadata"
