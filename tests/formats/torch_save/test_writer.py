"""One torch.save file, written from a layout: torch reads it, and so does our reader."""

from __future__ import annotations

import io
import zipfile
from pickle import UnpicklingError
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tool.dtypes import DTYPES, DType, dtype
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._pickle.nodes import Device, Global, OrderedMap, PathText, Size
from ckpt_tool.formats.torch_save.reader import READER
from ckpt_tool.formats.torch_save.writer import WRITER
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, KeyPath
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import Truth, assemble, source_of
from tests.formats.torch_save.laid_out import filled, request_of

WRITABLE = tuple(d for d in DTYPES.values() if d.kind not in ("quantized", "opaque") and d.bits % 8 == 0)


def bytes_of(kind: DType, numel: int, seed: int) -> bytes:
    """Bytes that no two tensors share; bools are 0 or 1."""
    data = np.random.default_rng(seed).integers(
        0, 2 if kind.kind == "bool" else 256, kind.nbytes(numel), dtype=np.uint8
    )
    return data.tobytes()


def whole_boxes(tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]]) -> list[tuple[int, Box, int]]:
    """One box a tensor that has elements."""
    return [(row, Box.whole(shape), 0) for row, (_, shape) in enumerate(tensors.values()) if Box.whole(shape).volume]


def written(
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]], blobs: tuple[Blob, ...] = (), *, is_sealed: bool = True
) -> tuple[bytes, dict[str, bytes]]:
    """The file of these tensors, and the payload of each by fqn."""
    request = request_of(tensors, whole_boxes(tensors), blobs=blobs)
    payload = {meta.fqn: bytes_of(meta.dtype, meta.numel, row) for row, meta in enumerate(request.tensors)}
    (data,) = filled(WRITER.lay_out(request), payload, is_sealed=is_sealed).values()
    return data, payload


def load(data: bytes) -> Any:
    """What torch makes of a file."""
    return torch.load(io.BytesIO(data), weights_only=True)


def value(path: KeyPath, found: Any) -> Blob:
    """A loaded object."""
    return Blob(".".join(map(str, path)), "value", None, found, path, is_loaded=True)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_torch_reads_every_dtype() -> None:
    """Each dtype that torch has plain tensors of, with 2, 1, 0 dimensions and none of elements."""
    shapes = {"matrix": (3, 5), "vector": (7,), "scalar": (), "empty": (0, 4)}
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]] = {
        (kind.name, name): (kind, shape) for kind in WRITABLE for name, shape in shapes.items()
    }
    data, payload = written(tensors)
    state = load(data)
    for (kind_name, name), (_, shape) in tensors.items():
        tensor = state[kind_name][name]
        assert tensor.dtype == getattr(torch, str(kind_name))
        assert tuple(tensor.shape) == shape
        raw = (
            torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
            if tensor.numel()
            else b""
        )
        assert raw == payload[f"{kind_name}.{name}"], (kind_name, name)


def test_our_reader_reads_it_back() -> None:
    """Names, paths, values and bytes come back as they were asked for."""
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]] = {
        ("model", "a.b"): (dtype("bfloat16"), (4, 3)),
        ("optimizer", "state", 0, "exp_avg"): (dtype("float32"), (4, 3)),
        ("list", 0): (dtype("int64"), ()),
        ("list", 1): (dtype("int64"), (2,)),
    }
    blobs = (value(("optimizer", "param_groups", 0, "betas"), (0.9, 0.99)), value(("step",), 7), value(("none",), {}))
    data, payload = written(tensors, blobs)
    store = MemoryStore({"checkpoint.pt": data})
    manifest = READER.read(source_of(store))
    assert manifest.tensors.paths == tuple(tensors)
    assert [(blob.path, blob.value) for blob in manifest.blobs] == [(blob.path, blob.value) for blob in blobs]
    assert manifest.info["int_keyed_dicts"] == ["optimizer.state"]
    for meta in manifest.tensors:
        assert assemble(store, manifest, manifest.chunks, meta.fqn) == Truth(
            meta.dtype.name, meta.shape, payload[meta.fqn]
        )
    state = load(data)
    assert state["optimizer"]["param_groups"] == [{"betas": (0.9, 0.99)}]
    assert list(state["optimizer"]["state"]) == [0]
    assert isinstance(state["list"], list)
    assert (state["step"], state["none"]) == (7, {})


