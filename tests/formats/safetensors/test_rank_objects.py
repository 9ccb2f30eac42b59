"""Objects beside rank files: plain values, pickles, and the bytes of others, come back as they were."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.nodes import Global, OrderedMap
from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats.safetensors.rank_schema import LAYOUT_FILE, OBJECTS_FILE
from ckpt_tool.manifest.model import Blob
from tests.formats.safetensors.places import source_and_store
from tests.formats.safetensors.ranks import READER, full_request, read_all, saved

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
    with pytest.raises(Unsupported, match="no other file can hold 1 object whose value was not loaded: x"):
        saved(full_request(blobs=(Blob("x", "pickle", None),)))


def test_an_object_with_tensors_inside_needs_its_bytes() -> None:
    """A pickle made anew has no place for what the tensors hold; nothing is dropped silently."""
    storage = StorageRef(DTYPES["uint8"], "0", "cpu", 3)
    value = {"state": TensorRef(storage, 0, (3,), (1,), DTYPES["uint8"])}
    with pytest.raises(Unsupported, match="1 object with tensors inside, whose bytes are not at hand: rng"):
        saved(full_request(blobs=(Blob("rng", "value", None, value, is_loaded=True),)))


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
