"""Orbax written from a layout, read back here; real Orbax restores it in ``tests/consumers/test_orbax.py``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats.orbax.reader import READER
from ckpt_tool.formats.orbax.writer import WRITER
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, KeyPath
from tests.formats.conformance import FIXTURES, all_rows, assemble, source_of
from tests.formats.torch_save.laid_out import request_of
from tests.formats.whole_writers import assert_every_dtype_comes_back, written
from tests.formats.zoo import CHECKPOINTS
from tests.reports.made import as_bytes

FP32 = DTYPES["float32"]
KINDS = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "uint8",
    "bool",
    "complex64",
]


def test_every_dtype_comes_back() -> None:
    """Matrices, scalars, empty arrays; of each type that zarr or TensorStore has."""
    manifest = assert_every_dtype_comes_back(WRITER, READER, KINDS)
    assert manifest.tensor("model.bfloat16.matrix").path == ("model", "bfloat16", "matrix")


def test_objects_are_leaves() -> None:
    """Numbers are arrays, text and what is empty is in the tree, lists stay lists; the rest is named in a note."""
    values = {
        "lr": 0.5, "step": 7, "done": True, "name": "run", "nothing": None, "empty": {},
        "betas": (0.9, 0.95), "groups": [{"wd": 0.1}, {"wd": 0.2}], "seed": np.arange(3, dtype=np.uint32), "raw": b"x",
        "huge": 1 << 80,
    }  # fmt: skip
    blobs = [Blob(name, "value", None, value, (name,), is_loaded=True) for name, value in values.items()]
    request = request_of({("w",): (FP32, (2,))}, [(0, Box.whole((2,)), 0)], blobs=blobs)
    assert WRITER.lay_out(request).manifest.notes == (
        "2 objects are left out, for Orbax holds arrays, numbers and text: raw, huge; --to torch-save keeps them",
    )
    store, _ = written(WRITER, request)
    manifest = READER.read(source_of(store))
    assert {blob.fqn: blob.value for blob in manifest.blobs} == {"name": "run", "nothing": None, "empty": {}}
    assert manifest.tensor("groups.1.wd").path == ("groups", 1, "wd")
    chunks = READER.resolve(source_of(store), manifest, all_rows(manifest))
    numbers = {fqn: assemble(store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns if fqn != "w"}
    assert {fqn: np.frombuffer(one.data, one.dtype).reshape(one.shape).tolist() for fqn, one in numbers.items()} == {
        "lr": 0.5, "step": 7, "done": True, "betas.0": 0.9, "betas.1": 0.95, "groups.0.wd": 0.1, "groups.1.wd": 0.2,
        "seed": [0, 1, 2],
    }  # fmt: skip


def test_export_of_everything_is_the_same_state(tmp_path: Path) -> None:
    """A training state of DCP and back: every tensor and every number, in whole and by its digests."""
    source = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
    export(source, tmp_path / "orbax", to="orbax", everything=True, names="source", durable=False)
    truth, ours = as_bytes(source), as_bytes(tmp_path / "orbax")
    assert {fqn: ours[fqn] for fqn in truth} == truth
    assert verify(tmp_path / "orbax", level="full").is_ok
    with open_checkpoint(source) as one, open_checkpoint(tmp_path / "orbax") as other:
        assert other["optim.param_groups.0.lr"][...] == one.objects()["optim.param_groups.0.lr"]


@pytest.mark.parametrize("mesh", ["dp=4", "dp=3"])
def test_boxes_are_chunks(mesh: str, tmp_path: Path) -> None:
    """Ranks' parts are chunks, also where the last one is shorter: it is stored in full, as zarr has it."""
    source = CHECKPOINTS / "orbax_zarr3/ckpt/3"
    reshard(source, tmp_path / "there", to="orbax", mesh=mesh, default="shard0", durable=False)
    assert as_bytes(tmp_path / "there") == as_bytes(source)
    description = json.loads((tmp_path / "there/params.emb.embedding/.zarray").read_text("utf-8"))
    n_parts = int(mesh[3])
    assert description["chunks"] == [-(-14 // n_parts), 6]
    sizes = {path.stat().st_size for path in (tmp_path / "there/params.emb.embedding").glob("*.0")}
    assert sizes == {-(-14 // n_parts) * 6 * 2}
    assert verify(tmp_path / "there", level="full").is_ok


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((4, 5), [Box((0, 0), (4, 3)), Box((0, 3), (4, 2))]),
        ((5,), [Box((0,), (2,)), Box((2,), (3,))]),
        ((4,), [Box((0,), (2,))]),
        ((4,), [Box((0,), (2,)), Box((0,), (2,)), Box((2,), (2,))]),
    ],
    ids=["short in the second dimension", "no equal parts", "a hole", "twice"],
)
def test_boxes_that_are_no_grid(shape: tuple[int, ...], boxes: list[Box]) -> None:
    """They are refused, with what to do."""
    request = request_of({("w",): (FP32, shape)}, [(0, box, rank) for rank, box in enumerate(boxes)])
    with pytest.raises(LayoutError, match="grid of equal chunks"):
        WRITER.lay_out(request)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([("a//b",)], "no folder can have the name"),
        ([("a/../b",)], "no folder can have the name"),
        ([("_METADATA",)], "no folder can have the name"),
        ([("a/0",), ("a",)], "lie in that of another array: 'a/0'"),
        ([("..",)], "no folder can have the name"),
    ],
)
def test_names_that_folders_cannot_have(names: list[KeyPath], message: str) -> None:
    """An array is a folder."""
    request = request_of(dict.fromkeys(names, (FP32, (2,))), [(row, Box.whole((2,)), 0) for row in range(len(names))])
    with pytest.raises(Unsupported, match=message):
        WRITER.lay_out(request)


def test_an_object_of_a_tensors_name() -> None:
    """It would be the same folder."""
    blob = Blob("a", "value", None, {"b": 1}, ("a",), is_loaded=True)
    with pytest.raises(Unsupported, match=r"two leaves have the name 'a\.b'"):
        WRITER.lay_out(request_of({("a.b",): (FP32, (2,))}, [(0, Box.whole((2,)), 0)], blobs=[blob]))


def test_an_element_type_that_zarr_lacks() -> None:
    """It is named, with the tensor."""
    kind = DTYPES["complex32"]
    with pytest.raises(Unsupported, match=r"zarr has no elements of complex32 \('w'\)"):
        WRITER.lay_out(request_of({("w",): (kind, (2,))}, [(0, Box.whole((2,)), 0)]))