def test_checksums_are_in_place() -> None:
    """Sealed, the zip passes its own test; before, checksums are 0, which readers take for not recorded."""
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]] = {("w",): (dtype("float32"), (100,))}
    data, payload = written(tensors)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == payload["w"]
    data, _ = written(tensors, is_sealed=False)
    assert load(data)["w"].shape == (100,)
    source = source_of(MemoryStore({"a.pt": data}))
    assert [f.kind for f in READER.check(source, READER.read(source))] == ["crc-not-recorded"]


def test_the_file_is_what_torch_save_writes() -> None:
    """Members, order, padding and pickle are those of torch 2.13; only the identifier differs."""
    state = {"w": torch.arange(6, dtype=torch.float32).view(2, 3), "b": {"n": torch.ones(3, dtype=torch.uint16)}}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]] = {
        ("w",): (dtype("float32"), (2, 3)),
        ("b", "n"): (dtype("uint16"), (3,)),
    }
    request = request_of(tensors, whole_boxes(tensors))
    payload = {"w": state["w"].numpy().tobytes(), "b.n": state["b"]["n"].numpy().tobytes()}
    (ours,) = filled(WRITER.lay_out(request), payload).values()
    theirs = buffer.getvalue()
    start = theirs.rindex(b"archive/.data/serialization_id", 0, theirs.index(b"PK\x01\x02"))
    assert len(ours) == len(theirs)
    assert ours[:start] == theirs[:start]


def test_a_cut_tensor_is_refused() -> None:
    """The format holds whole tensors."""
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]] = {("w",): (dtype("float32"), (4,))}
    for boxes in ([(0, Box((0,), (2,)), 0), (0, Box((2,), (2,)), 0)], [(0, Box((0,), (2,)), 0)], []):
        with pytest.raises(LayoutError, match="'w' has"):
            WRITER.lay_out(request_of(tensors, boxes))


@pytest.mark.parametrize(
    ("tensors", "blobs", "message"),
    [
        ({("w",): (dtype("qint8"), (2,))}, (), "no plain tensors of qint8"),
        ({("a",): (dtype("int8"), (2,)), ("a", "b"): (dtype("int8"), (2,))}, (), "leads through another value"),
        ({("a",): (dtype("int8"), (2,))}, (value(("a",), 1),), "two values have the keys"),
        ({}, (Blob("x", "pickle", None),), "was not loaded"),
        ({}, (value(("x",), object()),), "cannot be written into a pickle"),
    ],
    ids=["quantized", "through", "twice", "unloaded", "object"],
)
def test_what_cannot_be_written_is_refused(
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]], blobs: tuple[Blob, ...], message: str
) -> None:
    """Nothing is dropped or guessed: what the format cannot hold is an error before a byte is written."""
    with pytest.raises(Unsupported, match=message):
        WRITER.lay_out(request_of(tensors, whole_boxes(tensors), blobs=blobs))


def test_objects_of_unknown_classes_are_carried_over() -> None:
    """A Namespace of arguments goes through as what it was."""
    stub = Global("argparse", "Namespace").stub()
    stub.__setstate__({"lr": 0.1})
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]] = {("w",): (dtype("int8"), (1,))}
    data, _ = written(tensors, (value(("args",), stub),))
    state = torch.load(io.BytesIO(data), weights_only=False)
    assert vars(state["args"]) == {"lr": 0.1}


@pytest.mark.parametrize(
    ("found", "is_refused"),
    [
        ({"a": [1, 2.5, "x", None, True], "b": {"c": (1,)}, "d": {1, 2}, "e": b"raw"}, False),
        (Size((1, 2)), False),
        (dtype("bfloat16"), False),
        (Device("cuda:0"), False),
        (OrderedMap(), False),
        (np.arange(3), True),
        ([np.float64(0.5)], True),
        (frozenset({1}), True),
        (PathText("/a", Global("pathlib", "PosixPath")), True),
        (Global("argparse", "Namespace").stub(), True),
    ],
)
def test_what_weights_only_refuses_is_noted(found: Any, *, is_refused: bool) -> None:
    """The note about ``weights_only`` says the same as torch does."""
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]] = {("w",): (dtype("int8"), (1,))}
    notes = WRITER.lay_out(request_of(tensors, whole_boxes(tensors), blobs=(value(("x",), found),))).manifest.notes
    data, _ = written(tensors, (value(("x",), found),))
    if is_refused:
        with pytest.raises(UnpicklingError):
            load(data)
        assert notes == ("torch.load needs weights_only=False for 1 object: x; --exclude leaves them out",)
    else:
        load(data)
        assert notes == ()
