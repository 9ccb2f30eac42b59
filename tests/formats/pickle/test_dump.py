"""Pickles written without torch: read back here, by pickle, and by torch itself."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.checksum import crc32
from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.legacy import is_legacy
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.nodes import DefaultMap, Device, Fields, Global, OrderedMap, PathText, Size, Stub
from ckpt_tool.formats._pickle.numpy_values import NumpyDType
from ckpt_tool.formats._pickle.tensors import (
    TENSOR_RECORDS,
    MetaTensorRef,
    SparseTensorRef,
    StorageRef,
    TensorRef,
    WrapperRef,
)
from ckpt_tool.formats._pickle.walk import storages
from ckpt_tool.formats._zip.layout import ZipLayout, torch_members
from tests.formats.pickle.materialize import FIXTURES, PT_FILES, open_file, pickle_of

_ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**90), 2**90)
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=20)
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False)
)
_KEYS = st.none() | st.integers(-300, 70_000) | st.text(max_size=8) | st.tuples(st.integers(), st.text(max_size=3))
_VALUES = st.recursive(
    _ATOMS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(_KEYS, inner, max_size=5)
        | st.sets(_KEYS, max_size=4)
        | st.frozensets(_KEYS, max_size=4)
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    """True when two loaded objects describe the same: stubs by what they hold, arrays by value and dtype."""
    if type(left) is not type(right) and not isinstance(left, (Global, Stub)):
        return False
    if isinstance(left, Stub):
        parts = ("cls", "args", "kwargs", "state", "items", "made")
        return all(same(getattr(left, part), getattr(right, part)) for part in parts) and same(
            list(left.entries), list(right.entries)
        )
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items())) and same(
            getattr(left, "attributes", None), getattr(right, "attributes", None)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return bool((left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()))
    if isinstance(left, TENSOR_RECORDS):
        return all(same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__)
    if isinstance(left, NumpyDType):
        return same((left.code, left.state), (right.code, right.state))
    if isinstance(left, PathText):
        return bool((str(left), left.cls) == (str(right), right.cls))
    return bool(left == right)


def _zip(pickle_bytes: bytes, payloads: list[bytes]) -> bytes:
    layout = ZipLayout(torch_members(pickle_bytes, [len(payload) for payload in payloads]))
    out = bytearray(layout.nbytes)
    for offset, part in layout.heads + layout.tail([crc32(payload) for payload in payloads]):
        out[offset : offset + len(part)] = part
    data_offsets = layout.payload_offsets[4 : 4 + len(payloads)]
    for offset, payload in zip(data_offsets, payloads, strict=True):
        out[offset : offset + len(payload)] = payload
    return bytes(out)


@settings(max_examples=150)
@given(_VALUES, st.sampled_from([2, 4]))
def test_plain_values_come_back_equal(value: Any, protocol: Any) -> None:
    """load(dump(x)) == x, and CPython's own pickle reads the same."""
    data = dump_pickle(value, protocol=protocol)
    assert same(load_pickle(data, where="x"), value)
    assert pickle.loads(data) == value


@settings(max_examples=50)
@given(st.integers(-(2**2100), 2**2100))
def test_integers_are_written_as_pickle_writes_them(value: int) -> None:
    """The shortest two's complement, for any size."""
    assert dump_pickle(value, protocol=2) == pickle.dumps(value, protocol=2)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=">i8").reshape(2, 3)),
        np.array(5, dtype=np.uint16),
        np.zeros((0, 3), dtype=bool),
        np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
        np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        np.array(["ab", "c"], dtype="<U2"),
        np.float64(0.5),
        np.int64(-7),
        np.bool_(True),
        np.complex64(1 + 2j),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.dtype}",
)
def test_numpy_values_round_trip_here_and_in_numpy(value: Any, protocol: Any) -> None:
    """What numpy pickles is read, what is written numpy reads; numpy turns big-endian arrays into native ones."""
    expected = pickle.loads(pickle.dumps(value, protocol=protocol))
    for data in (pickle.dumps(value, protocol=protocol), dump_pickle(value, protocol=protocol)):
        for actual in (load_pickle(data, where="x"), pickle.loads(data)):
            assert isinstance(actual, type(expected))
            np.testing.assert_array_equal(actual, expected, strict=True)
            assert actual.dtype == expected.dtype


