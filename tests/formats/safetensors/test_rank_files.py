"""Rank files: what is laid out comes back, tensors, key paths, objects and mesh; damage and absence are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load as load_library

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import CkptError, FormatError, LayoutError, NotFound, Unsupported, UsageError
from ckpt_tool.formats.base import Source, WriterOptions
from ckpt_tool.formats.safetensors import index_file, single
from ckpt_tool.formats.safetensors.rank_schema import LAYOUT_FILE
from ckpt_tool.formats.safetensors.rank_writer import WRITER
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, MeshInfo
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Listing
from tests.formats.safetensors.places import meta, model_bytes, request, source_and_store
from tests.formats.safetensors.ranks import BOXES, METAS, READER, full_request, read_all, saved
from tests.strategies import partitions, shapes


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
    with pytest.raises(LayoutError, match="1 tensor has no box on any rank, 'w' is one"):
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


def test_a_plain_safetensors_file_is_no_rank_file() -> None:
    """Even under the name of one."""
    files, _ = saved(request([meta("w", "uint8", (1,))]))
    files["rank_00000.safetensors"] = model_bytes({"w": b"1"})
    with pytest.raises(FormatError, match=r"no ckpt.version in its __metadata__"):
        READER.read(source_and_store(files)[0])
