"""Rank files: what is laid out comes back, tensors, key paths, objects and mesh; damage and absence are told."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_library

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import CkptError, FormatError, LayoutError, NotFound, Unsupported, UsageError
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.nodes import Global, OrderedMap
from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats.base import Source, WriteRequest, WriterOptions
from ckpt_tool.formats.safetensors import index_file, rank_files, single
from ckpt_tool.formats.safetensors.rank_schema import LAYOUT_FILE, OBJECTS_FILE
from ckpt_tool.formats.safetensors.rank_writer import WRITER
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, MeshInfo
from ckpt_tool.storage.recording import MemoryStore
from ckpt_tool.storage.store import Listing
from tests.formats.conformance import assemble
from tests.formats.safetensors.places import meta, model_bytes, request, source_and_store, written
from tests.strategies import partitions, shapes

READER = rank_files.READER
METAS = [
    meta("w", "float32", (4, 3)),
    meta("opt.w.exp_avg", "float32", (4, 3), section="optimizer", path=("opt", 0, "w", "exp_avg")),
    meta("z", "complex128", (2,)),
    meta("flag", "bool", (3,), section="other"),
    meta("empty", "bfloat16", (0, 5)),
    meta("scalar", "int64", ()),
    meta("fp4", "float4_e2m1fn_x2", (2, 2)),
]
BOXES = [
    ("w", Box((0, 0), (2, 3)), 0),
    ("flag", Box((0,), (3,)), 0),
    ("w", Box((2, 0), (1, 3)), 1),
    ("w", Box((3, 0), (1, 3)), 1),
    ("opt.w.exp_avg", Box((0, 0), (4, 1)), 1),
    ("opt.w.exp_avg", Box((0, 1), (4, 2)), 0),
    ("z", Box((0,), (2,)), 3),
    ("flag", Box((0,), (3,)), 3),
    ("scalar", Box((), ()), 0),
    ("fp4", Box((1, 0), (1, 2)), 1),
    ("fp4", Box((0, 0), (1, 2)), 0),
]


def payloads_of(asked: WriteRequest) -> tuple[list[bytes], dict[str, bytes]]:
    """Bytes of each box, and of each whole tensor, of random content."""
    random = np.random.default_rng(7)
    whole = {m.fqn: random.integers(0, 256, (*m.shape, m.dtype.itemsize), dtype=np.uint8) for m in asked.tensors}
    found = []
    for row in range(len(asked.boxes)):
        m = asked.tensors.record(int(asked.boxes.tensor[row]))
        ndim = len(m.shape)
        box = Box(tuple(asked.boxes.offsets[row, :ndim].tolist()), tuple(asked.boxes.sizes[row, :ndim].tolist()))
        found.append(whole[m.fqn][box.slices].tobytes())
    return found, {fqn: array.tobytes() for fqn, array in whole.items()}


def saved(asked: WriteRequest) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """``(files, whole tensors)`` of a request."""
    payloads, whole = payloads_of(asked)
    return written(WRITER.lay_out(asked), payloads), whole


def read_all(source: Source) -> dict[str, bytes]:
    """Whole tensors by our reader."""
    manifest = READER.read(source)
    return {m.fqn: assemble(source.store, manifest, manifest.chunks, m.fqn).data for m in manifest.tensors}


def full_request(**fields: Any) -> WriteRequest:
    """Four ranks, one of which stores nothing, and every odd type."""
    return request(METAS, BOXES, 4, mesh_axes=("dp", "tp"), mesh_sizes=(2, 2), info={"step": 3}, **fields)


def test_everything_comes_back() -> None:
    """Bytes, dtypes, shapes, sections, key paths, ranks, mesh and info are what was asked for."""
    files, whole = saved(full_request())
    source, store = source_and_store(files)
    assert READER.probe(source).confidence > 0.9
    manifest = READER.read(source)
    assert len(store.calls) == 5
    assert {m.fqn: m for m in manifest.tensors} == {m.fqn: m for m in METAS}
    assert read_all(source) == whole
    assert manifest.mesh == MeshInfo(("dp", "tp"), (2, 2), LAYOUT_FILE)
    assert manifest.info == {"step": 3, "world_size": 4}
    assert sorted(manifest.chunks.rank.tolist()) == sorted(rank for _, _, rank in BOXES)
    assert list(READER.check(source, manifest)) == []


def test_files_and_their_metadata_are_as_documented() -> None:
    """One file per rank, the header's words, and names of further boxes of one tensor."""
    files, _ = saved(full_request())
    assert sorted(files) == [LAYOUT_FILE, *(f"rank_{r:05d}.safetensors" for r in range(4))]
    raw = files["rank_00001.safetensors"]
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    metadata = header.pop("__metadata__")
    assert {k: metadata[k] for k in ("format", "ckpt.version", "ckpt.rank", "ckpt.world_size")} == {
        "format": "pt", "ckpt.version": "1", "ckpt.rank": "1", "ckpt.world_size": "4",
    }  # fmt: skip
    assert json.loads(metadata["ckpt.mesh"]) == {"axes": ["dp", "tp"], "sizes": [2, 2], "coord": [0, 1]}
    assert json.loads(metadata["ckpt.boxes"])["w@1"] == {"shape": [4, 3], "offsets": [3, 0], "fqn": "w"}
    assert json.loads(metadata["ckpt.boxes"])["opt.w.exp_avg"] == {
        "shape": [4, 3], "offsets": [0, 0], "path": ["opt", 0, "w", "exp_avg"],
    }  # fmt: skip
    assert header["fp4"] == {"dtype": "F4", "shape": [1, 4], "data_offsets": header["fp4"]["data_offsets"]}
    assert json.loads(files[LAYOUT_FILE])["files"] == {p: len(d) for p, d in files.items() if p != LAYOUT_FILE}


