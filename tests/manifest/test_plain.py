"""Plain values survive JSON with their types."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.errors import CkptError, FormatError, Unsupported
from ckpt_tool.manifest.plain import from_plain, is_plain, to_plain
from tests.manifest.made import plain_values


class Pair(NamedTuple):
    """A subclass of tuple."""

    a: int


@given(plain_values)
def test_round_trip(value: Any) -> None:
    """``from_plain(json(to_plain(v)))`` is ``v``; repr tells 1 from True and 1.0, and NaN equals itself."""
    text = json.dumps(to_plain(value), allow_nan=False)
    assert repr(from_plain(json.loads(text))) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset({"a"}),
        OrderedDict([(2, "b"), (1, "a")]),
        {"$": "dict"},
        {"a": {"$": 1}},
        {(1, 2): 3, "x": 4},
    ],
)
def test_other_containers(value: Any) -> None:
    """Sets, ordered dicts and dicts that look like our own tags come back as they are."""
    again = from_plain(json.loads(json.dumps(to_plain(value))))
    assert (type(again), again) == (type(value), value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.array([], dtype=np.int8).reshape(0, 4),
        np.array(["a", "bcd"]),
        np.array(["2024-01-01"], dtype="datetime64[D]"),
        np.array([1, 2], dtype=">i4"),
        np.array([1.5, -2], dtype=ml_dtypes.bfloat16),
        np.array(7),
    ],
)
def test_arrays(array: np.ndarray[Any, Any]) -> None:
    """Type, byte order, shape and elements survive; the copy is writable."""
    again = from_plain(json.loads(json.dumps(to_plain(array))))
    assert (again.dtype, again.shape, again.tolist()) == (array.dtype, array.shape, array.tolist())
    assert again.flags.writeable


@pytest.mark.parametrize("scalar", [np.float64(1.5), np.int8(-3), np.bool_(True), ml_dtypes.bfloat16(2)])
def test_numpy_scalars_stay_numpy_scalars(scalar: Any) -> None:
    """A numpy scalar is no Python number, even where it is a subclass of one."""
    again = from_plain(json.loads(json.dumps(to_plain(scalar))))
    assert (type(again), again) == (type(scalar), scalar)


@pytest.mark.parametrize("value", [object(), Pair(1), np.array([object()]), {"a": [1, range(3)]}, 3 + 0j == 3, print])
def test_what_has_no_plain_form(value: Any) -> None:
    """Anything else is refused, unless it is plain after all."""
    assert is_plain(value) == isinstance(value, bool)


def test_the_message_says_where() -> None:
    """The place inside the object is named."""
    with pytest.raises(Unsupported, match=r"cfg\['a'\]\[1\] is a builtins.range, which has no plain form"):
        to_plain({"a": [1, range(3)]}, "cfg")


def test_a_list_in_itself_is_refused() -> None:
    """Rather than never ending."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(Unsupported, match="nested more than 200 deep"):
        to_plain(value)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers() | st.sampled_from(["tuple", "ndarray", "<f4", "O", "AA==", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "items", "value", "dtype", "shape"]), inner, max_size=4)
    ),
    max_leaves=10,
)


@given(json_values)
def test_any_json_is_a_value_or_an_error_of_ours(found: Any) -> None:
    """Damaged tags are `FormatError`s."""
    try:
        from_plain(found)
    except CkptError as error:
        assert isinstance(error, FormatError)  # noqa: PT017 - most draws are values


def test_arrays_of_objects_are_never_made() -> None:
    """A tag that asks for pointers is refused."""
    with pytest.raises(FormatError, match="a numpy array of 'O' has no plain form"):
        from_plain({"$": "ndarray", "dtype": "O", "shape": [1], "value": "AAAAAAAAAAA="})
