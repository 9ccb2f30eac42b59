"""Walks and previews of loaded objects."""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import json
import pickle
import uuid
from typing import Any

import numpy as np
import pytest

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.nodes import Fields, Global, OrderedMap, Size
from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats._pickle.walk import leaves, plain, storages, tensor_leaves
from tests.formats.pickle.materialize import PT_FILES, open_file

_STORAGE = StorageRef(DTYPES["float32"], "0", "cpu", 12)
_TENSOR = TensorRef(_STORAGE, 0, (3, 4), (4, 1), DTYPES["float32"])


def test_paths_keep_integers_and_text_apart() -> None:
    """Key 0, key '0' and position 0 give paths that differ in type where the pickle's keys do."""
    root = {
        "state": {0: {"step": 1}, "0": 2},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        (1, "a"): 3,
        True: 4,
        None: 5,
    }
    assert list(leaves(root)) == [
        (("state", 0, "step"), 1),
        (("state", "0"), 2),
        (("groups", 0, "lr"), 0.1),
        (("groups", 0, "betas", 0), 0.9),
        (("groups", 0, "betas", 1), 0.99),
        (("(1, a)",), 3),
        (("True",), 4),
        (("None",), 5),
    ]


def test_tensors_are_told_from_other_leaves() -> None:
    """Each leaf is a tensor or a value; empty containers count, objects contribute what they hold."""
    stub = Global("m", "C").stub(7)
    stub.state = (None, {"w": _TENSOR})
    stub["k"] = 1
    stub.append(2)
    root = {"a": stub, "b": [], "c": Fields([{"d": _TENSOR}]), "e": _TENSOR}
    assert [path for path, _ in tensor_leaves(root)] == [("a", "w"), ("c", "d"), ("e",)]
    values = [leaf for leaf in leaves(root) if leaf[1] is not _TENSOR]
    assert values == [(("a", "args", 0), 7), (("a", "k"), 1), (("a", 0), 2), (("b",), [])]
    assert len(list(leaves(root))) == 7
    assert storages(root) == [_STORAGE]


def test_shared_parts_are_walked_on_each_path_and_cycles_once() -> None:
    """A state dict under two names gives both; a list in itself ends."""
    shared = {"w": _TENSOR}
    loop: list[Any] = [1]
    loop.append(loop)
    root = {"model": shared, "ema": shared, "loop": loop}
    assert [path for path, _ in leaves(root)] == [("model", "w"), ("ema", "w"), ("loop", 0)]


def test_too_many_values_are_refused() -> None:
    """The bound counts every value on the way."""
    with pytest.raises(FormatError, match="more than 9 values"):
        list(leaves(list(range(9)), max_values=9))


def test_a_preview_is_json() -> None:
    """Tensors, arrays, stubs, odd numbers and keys become text that says what they are."""
    enum = Global("megatron.core.enums", "ModelType")(1)
    namespace = Global("argparse", "Namespace").stub()
    namespace.state = {"lr": 0.1}
    value = {
        "w": _TENSOR, 0: np.arange(3), "0": np.float32(0.5), "e": enum, "args": namespace, "d": DTYPES["bfloat16"],
        "nan": float("nan"), "big": 10**400, "bytes": b"x" * 100, "size": Size((1, 2)), "map": OrderedMap(), "set": {1},
        "cls": Global("torch.optim", "AdamW"),
    }  # fmt: skip
    actual = json.loads(json.dumps(plain(value), allow_nan=False))
    assert actual == {
        "w": "<tensor float32 [3, 4]>",
        "0": "<numpy int64 [3]>",
        "0 (str)": 0.5,
        "e": "<megatron.core.enums.ModelType args=(1)>",
        "args": {"class": "argparse.Namespace", "state": {"lr": 0.1}},
        "d": "torch.bfloat16",
        "nan": "nan",
        "big": "<int of 1,329 bits>",
        "bytes": "<100 bytes>",
        "size": [1, 2],
        "map": {},
        "set": [1],
        "cls": "<torch.optim.AdamW>",
    }


def test_a_preview_is_cut_and_says_so() -> None:
    """Long containers and texts are counted, not spelled out; a value within itself is named."""
    loop: dict[str, Any] = {}
    loop["me"] = loop
    assert plain(list(range(5)), max_items=2) == [0, 1, "... 3 more"]
    assert plain({1: 1, 2: 2}, max_items=1) == {"1": 1, "...": "1 more"}
    assert plain(loop) == {"me": "<itself>"}
    assert plain("x" * 3_000) == "x" * 2_000 + "... 1,000 more"


_MOMENT = dt.datetime(2026, 11, 30, 4, 46, 7, 890, tzinfo=None)  # noqa: DTZ001 pickled without a zone


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (_MOMENT, "2026-11-30 04:46:07.000890"),
        (_MOMENT.date(), "2026-11-30"),
        (_MOMENT.time(), "04:46:07.000890"),
        (dt.timedelta(days=-1, seconds=5), "-1 day, 0:00:05"),
        (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (decimal.Decimal("1.50"), "1.50"),
        (fractions.Fraction(1, 3), "1/3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_dates_numbers_and_identifiers_are_shown_as_usual(value: Any, text: str, protocol: int) -> None:
    """They stay inert, but a preview shows what Python would."""
    assert plain(load_pickle(pickle.dumps([value], protocol=protocol), where="x")) == [text]


def test_values_that_only_look_well_known_are_shown_as_objects() -> None:
    """Wrong parts of a date or a number give the stub's own text."""
    for cls, args in (("datetime", (b"\xff" * 10,)), ("datetime", (1,)), ("timedelta", (1 << 80, 0, 0)), ("date", ())):
        made = Global("datetime", cls)(*args)
        assert "datetime" in json.dumps(plain(made))
    assert "Fraction" in json.dumps(plain(Global("fractions", "Fraction")("9" * 101)))


@pytest.mark.parametrize("name", ["train_namespace.pt", "extra_zip.pt", "whole_module.pt", "odd_zip.pt"])
def test_real_files_have_previews(name: str) -> None:
    """Whatever torch.save writes can be shown."""
    root, _, _ = open_file((PT_FILES / name).read_bytes(), name)
    assert json.dumps(plain(root), allow_nan=False)