def test_the_library_opens_each_file() -> None:
    """Ranks are ordinary safetensors files, of local shapes."""
    asked = request([meta("w", "float32", (4, 3))], [("w", Box((0, 0), (3, 3)), 0), ("w", Box((3, 0), (1, 3)), 1)], 2)
    files, _ = saved(asked)
    assert load_library(files["rank_00000.safetensors"])["w"].shape == (3, 3)
    assert load_library(files["rank_00001.safetensors"])["w"].shape == (1, 3)


def test_a_tensor_that_is_named_like_a_second_box() -> None:
    """``w@1`` may be a tensor of its own; the second box of ``w`` takes another name."""
    metas = [meta("w", "uint8", (4,)), meta("w@1", "uint8", (1,))]
    boxes = [("w", Box((0,), (2,)), 0), ("w", Box((2,), (2,)), 0), ("w@1", Box((0,), (1,)), 0)]
    files, whole = saved(request(metas, boxes))
    assert read_all(source_and_store(files)[0]) == whole


@given(st.data())
def test_any_partition_comes_back(data: st.DataObject) -> None:
    """Boxes of any shape on any ranks give back the whole tensor."""
    metas, boxes = [], []
    world = data.draw(st.integers(1, 4))
    for i, shape in enumerate(data.draw(st.lists(shapes(3, 4), max_size=3))):
        dtype = data.draw(st.sampled_from(["uint8", "bfloat16", "complex128", "int64"]))
        metas.append(meta(f"t{i}", dtype, shape))
        found = [b for b in data.draw(partitions(shape)) if b.volume]
        boxes += [(f"t{i}", b, data.draw(st.integers(0, world - 1))) for b in found]
    files, whole = saved(request(metas, boxes, world))
    assert read_all(source_and_store(files)[0]) == whole


OBJECTS: Mapping[str, Any] = {
    "step": 3,
    "none": None,
    "betas": (0.9, 0.95),
    "nan": float("inf"),
    "by_int": {0: "a", "b": [1, b"\0\xff"]},
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "name": "\ud800 é",
}


def test_objects_come_back_with_their_types() -> None:
    """Plain values lie in one JSON file, a line each; tuples, bytes and integer keys survive."""
    blobs = tuple(
        Blob(name, "value", None, value, ("extra", i), i % 2, is_loaded=True)
        for i, (name, value) in enumerate(OBJECTS.items())
    )
    files, _ = saved(full_request(blobs=blobs))
    source, _ = source_and_store(files)
    manifest = READER.read(source)
    assert all(not b.is_loaded for b in manifest.blobs)
    loaded = READER.load_blobs(source, manifest, range(len(blobs)))
    assert [(b.fqn, b.path, b.rank) for b in loaded] == [(b.fqn, b.path, b.rank) for b in blobs]
    for blob in loaded:
        expected = OBJECTS[blob.fqn]
        if isinstance(expected, np.ndarray):
            assert (blob.value.dtype, blob.value.tolist()) == (expected.dtype, expected.tolist())
        else:
            assert (type(blob.value), blob.value) == (type(expected), expected)
    assert len(json.loads(files[OBJECTS_FILE])) == len(OBJECTS)
    assert not READER.load_blobs(source, manifest, [0])[1].is_loaded