def test_arrays_of_objects_hold_inert_values() -> None:
    """An array of Python objects becomes an array of what stands for them."""
    value = np.array([1, "two", Path("three")], dtype=object)
    actual = load_pickle(pickle.dumps(value, protocol=4), where="x")
    assert actual.tolist()[:2] == [1, "two"]
    assert isinstance(actual[2], PathText)


def test_protocol_5_arrays_are_read() -> None:
    """In-band buffers of protocol 5."""
    value = np.arange(12, dtype=np.int16).reshape(3, 4)
    np.testing.assert_array_equal(load_pickle(pickle.dumps(value, protocol=5), where="x"), value, strict=True)


@pytest.mark.parametrize("protocol", [2, 4])
def test_records_round_trip(protocol: Any) -> None:
    """Every record that a pickle can contain is written and read back as itself."""
    floats = StorageRef(DTYPES["float32"], "0", "cpu", 24)
    raw = StorageRef(None, "1", "cuda:1", 16)
    tensor = TensorRef(floats, 4, (2, 3), (6, 1), DTYPES["float32"])
    attributed = TensorRef(floats, 0, (4,), (1,), DTYPES["float32"], attributes={"a": 1}, cls=Global("torch", "Tensor"))
    spec = Global("torch.distributed.tensor._dtensor_spec", "DTensorSpec").stub()
    spec.state = {"mesh": None}
    keyed = Stub.__new__(Global("m", "Key"), 1, 2)  # type: ignore[arg-type]
    keyed.state = (None, {"slot": 1})
    nested = Global("my.module", "Outer.Inner")("x", k=1) if protocol == 4 else Global("my.module", "Outer.Inner")("x")
    nested.kwargs = {}
    container = Global("collections", "deque")([])
    container.extend([1, 2, 3])
    container["k"] = "v"
    ordered = OrderedMap()
    ordered["w"] = tensor
    ordered.attributes = {"_metadata": OrderedMap()}
    default = DefaultMap(Global("builtins", "list"))
    default["a"] = [1]
    local = (None, {"_local_tensor": tensor, "_spec": spec})
    values: list[Any] = [
        tensor,
        attributed,
        TensorRef(raw, 0, (8,), (1,), DTYPES["uint16"]),
        TensorRef(floats, 0, (2,), (1,), DTYPES["float32"], requires_grad=True, is_parameter=True),
        TensorRef(floats, 0, (2,), (1,), DTYPES["float32"], True, True, True),
        MetaTensorRef(DTYPES["bfloat16"], Size((3, 4)), (4, 1)),
        SparseTensorRef("sparse_coo", (tensor, tensor), Size((4, 4)), True),
        WrapperRef(Global("torch.distributed.tensor", "DTensor"), DTYPES["float32"], Size((97, 24)), (24, 1), local),
        {keyed: tensor, nested: 1},
        container, ordered, default, Size((1, 2)), Size(), Device("cuda:0"), Device("cpu"), DTYPES["float8_e4m3fn"],
        PathText("/a/b", Global("pathlib", "PosixPath")), slice(1, None, 2), range(1, 9, 2), bytearray(b"xy"),
        bytearray(),
        Global("torch.optim.adamw", "AdamW"), OrderedMap, Size, b"", (), [], {},
    ]  # fmt: skip
    actual = load_pickle(dump_pickle(values, protocol=protocol), where="x")
    for index, (got, expected) in enumerate(zip(actual, values, strict=True)):
        assert same(got, expected), (index, got, expected)


def test_sharing_and_cycles_survive() -> None:
    """The same object twice is one object again; an object in itself, too."""
    shared = [1]
    loop: list[Any] = [shared, shared]
    loop.append((loop,))
    actual = load_pickle(dump_pickle(loop), where="x")
    assert actual[0] is actual[1]
    assert actual[2][0] is actual


def test_what_has_no_description_is_refused() -> None:
    """Objects of other kinds, records without a class, and nesting beyond the stack are no pickles."""
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for value in (object(), Fields([{}]), nested):
        with pytest.raises(Unsupported):
            dump_pickle(value)


