"""Rank files written from a layout: torch reads each rank's boxes, and our reader joins them again."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.dtypes import DType, dtype
from ckpt_tool.errors import FormatError, LayoutError, Unsupported
from ckpt_tool.formats.rank_pt.reader import READER
from ckpt_tool.formats.rank_pt.writer import WRITER
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, KeyPath
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import Truth, assemble, source_of
from tests.formats.torch_save.laid_out import filled, request_of
from tests.strategies import partitions, shapes

Tensors = dict[KeyPath, tuple[DType, tuple[int, ...]]]


def load(data: bytes) -> Any:
    """What torch makes of a file."""
    return torch.load(io.BytesIO(data), weights_only=True)


def arange(numel: int) -> bytes:
    """Elements that are their own flat positions."""
    return np.arange(numel, dtype=np.int32).tobytes()


TENSORS: Tensors = {
    ("w",): (dtype("int32"), (8, 2)),
    ("optim", "state", 0, "exp_avg"): (dtype("int32"), (4,)),
    ("buffer",): (dtype("int32"), ()),
    ("none",): (dtype("int32"), (0, 3)),
}
BOXES = [
    (0, Box((0, 0), (2, 2)), 0),
    (0, Box((4, 0), (2, 2)), 0),
    (0, Box((2, 0), (2, 2)), 1),
    (0, Box((6, 0), (2, 2)), 1),
    (1, Box((0,), (3,)), 0),
    (1, Box((3,), (1,)), 1),
    (2, Box((), ()), 0),
    (2, Box((), ()), 1),
]
PAYLOAD = {"w": arange(16), "optim.state.0.exp_avg": arange(4), "buffer": arange(1)}


def test_each_rank_loads_its_boxes() -> None:
    """A file is a plain dict; several boxes of one tensor are a list, and the layout says which they are."""
    blobs = [
        Blob("step", "value", None, 3, ("step",), is_loaded=True),
        Blob("rng", "value", None, (1, 2), ("rng",), rank=1, is_loaded=True),
    ]
    request = request_of(TENSORS, BOXES, world_size=2, blobs=blobs, mesh={"dp": 2, "tp": 1})
    files = filled(WRITER.lay_out(request), PAYLOAD)
    assert list(files) == ["checkpoint_world_size_2_rank_0.pt", "checkpoint_world_size_2_rank_1.pt"]
    zero, one = (load(data) for data in files.values())
    assert [piece.tolist() for piece in one["w"]] == [[[4, 5], [6, 7]], [[12, 13], [14, 15]]]
    assert one["optim"]["state"][0]["exp_avg"].tolist() == [3]
    assert (zero["step"], one["step"], "rng" in zero, one["rng"]) == (3, 3, False, (1, 2))
    assert zero["none"].shape == (0, 3)
    layout = one["__ckpt_layout__"]
    assert (layout["mesh_axes"], layout["mesh_sizes"], layout["coord"]) == (["dp", "tp"], [2, 1], [1, 0])
    assert layout["tensors"][1] == {"entry": "w.1", "fqn": "w", "path": ["w"], "shape": [8, 2], "offsets": [6, 0]}


def test_our_reader_joins_them() -> None:
    """Shapes, paths, mesh, ranks and bytes come back; values equal on all ranks are one."""
    blobs = [Blob("step", "value", None, 3, ("step",), is_loaded=True)]
    request = request_of(TENSORS, BOXES, world_size=2, blobs=blobs, mesh={"dp": 2, "tp": 1})
    files = filled(WRITER.lay_out(request), PAYLOAD)
    store = MemoryStore(files)
    source = source_of(store)
    assert READER.probe(source).confidence > 0.5
    manifest = READER.read(source)
    paths = manifest.tensors.paths or ()
    assert dict(zip(paths, manifest.tensors.dtypes, strict=True)) == {path: kind for path, (kind, _) in TENSORS.items()}
    assert manifest.mesh is not None
    assert (manifest.mesh.axes, manifest.mesh.sizes) == (("dp", "tp"), (2, 1))
    assert [(blob.fqn, blob.value, blob.rank) for blob in manifest.blobs] == [("step", 3, None)]
    for meta in manifest.tensors:
        expected = Truth(meta.dtype.name, meta.shape, PAYLOAD.get(meta.fqn, b""))
        assert assemble(store, manifest, manifest.chunks, meta.fqn) == expected
    ranks = manifest.chunks.rank[manifest.chunks.rows_of(manifest.tensor_id("buffer"))]
    assert ranks.tolist() == [0, 1]
    assert list(READER.check(source, manifest)) == []


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_partition_comes_back(data: st.DataObject) -> None:
    """However a tensor is cut and spread over ranks, the reader finds the same tensor."""
    shape = data.draw(shapes(max_ndim=3, max_size=4))
    world_size = data.draw(st.integers(1, 3))
    pieces = data.draw(partitions(shape))
    boxes = [(0, box, data.draw(st.integers(0, world_size - 1))) for box in pieces if box.volume]
    request = request_of({("a", "w"): (dtype("int32"), shape)}, boxes, world_size=world_size)
    payload = arange(int(np.prod(shape)))
    store = MemoryStore(filled(WRITER.lay_out(request), {"a.w": payload}))
    manifest = READER.read(source_of(store))
    assert assemble(store, manifest, manifest.chunks, "a.w") == Truth("int32", shape, payload)


def test_a_lost_rank_is_missed() -> None:
    """The names tell the world size, so a file that is gone is named."""
    files = filled(WRITER.lay_out(request_of(TENSORS, BOXES, world_size=2)), PAYLOAD)
    del files["checkpoint_world_size_2_rank_1.pt"]
    assert READER.read(source_of(MemoryStore(files))).info["missing_files"] == ["checkpoint_world_size_2_rank_1.pt"]


def test_files_of_two_world_sizes_are_not_mixed() -> None:
    """A file renamed into another set is refused, for its layout says where it belongs."""
    files = filled(WRITER.lay_out(request_of(TENSORS, BOXES, world_size=2)), PAYLOAD)
    files["checkpoint_world_size_3_rank_1.pt"] = files.pop("checkpoint_world_size_2_rank_1.pt")
    files["checkpoint_world_size_3_rank_0.pt"] = files.pop("checkpoint_world_size_2_rank_0.pt")
    with pytest.raises(FormatError, match="files of 2 ranks are mixed, the names say 3"):
        READER.read(source_of(MemoryStore(files)))


def test_what_does_not_fit_is_refused() -> None:
    """Ranks outside of the world, tensors without a box, and a name that is the format's own."""
    tensors: Tensors = {("w",): (dtype("int32"), (2,))}
    with pytest.raises(LayoutError, match="expected ranks 0 to 0, got 3 to 3"):
        WRITER.lay_out(request_of(tensors, [(0, Box((0,), (2,)), 3)]))
    with pytest.raises(LayoutError, match="1 tensor has no box on any rank, 'w' is one"):
        WRITER.lay_out(request_of(tensors, []))
    own: Tensors = {("__ckpt_layout__",): (dtype("int32"), (2,))}
    with pytest.raises(Unsupported, match="this format's own"):
        WRITER.lay_out(request_of(own, [(0, Box((0,), (2,)), 0)]))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"version": 2}, "unknown version"),
        ({"version": 1}, "lacks or garbles"),
        (
            {
                "version": 1, "rank": 0, "world_size": 1, "mesh_axes": [], "mesh_sizes": [], "coord": [],
                "tensors": [{"entry": "w", "fqn": "w", "path": ["w"], "shape": [2], "offsets": [1]}],
            },
            r"a piece \[2\] at \[1\] does not lie in \[2\]",
        ),
    ],
    ids=["version", "empty", "outside"],
)  # fmt: skip
def test_a_broken_layout_is_an_error(layout: dict[str, Any], message: str) -> None:
    """A layout entry is checked before it is believed."""
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2), "__ckpt_layout__": layout}, buffer)
    with pytest.raises(FormatError, match=message):
        READER.read(source_of(MemoryStore({"checkpoint_world_size_1_rank_0.pt": buffer.getvalue()})))