def test_foreign_objects_are_kept_as_pickles() -> None:
    """An inert record of a foreign class goes back to the pickle that it was; original bytes stay as they are."""
    record = OrderedMap()
    record["lr"] = Global("torch.optim", "Scheduler").stub(1)
    raw = dump_pickle({"seed": 5})
    blobs = (
        Blob("sched", "value", None, record, is_loaded=True),
        Blob("rng", "pickle", None, None),
        Blob("opaque", "bytes", None, None),
    )
    files, _ = saved(full_request(blobs=blobs, blob_bytes={"rng": raw, "opaque": b"\1\2"}))
    source, _ = source_and_store(files)
    loaded = READER.load_blobs(source, READER.read(source), [0, 1, 2])
    assert (type(loaded[0].value), list(loaded[0].value)) == (OrderedMap, ["lr"])
    assert repr(loaded[0].value["lr"].cls) == repr(record["lr"].cls)
    assert [b.value for b in loaded[1:]] == [{"seed": 5}, b"\1\2"]
    assert files["objects/00001.pkl"] == raw


def test_torch_s_own_bytes_are_kept_and_read() -> None:
    """An object that torch.save wrote stays that file, and is read without torch."""
    import torch

    out = io.BytesIO()
    torch.save({"epoch": 7}, out)
    blob = Blob("train", "torch_save", None)
    files, _ = saved(full_request(blobs=(blob,), blob_bytes={"train": out.getvalue()}))
    source, _ = source_and_store(files)
    [loaded] = READER.load_blobs(source, READER.read(source), [0])
    assert (loaded.kind, dict(loaded.value)) == ("torch_save", {"epoch": 7})
    assert files["objects/00000.pt"] == out.getvalue()


def test_an_object_without_value_or_bytes_is_refused() -> None:
    """It would be lost."""
    with pytest.raises(Unsupported, match="object 'x' was not loaded"):
        saved(full_request(blobs=(Blob("x", "pickle", None),)))


def test_an_object_with_tensors_inside_needs_its_bytes() -> None:
    """A pickle made anew has no place for what the tensors hold; nothing is dropped silently."""
    storage = StorageRef(DTYPES["uint8"], "0", "cpu", 3)
    value = {"state": TensorRef(storage, 0, (3,), (1,), DTYPES["uint8"])}
    with pytest.raises(Unsupported, match="object 'rng' has 1 tensors inside, and its original bytes were not given"):
        saved(full_request(blobs=(Blob("rng", "value", None, value, is_loaded=True),)))


def test_what_the_source_lacks_is_not_said_of_the_target() -> None:
    """``missing_files`` of a source's info stays behind."""
    asked = request([meta("w", "uint8", (1,))], info={"missing_files": ["x"], "step": 1})
    source, _ = source_and_store(saved(asked)[0])
    assert READER.read(source).info == {"step": 1, "world_size": 1}


def test_an_unfinished_save_is_no_checkpoint() -> None:
    """Without the layout file, which is written last, no reader takes the folder."""
    files, _ = saved(full_request())
    del files[LAYOUT_FILE]
    source, _ = source_and_store(files)
    probes = [r.probe(source) for r in (READER, single.READER, index_file.READER)]
    assert max(p.confidence for p in probes) <= 0.5
    assert probes[0].why.startswith(f"rank_00000.safetensors without {LAYOUT_FILE}: the save did not finish")
    with pytest.raises(NotFound, match="the save did not finish"):
        READER.read(source)


def test_a_lost_rank_is_found_and_the_rest_is_readable() -> None:
    """The layout lists every file with its size."""
    files, _ = saved(full_request())
    del files["rank_00003.safetensors"]
    source, _ = source_and_store(files)
    manifest = READER.read(source)
    found = [f.message for f in READER.check(source, manifest)]
    assert manifest.info["missing_files"] == ["rank_00003.safetensors"]
    assert len(found) == 1
    assert found[0].startswith("rank_00003.safetensors is not here; ckpt_layout.json lists it with ")


def test_a_file_of_another_rank_is_found() -> None:
    """Copied under a wrong name: the header knows which rank it is."""
    files, _ = saved(full_request())
    files["rank_00002.safetensors"] = files["rank_00003.safetensors"]
    source, _ = source_and_store(files)
    kinds = {f.kind: f.message for f in READER.check(source, READER.read(source))}
    assert kinds["wrong-rank"] == "rank_00002.safetensors says it is rank 3 of 4, expected 2 of 4"
    assert "file-size" in kinds