@pytest.mark.parametrize(
    "path",
    [
        *sorted(PT_FILES.glob("*.pt")),
        *sorted(FIXTURES.glob("dcp_*/ckpt/.metadata")),
        *sorted(FIXTURES.glob("verl_*/ckpt/*rank_0.pt")),
        FIXTURES / "dcp_old_t2.1.2/model_world_size_4_rank_0.pt",
        FIXTURES / "fsdp1_per_rank_pt_2r/ckpt/model_world_size_2_rank_1.pt",
    ],
    ids=lambda path: f"{path.parts[-3]}-{path.name}",
)
def test_real_pickles_survive_being_written_again(path: Path) -> None:
    """Loading, dumping and loading a real file's pickle changes nothing."""
    whole = path.read_bytes()
    data = dump_pickle(open_file(whole, path.name)[0]) if is_legacy(whole) else pickle_of(path)
    first = load_pickle(data, where="x")
    assert same(load_pickle(dump_pickle(first, protocol=2 if data[1] == 2 else 4), where="x"), first)


@pytest.mark.parametrize("name", ["odd_zip.pt", "model_only.pt", "extra_zip.pt", "cuda_loc.pt"])
def test_tensors_are_written_as_torch_save_writes_them(name: str) -> None:
    """The pickle of torch's own file comes out again byte for byte."""
    data = pickle_of(PT_FILES / name)
    assert dump_pickle(load_pickle(data, where=name)) == data


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch announces the end of sparse and quantized tensors
@pytest.mark.parametrize("name", ["odd_zip.pt", "model_only.pt", "extra_zip.pt"])
def test_torch_reads_a_rewritten_file(name: str) -> None:
    """torch.load(weights_only=True) of our pickle in our zip equals torch.load of the original."""
    original = (PT_FILES / name).read_bytes()
    root, storage, _ = open_file(original, name)
    payloads = [storage(item.key) for item in sorted(storages(root), key=lambda item: int(item.key))]
    rewritten = _zip(dump_pickle(root), payloads)
    expected = torch.load(io.BytesIO(original), weights_only=True)
    actual = torch.load(io.BytesIO(rewritten), weights_only=True)
    assert list(actual) == list(expected)
    for key, tensor in expected.items():
        other = actual[key]
        assert (type(other), other.dtype, other.layout) == (type(tensor), tensor.dtype, tensor.layout)
        if tensor.is_nested:
            assert [part.tolist() for part in other.unbind()] == [part.tolist() for part in tensor.unbind()]
            continue
        assert other.shape == tensor.shape
        if tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized:
            assert other.stride() == tensor.stride()
            assert other.storage_offset() == tensor.storage_offset()
            assert bytes(other.untyped_storage()) == bytes(tensor.untyped_storage())
        elif tensor.is_quantized:
            assert torch.equal(other.int_repr(), tensor.int_repr())
            assert other.qscheme() == tensor.qscheme()
        elif tensor.layout is not torch.strided:
            assert torch.equal(other.to_dense(), tensor.to_dense())
    if name == "odd_zip.pt":
        assert actual["tied"].data_ptr() == actual["base"].data_ptr()


def test_torch_reads_values_beside_tensors() -> None:
    """A training checkpoint with numpy, sets, sizes and a namespace loads in torch to the same values."""
    import argparse

    root, storage, _ = open_file((PT_FILES / "train_namespace.pt").read_bytes(), "train_namespace.pt")
    del root["cfg"]  # a class of the script that wrote it
    payloads = [storage(item.key) for item in sorted(storages(root), key=lambda item: int(item.key))]
    actual = torch.load(io.BytesIO(_zip(dump_pickle(root), payloads)), weights_only=False)
    assert actual["args"] == argparse.Namespace(
        lr=0.01, hidden=24, name="tiny", lst=[1, 2], dtype=torch.bfloat16, dev=torch.device("cuda:0")
    )
    assert (type(actual["size"]), actual["size"]) == (torch.Size, torch.Size([1, 2]))
    assert (actual["set"], actual["bytes"], actual["big"], actual["complex"]) == ({1, 2}, b"abc", 2**70, 1 + 2j)
    np.testing.assert_array_equal(actual["np_arr"], np.arange(6, dtype=np.float32).reshape(2, 3), strict=True)
    assert (type(actual["np_scalar"]), type(actual["np_i64"])) == (np.float64, np.int64)


def test_plain_python_values_pass_weights_only() -> None:
    """Bytes, sets, complex numbers and empty ones use names that torch allows by default."""
    value = {"b": b"abc", "e": b"", "s": {1}, "c": 1j, "o": bytearray(b"q"), 3: (1, [2.5, None, True]), "big": 2**70}
    assert torch.load(io.BytesIO(_zip(dump_pickle(value), [])), weights_only=True) == value
