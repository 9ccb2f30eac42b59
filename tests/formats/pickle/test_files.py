"""Real torch.save files, read without torch, against what torch held when it wrote them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckpt_tool.dtypes import DType
from ckpt_tool.formats._pickle.tensors import (
    MetaTensorRef,
    QuantizedTensorRef,
    SparseTensorRef,
    TensorRef,
)
from ckpt_tool.formats._pickle.walk import tensor_leaves
from tests.formats.pickle.materialize import PT_FILES, array_of, open_file


def _truth(name: str) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (dtype name or empty, shape, bytes) from a truth file, read as raw bytes."""
    data = (PT_FILES / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        fqn: (row["dtype"], tuple(row["shape"]), data[8 + length :][slice(*row["data_offsets"])])
        for fqn, row in header.items()
    }


@pytest.mark.parametrize(
    ("file", "truth"),
    [
        ("odd_zip.pt", "odd.truth.safetensors"),
        ("odd_legacy.pt", "odd.truth.safetensors"),
        ("model_only.pt", "model_only.truth.safetensors"),
        ("model_only_proto4.pt", "model_only.truth.safetensors"),
        ("repacked_deflate.pt", "model_only.truth.safetensors"),
        ("train_namespace.pt", "train_namespace.truth.safetensors"),
    ],
)
def test_every_tensor_equals_its_truth_bit_for_bit(file: str, truth: str) -> None:
    """Dtypes, views, strides, conjugates, zip and legacy, stored and deflated: the bytes are those that torch held."""
    root, storage, big_endian = open_file((PT_FILES / file).read_bytes(), file)
    actual = {}
    for path, tensor in tensor_leaves(root):
        assert isinstance(tensor, TensorRef)
        array = array_of(tensor, storage(tensor.storage.key), big_endian=big_endian)
        actual[".".join(str(piece) for piece in path)] = (tensor.shape, array.tobytes())
    expected = {}
    for fqn, (_, shape, raw) in _truth(truth).items():
        name, _, as_bytes = fqn.partition("#bytes:")
        expected[name] = (actual[name][0] if as_bytes else shape, raw)
    assert {name: actual.get(name) for name in expected} == expected
    assert set(actual) - set(expected) <= {"rng"}


@pytest.mark.parametrize(
    "file", ["align4096.pt", "cuda_loc.pt", "cuda_loc_legacy.pt", "no_crc32.pt", "from_buffer.pt", "bigendian.pt"]
)
def test_writer_options_do_not_change_values(file: str) -> None:
    """Alignment, device tags, missing checksums and byte order leave 0..5 what it is."""
    root, storage, big_endian = open_file((PT_FILES / file).read_bytes(), file)
    tensor = root["w"]
    actual = array_of(tensor, storage(tensor.storage.key), big_endian=big_endian)
    np.testing.assert_array_equal(actual, np.arange(6, dtype=np.float32).reshape(2, 3), strict=True)


def test_skipped_data_is_there_and_zero() -> None:
    """A file written with skip_data has room for its payload, and zeros in it."""
    root, storage, _ = open_file((PT_FILES / "skip_data.pt").read_bytes(), "skip_data.pt")
    assert array_of(root["w"], storage("0")).tolist() == [[0.0] * 3] * 2


def test_special_tensors_are_described() -> None:
    """Sparse, quantized, nested, meta and attributed tensors become records with their parts."""
    root, storage, _ = open_file((PT_FILES / "extra_zip.pt").read_bytes(), "extra_zip.pt")
    sparse = root["sparse_coo"]
    assert isinstance(sparse, SparseTensorRef)
    assert (sparse.layout, sparse.shape, sparse.is_coalesced) == ("sparse_coo", (4, 4), True)
    indices, values = (array_of(part, storage(part.storage.key)) for part in sparse.parts)
    assert (indices.tolist(), values.tolist()) == ([[0, 1, 2, 3]] * 2, [1.0] * 4)
    quantized = root["q_per_channel"]
    assert isinstance(quantized, QuantizedTensorRef)
    assert (quantized.scheme, quantized.axis, quantized.tensor.dtype.name) == ("per_channel_affine", 0, "quint8")
    assert array_of(quantized.scale, storage(quantized.scale.storage.key)).tolist() == pytest.approx([0.1, 0.2, 0.3])
    meta = root["meta"]
    assert isinstance(meta, MetaTensorRef)
    assert (meta.shape, meta.dtype.name) == ((3, 4), "float32")
    assert root["buffer_cls"].attributes == {"persistent": True, "_is_buffer": True}
    assert root["fp4x2"].dtype.name == "float4_e2m1fn_x2"
    assert root["nested_tensor"].cls.last == "_rebuild_nested_tensor"


def test_values_beside_tensors_are_plain_data() -> None:
    """A training checkpoint's other values: numpy, sets, big numbers, namespaces and user classes."""
    root, _, _ = open_file((PT_FILES / "train_namespace.pt").read_bytes(), "train_namespace.pt")
    np.testing.assert_array_equal(root["np_arr"], np.arange(6, dtype=np.float32).reshape(2, 3), strict=True)
    assert (type(root["np_scalar"]), root["np_scalar"]) == (np.float64, 0.5)
    assert (type(root["np_i64"]), root["np_i64"]) == (np.int64, 7)
    assert (root["size"], root["set"], root["bytes"], root["none"]) == ((1, 2), {1, 2}, b"abc", None)
    assert (root["big"], root["tuple"], root["complex"]) == (2**70, (1, 2.0, "x"), 1 + 2j)
    args = root["args"]
    assert args.cls.qualified == "argparse.Namespace"
    assert args.attribute("lr") == 0.01
    assert args.attribute("dev") == "cuda:0"
    assert isinstance(args.attribute("dtype"), DType)
    assert root["cfg"].cls.qualified == "__main__.UserCfg"
    assert root["cfg"].attribute("b") == "x"


def test_a_whole_module_keeps_its_tensors() -> None:
    """A pickled nn.Module is walked through stubs to the parameters of a state dict."""
    root, storage, _ = open_file((PT_FILES / "whole_module.pt").read_bytes(), "whole_module.pt")
    truth = load_file(PT_FILES / "model_only.truth.safetensors")
    actual = {}
    for path, tensor in tensor_leaves(root):
        assert isinstance(tensor, TensorRef)
        name = ".".join(str(piece) for piece in path if piece not in ("_modules", "_parameters", "_buffers"))
        actual[name] = array_of(tensor, storage(tensor.storage.key))
    assert set(truth) == set(actual)
    assert all(np.array_equal(actual[name], truth[name]) for name in truth)


def test_tied_tensors_are_one_object_in_one_storage() -> None:
    """Views of one tensor name one storage, and the same tensor under two keys is one record."""
    root, _, _ = open_file((PT_FILES / "odd_zip.pt").read_bytes(), "odd_zip.pt")
    assert root["tied"] is root["base"]
    assert {root[name].storage.key for name in ("base", "transposed", "slice_cols", "strided")} == {"0"}
    assert (root["transposed"].strides, root["transposed"].is_contiguous) == ((1, 8), False)
    assert root["slice_rows"].is_contiguous