def test_a_rank_beyond_the_layout_is_left_out() -> None:
    """Left over from a larger world."""
    files, whole = saved(full_request())
    files["rank_00009.safetensors"] = files["rank_00000.safetensors"]
    source, _ = source_and_store(files)
    assert read_all(source) == whole
    assert [f.kind for f in READER.check(source, READER.read(source))] == ["stray-file"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ckpt.boxes": "{}"}, "ckpt.boxes does not fit the entries: KeyError: 'w'"),
        ({"ckpt.boxes": '{"w":{"shape":[3],"offsets":[0,0]}}'}, "differ in dimensions"),
        ({"ckpt.boxes": '{"w":{"shape":[3,3],"offsets":[2,0]}}'}, "leaves the tensor of shape"),
        ({"ckpt.boxes": '{"w":{"shape":[3,3],"offsets":[0,-1]}}'}, "expected a count, got -1"),
        ({"ckpt.boxes": '{"w":{"shape":[4,3],"offsets":[0,0],"section":"x"}}'}, "'x' is no section"),
        ({"ckpt.boxes": '{"w":{"shape":[4,3],"offsets":[0,0],"dtype":"int8","sizes":[2,3]}}'}, "box of 6 bytes"),
        ({"ckpt.version": "2"}, "rank file of version 2, expected 1"),
    ],
)
def test_headers_that_contradict_themselves(changes: dict[str, str], said: str) -> None:
    """Each is an error that names the file."""
    asked = request([meta("w", "float32", (4, 3))], [("w", Box((0, 0), (2, 3)), 0), ("w", Box((2, 0), (2, 3)), 1)], 2)
    files, _ = saved(asked)
    name = "rank_00000.safetensors"
    raw = files[name]
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header["__metadata__"] |= changes
    text = json.dumps(header).encode()
    files[name] = len(text).to_bytes(8, "little") + text + raw[end:]
    with pytest.raises(CkptError, match=said) as caught:
        READER.read(source_and_store(files)[0])
    assert caught.value.where == name


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c: c.update(format="x"), "expected format 'ckpt-rank-files'"),
        (lambda c: c.update(version=2), "version 2 of the layout, expected 1"),
        (lambda c: c.update(world_size=10**12), "is not listed"),
        (lambda c: c.update(world_size=-1), "expected a count"),
        (lambda c: c.pop("files"), "not a layout of rank files: KeyError: 'files'"),
        (lambda c: c.update(objects=[3]), "not a layout of rank files"),
        (lambda c: c.update(info=3), "not a layout of rank files"),
    ],
)
def test_layouts_that_are_none(edit: Any, said: str) -> None:
    """A damaged or later layout file is an error that names it."""
    files, _ = saved(full_request())
    content = json.loads(files[LAYOUT_FILE])
    edit(content)
    files[LAYOUT_FILE] = json.dumps(content).encode()
    with pytest.raises(CkptError, match=said) as caught:
        READER.read(source_and_store(files)[0])
    assert caught.value.where == LAYOUT_FILE


def test_shapes_that_differ_between_ranks_are_an_error() -> None:
    """Both files are named."""
    files, _ = saved(request([meta("w", "uint8", (4,))], [("w", Box((0,), (2,)), 0), ("w", Box((2,), (2,)), 1)], 2))
    other, _ = saved(request([meta("w", "uint8", (5,))], [("w", Box((0,), (2,)), 0), ("w", Box((2,), (3,)), 1)], 2))
    files["rank_00001.safetensors"] = other["rank_00001.safetensors"]
    with pytest.raises(FormatError, match=r"'w' is uint8\[5\] here, but uint8\[4\] in rank_00000.safetensors"):
        READER.read(source_and_store(files)[0])


def test_requests_that_cannot_be_laid_out() -> None:
    """Ranks outside of the world, tensors without a box, reserved metadata, and boxes that end inside a byte."""
    six = [DTYPES["float6_e2m3fn"]]
    with pytest.raises(LayoutError, match="expected ranks 0 to 1, got 0 to 3"):
        WRITER.lay_out(request(METAS, BOXES, 2))
    with pytest.raises(LayoutError, match="1 tensors have no box on any rank, 'w' is one"):
        WRITER.lay_out(request([meta("w", "uint8", (1,))], []))
    with pytest.raises(UsageError, match=r"'ckpt.rank' is one of the format's own"):
        WRITER.lay_out(full_request(options=WriterOptions(metadata={"ckpt.rank": "1"})))
    with pytest.raises(Unsupported, match="does not end on a whole byte"):
        WRITER.lay_out(request([meta("s", six[0].name, (4,))], [("s", Box((0,), (1,)), 0)]))


