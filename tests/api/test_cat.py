from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.cat import Excerpt, cat, save_npy
from ckpt_tool.errors import NotFound, StorageError, TargetExists, UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures"
FSDP = FIXTURES / "torch/dcp_fsdp2_4r_fp32"


@pytest.mark.parametrize("index", ["", "[0:4, :]", "[-1]", "[..., 3]", "[24:26, 5:9]", "[5:5]"])
def test_slices_equal_numpy(index: str) -> None:
    """A slice across chunks of several ranks is what numpy cuts from the whole tensor."""
    whole = load_file(FSDP / "truth.safetensors")["model.lm_head.weight"]
    expected = eval(f"whole{index}", {"whole": whole})
    np.testing.assert_array_equal(cat(FSDP / "ckpt", f"model.lm_head.weight{index}").array, expected)


def test_names_with_brackets_are_names(tmp_path: Path) -> None:
    """A tensor whose name looks like a slice is found by its name."""
    save_file({"w[0]": np.arange(3.0), "w": np.arange(2.0)}, tmp_path / "a.safetensors")
    assert cat(tmp_path / "a.safetensors", "w[0]").array.tolist() == [0.0, 1.0, 2.0]
    assert cat(tmp_path / "a.safetensors", "w[1]").array.tolist() == 1.0


@pytest.mark.parametrize(
    ("what", "kind"),
    [("nothing", NotFound), ("model.lm_head.weight[0, 0, 0]", UsageError), ("model.odd2[9]", UsageError)],
)
def test_what_is_not_there(what: str, kind: type[Exception]) -> None:
    """An unknown name and a slice that does not fit are told apart."""
    with pytest.raises(kind):
        cat(FSDP / "ckpt", what)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("model.odd2[9]", "model.odd2: 9 is outside of dimension 0, which has 2 elements"),
        ("model.odd2[0, 0]", "model.odd2: 2 places in the slice, expected at most 1, the dimensions of [2]"),
    ],
)
def test_a_slice_that_does_not_fit_names_its_tensor(what: str, said: str) -> None:
    """The tensor is the place of the error."""
    with pytest.raises(UsageError, match=re.escape(said)):
        cat(FSDP / "ckpt", what)


def test_an_object_is_no_tensor() -> None:
    """Who asks for an object is told that it is one, and how it is shown."""
    with pytest.raises(NotFound, match="no tensor") as caught:
        cat(FSDP / "ckpt", "optim.param_groups.0.lr")
    assert caught.value.hint == f'it is an object: "ckpt inspect {FSDP / "ckpt"} --objects" shows its value'


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_types_that_numpy_lacks(name: str, tmp_path: Path) -> None:
    """A .npy file of such a type holds its bytes as integers, and the note says how to read it."""
    array = np.array([[1.5, -2.0], [0.25, 8.0]]).astype(getattr(ml_dtypes, name))
    path = str(tmp_path / "w.npy")
    note = save_npy(Excerpt("w", name, (2, 2), array), path)
    assert note is not None
    expression = note[note.index("numpy.load") :]
    read = eval(expression, {"numpy": np, "ml_dtypes": ml_dtypes})
    assert (read.dtype, read.tobytes()) == (array.dtype, array.tobytes())


def test_types_that_numpy_has(tmp_path: Path) -> None:
    """Other types need no note."""
    path = str(tmp_path / "w.npy")
    array = np.array([1 + 2j, 3], np.complex64)
    assert save_npy(Excerpt("w", "complex64", (2,), array), path) is None
    np.testing.assert_array_equal(np.load(path), array)


def test_files_are_not_replaced_unasked(tmp_path: Path) -> None:
    """An existing file is refused; a folder that is not there is a storage error."""
    excerpt = Excerpt("w", "int64", (1,), np.array([1]))
    (tmp_path / "w.npy").write_bytes(b"mine")
    with pytest.raises(TargetExists):
        save_npy(excerpt, str(tmp_path / "w.npy"))
    assert (tmp_path / "w.npy").read_bytes() == b"mine"
    with pytest.raises(StorageError):
        save_npy(excerpt, str(tmp_path / "nowhere/w.npy"))


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([[1, 2]], np.int8), [[1, 2]]),
        (np.array([True, False]), [True, False]),
        (np.array([1.5, np.nan, -np.inf]), [1.5, "nan", "-inf"]),
        (np.array([1 + 2j], np.complex64), [[1.0, 2.0]]),
        (np.array([1.5], ml_dtypes.bfloat16), [1.5]),
        (np.frombuffer(b"\x01\xff", "V1"), ["01", "ff"]),
        (np.array(7, np.uint64), 7),
    ],
)
def test_json_values(array: npt.NDArray[Any], expected: object) -> None:
    """Values are plain JSON: numbers, truth values, pairs for complex, text where JSON has no number."""
    document = Excerpt("w", "any", array.shape, array).to_json()
    assert document["values"] == expected
    assert json.loads(json.dumps(document, allow_nan=False)) == document
