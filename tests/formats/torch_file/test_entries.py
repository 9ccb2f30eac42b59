"""Entries of nested objects, and the way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._pickle.nodes import Global
from ckpt_tool.formats._pickle.same import same_value
from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats._torch_file.entries import entries_of
from ckpt_tool.formats._torch_file.nested import nest

FLOAT = dtype("float32")


def tensor(key: str = "0") -> TensorRef:
    """A tensor of two elements."""
    return TensorRef(StorageRef(FLOAT, key, "cpu", 2), 0, (2,), (1,), FLOAT)


LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.builds(tensor), st.tuples(st.integers()))
KEYS = st.one_of(st.text("ab.", max_size=3), st.integers(0, 3))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(st.dictionaries(KEYS, inner, min_size=1, max_size=2), min_size=1, max_size=3),
    ),
    max_leaves=12,
)


@given(tree=st.dictionaries(st.text("abc", min_size=1, max_size=2), TREES, min_size=1, max_size=3))
def test_nesting_undoes_entries(tree: dict[str, Any]) -> None:
    """Paths lead back to the same object; names of dicts with integer keys tell them from lists."""
    found = entries_of(tree)
    assert len({entry.fqn for entry in found.items}) == len(found.items)
    assert nest([(entry.path, entry.value) for entry in found.items], int_keyed=found.int_keyed) == tree


def module(buffers: dict[str, Any], unsaved: set[str], **modules: Any) -> Any:
    """A pickled ``torch.nn.Module``."""
    parts = {"_parameters": {"w": tensor()}, "_buffers": buffers, "_modules": modules}
    made = Global("my.model", "Net").stub(1)
    made.state = {"training": True, **parts, "_non_persistent_buffers_set": unsaved}
    return made


def test_buffers_that_no_state_dict_has() -> None:
    """Of a pickled module those stay out, whatever their module's depth, and a note names them."""
    inner = module({"mask": tensor("1"), "kept": tensor("2"), "none": None}, {"mask", "none"})
    found = entries_of({"model": module({"temp": tensor("3")}, {"temp"}, inner=inner)})
    assert [entry.fqn for entry in found.items] == ["model.w", "model.inner.w", "model.inner.kept"]
    left = "buffers that are in no state dict (persistent=False) are left out: model.temp, model.inner.mask"
    assert left in found.notes


def test_an_object_that_contains_itself_ends() -> None:
    """A dict inside of itself is entered once."""
    loop: dict[str, Any] = {"w": tensor()}
    loop["self"] = loop
    assert [entry.fqn for entry in entries_of(loop).items] == ["w"]


def test_a_few_bytes_cannot_spell_out_without_end() -> None:
    """Lists of the same list, doubled again and again, are an error and not an hour."""
    inner: list[Any] = [{"w": tensor()}]
    for _ in range(40):
        inner = [{"a": inner, "b": inner}]
    with pytest.raises(FormatError, match="contain each other"):
        entries_of({"x": inner})


def test_keys_of_other_kinds_are_text() -> None:
    """A path holds text and integers only; True is no integer."""
    found = entries_of({True: 1, (1, "a"): 2, 0.5: 3, None: 4})
    assert [entry.path for entry in found.items] == [("True",), ("[1, 'a']",), ("0.5",), ("None",)]


def test_one_path_for_two_values_is_refused() -> None:
    """Two values at one place do not fit into a nested dict."""
    with pytest.raises(Unsupported, match="two values have the keys"):
        nest([(("a",), 1), (("a",), 2)])
    with pytest.raises(Unsupported, match="cannot stand beside others"):
        nest([((), 1), (("a",), 2)])


def stub(name: str, **state: Any) -> Any:
    """An object of an unknown class."""
    made = Global("some.module", name).stub(1)
    made.__setstate__(state)
    return made


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": [1, (2.0, "y")]}, {"x": [1, (2.0, "y")]}, True),
        (float("nan"), float("nan"), True),
        (1, True, False),
        (1.0, 1, False),
        ([1, 2], [1], False),
        ({"a": 1}, {"b": 1}, False),
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(3).astype(np.int32), False),
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), True),
        (stub("A", x=1), stub("A", x=1), True),
        (stub("A", x=1), stub("A", x=2), False),
        (stub("A", x=1), stub("B", x=1), False),
    ],
)
def test_values_are_compared_by_what_they_say(a: Any, b: Any, *, expected: bool) -> None:
    """Objects are equal when class and state are, numbers only when their type is the same too."""
    assert same_value(a, b) is expected