@given(st.data())
def test_damage_gives_errors_of_ours(data: st.DataObject) -> None:
    """Bytes overwritten or cut anywhere give a manifest, findings, or a `CkptError`."""
    files = dict(DAMAGED)
    path = data.draw(st.sampled_from(sorted(files)))
    raw = bytearray(files[path])
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    files[path] = bytes(raw[: data.draw(st.integers(0, len(raw)))]) if data.draw(st.booleans()) else bytes(raw)
    source, _ = source_and_store(files)
    try:
        manifest = READER.read(source)
        list(READER.check(source, manifest))
        READER.load_blobs(source, manifest, range(len(manifest.blobs)))
    except CkptError as error:
        assert error.message  # noqa: PT017 - whether it raises depends on the byte


DAMAGED = saved(full_request(blobs=(Blob("step", "value", None, {"a": (1, b"x")}, is_loaded=True),)))[0]


def test_what_is_named_decides() -> None:
    """The layout file stands for its folder; one rank's file alone is no checkpoint."""
    files, whole = saved(full_request())
    store = MemoryStore(files)
    named = {
        p: Source(store, Listing(store.url, store.listing().sizes, entry=p))
        for p in (LAYOUT_FILE, "rank_00001.safetensors")
    }
    assert READER.probe(named[LAYOUT_FILE]).confidence > 0.9
    assert read_all(named[LAYOUT_FILE]) == whole
    assert max(r.probe(named["rank_00001.safetensors"]).confidence for r in (READER, single.READER)) <= 0.5
    assert READER.probe(source_and_store({})[0]).why == "no rank_NNNNN.safetensors"


def test_a_layout_without_any_rank() -> None:
    """Only the small files were copied."""
    files, _ = saved(full_request())
    with pytest.raises(NotFound, match="none of the 4 rank files is here"):
        READER.read(source_and_store({LAYOUT_FILE: files[LAYOUT_FILE]})[0])


def test_objects_that_are_lost_or_cut() -> None:
    """A lost file of objects is reported and leaves the tensors; a cut one is an error."""
    blobs = (Blob("step", "value", None, 3, is_loaded=True), Blob("raw", "bytes", None))
    files, whole = saved(full_request(blobs=blobs, blob_bytes={"raw": b"12345"}))
    lost, _ = source_and_store({p: d for p, d in files.items() if p != OBJECTS_FILE})
    assert [b.fqn for b in READER.read(lost).blobs] == ["raw"]
    assert read_all(lost) == whole
    assert READER.read(lost).info["missing_files"] == [OBJECTS_FILE]
    cut, _ = source_and_store({**files, "objects/00000.bin": b"1234"})
    with pytest.raises(FormatError, match="object 'raw' ends at byte 5, the file has 4"):
        READER.read(cut)


def test_an_object_loaded_before_is_left_alone() -> None:
    """And a zip that torch did not write is an error."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a/readme", b"x")
    files, _ = saved(full_request(blobs=(Blob("z", "torch_save", None),), blob_bytes={"z": out.getvalue()}))
    source, _ = source_and_store(files)
    manifest = READER.read(source)
    with pytest.raises(FormatError, match=r"object 'z' is a zip without data.pkl"):
        READER.load_blobs(source, manifest, [0])
    known = manifest.replace(blobs=(replace(manifest.blobs[0], value=1, is_loaded=True),))
    assert READER.load_blobs(source, known, [0]) == known.blobs


@pytest.mark.parametrize("path", ["x", [1.5], None])
def test_key_paths_are_lists_of_names_and_numbers(path: Any) -> None:
    """In the layout of objects and in the boxes of tensors alike."""
    files, _ = saved(full_request(blobs=(Blob("step", "value", None, 3, is_loaded=True),)))
    content = json.loads(files[LAYOUT_FILE])
    content["objects"][0]["path"] = path
    files[LAYOUT_FILE] = json.dumps(content).encode()
    with pytest.raises(FormatError, match="expected a list of keys"):
        READER.read(source_and_store(files)[0])


def test_a_plain_safetensors_file_is_no_rank_file() -> None:
    """Even under the name of one."""
    files, _ = saved(request([meta("w", "uint8", (1,))]))
    files["rank_00000.safetensors"] = model_bytes({"w": b"1"})
    with pytest.raises(FormatError, match=r"no ckpt.version in its __metadata__"):
        READER.read(source_and_store(files)[0])
