"""Patterns and slices, as people type them."""

from __future__ import annotations

import fnmatch
from types import EllipsisType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import BadIndex, NotFound, UsageError
from ckpt_tool.manifest.model import Manifest, TensorMeta
from ckpt_tool.manifest.select import expand_braces, matching, parse_slice, select, slice_box
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable
from tests.strategies import shapes

NAMES = {
    "model.layers.0.q_proj.weight": "model",
    "model.layers.0.k_proj.weight": "model",
    "model.layers.11.q_proj.weight": "model",
    "lm_head.weight": "model",
    "optimizer.state.lm_head.weight.exp_avg": "optimizer",
    "rng": "other",
    "odd[0]{x}": "other",
}
FQNS = tuple(NAMES)


def manifest() -> Manifest:
    """A manifest of `NAMES`, without bytes."""
    table = TensorTable.from_records(
        TensorMeta(fqn, DTYPES["uint8"], (1,), section, (fqn,)) for fqn, section in NAMES.items()
    )
    chunks = ChunkTable.from_columns(tensor=[], offsets=[], sizes=[], file=[], offset=[], length=[])
    return Manifest("test", "somewhere", table, chunks, FileTable())


def chosen(*include: str, exclude: tuple[str, ...] = (), sections: tuple[str, ...] = ()) -> list[str]:
    """Names that are selected."""
    return [FQNS[row] for row in select(manifest(), include, exclude, sections)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", FQNS),
        ("model.*", FQNS[:3]),
        ("*.weight", FQNS[:4]),
        ("*.layers.0.{q,k}_proj.*", FQNS[:2]),
        ("*.layers.?.*", FQNS[:2]),
        ("*.layers.[0-1]*.q_proj.weight", (FQNS[0], FQNS[2])),
        ("*.layers.[!0]*.q_proj.weight", (FQNS[2],)),
        ("re:layers\\.\\d\\.", FQNS[:2]),
        ("re:^lm_head", (FQNS[3],)),
        ("odd[0]{x}", (FQNS[6],)),
        ("odd[[]0[]]*", (FQNS[6],)),
        ("rng", ("rng",)),
    ],
)
def test_patterns(pattern: str, expected: tuple[str, ...]) -> None:
    """Globs cross dots and cover the whole name, ``re:`` finds anywhere, a name fits itself."""
    assert chosen(pattern) == list(expected)


def test_choices_combine() -> None:
    """Any include, no exclude, one of the sections; rows stay in table order."""
    assert chosen("lm*", "model.*", exclude=("*q_proj*",)) == [FQNS[1], FQNS[3]]
    assert chosen(sections=("optimizer", "other")) == list(FQNS[4:])
    assert chosen("*lm_head*", sections=("optimizer",)) == [FQNS[4]]
    assert chosen() == list(FQNS)


def test_nothing_matches_names_near_ones() -> None:
    """A typing error is an error, with what was perhaps meant; also in an exclude."""
    with pytest.raises(NotFound, match=r"no tensor matches 'lm_haed.weight' among 7") as caught:
        chosen("lm_haed.weight")
    assert (caught.value.hint or "").startswith("did you mean lm_head.weight or ")
    with pytest.raises(NotFound) as caught:
        chosen("rng", exclude=("K_PROJ",))
    assert caught.value.hint == "did you mean model.layers.0.k_proj.weight"
    with pytest.raises(NotFound) as caught:
        chosen("model")
    assert (caught.value.hint or "").startswith("'model.*' fits ")
    with pytest.raises(NotFound) as caught:
        chosen("zzz*")
    assert caught.value.hint == 'list the names with "ckpt inspect somewhere --flat"'
    with pytest.raises(NotFound, match="none of 7 tensors is left: include rng; section model"):
        chosen("rng", sections=("model",))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("re:(", "is no regular expression"),
        ("{a", "opens a brace that it does not close"),
        ("a}", "closes a brace that it does not open"),
        ("a}{b", "closes a brace that it does not open"),
        ("{1,2,3,4,5,6,7,8,9,0}" * 5, "stands for more than 10,000 names"),
        ("[z-a]", "has a character range that cannot be read"),
    ],
)
def test_patterns_that_cannot_be_read(pattern: str, said: str) -> None:
    """Each says what is wrong with it."""
    with pytest.raises(UsageError, match=said):
        chosen(pattern)


def test_an_unknown_section() -> None:
    """The hint lists the three."""
    with pytest.raises(UsageError, match="'weights' is no section") as caught:
        chosen(sections=("weights",))
    assert caught.value.hint == "one of: model optimizer other"


@given(st.text("ab.*?[]!-", max_size=6), st.lists(st.text("ab.!]-[*", max_size=4), max_size=4))
def test_globs_are_those_of_the_shell(pattern: str, names: list[str]) -> None:
    """Without braces a glob means what it means to ``fnmatch``, and a name always fits itself."""
    try:
        actual = matching(pattern, names)
    except UsageError:
        return  # a reversed range, which fnmatch takes for one that matches nothing
    expected = [i for i, name in enumerate(names) if fnmatch.fnmatchcase(name, pattern) or name == pattern]
    assert actual == expected


@given(st.lists(st.lists(st.text("ab", max_size=2), min_size=1, max_size=3), max_size=3))
def test_braces_are_a_product(choices: list[list[str]]) -> None:
    """``{a,b}x{c,d}`` is each of the first with each of the second."""
    pattern = "x".join("{" + ",".join(options) + "}" for options in choices)
    expected = [""]
    for i, options in enumerate(choices):
        expected = [head + ("x" if i else "") + option for head in expected for option in options]
    assert expand_braces(pattern) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w", ("w", ())),
        ("w[3]", ("w", (3,))),
        ("w[0:4, :]", ("w", (slice(0, 4), slice(None)))),
        ("w[..., -1]", ("w", (Ellipsis, -1))),
        ("a[0].b[ 1 : -2 ]", ("a[0].b", (slice(1, -2),))),
        ("w[::1]", ("w", (slice(None),))),
        ("w]", ("w]", ())),
    ],
)
def test_slices_are_read(text: str, expected: Any) -> None:
    """The last brackets are the slice; spaces do not count."""
    assert parse_slice(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("w[::2]", "has a step in '::2'"),
        ("w[1:2:3:4]", "has a step in"),
        ("w[a]", "'a' in 'w.a.' is no whole number"),
        ("w[1.5]", "is no whole number"),
        ("w[]", "has an empty place"),
        ("w[1,]", "has an empty place"),
        ("w[..., ...]", 'has "..." twice'),
        ("[1]", "names no tensor"),
    ],
)
def test_slices_that_are_no_box(text: str, said: str) -> None:
    """Each is a usage error with an example."""
    with pytest.raises(UsageError, match=said) as caught:
        parse_slice(text)
    assert "NAME[0:4, :]" in (caught.value.hint or "")


@given(st.data())
def test_a_slice_means_what_it_means_to_numpy(data: st.DataObject) -> None:
    """``array[index] == array[box][rest]``, or both refuse it."""
    shape = data.draw(shapes(3, 5))
    bound, step = st.none() | st.integers(-7, 7), st.none() | st.integers(-3, 3).filter(bool)
    items: st.SearchStrategy[slice | int | EllipsisType] = st.builds(slice, bound, bound, step) | st.integers(-6, 6)
    index: list[slice | int | EllipsisType] = data.draw(st.lists(items, max_size=4))
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), Ellipsis)
    array = np.arange(int(np.prod(shape))).reshape(shape)
    try:
        expected = array[tuple(index)]
    except IndexError:
        with pytest.raises(BadIndex):
            slice_box(tuple(index), shape)
        return
    box, rest = slice_box(tuple(index), shape)
    actual = array[box.slices][rest]
    assert (actual.shape, actual.tolist()) == (np.shape(expected), np.asarray(expected).tolist())


def test_types_are_chosen_by_name() -> None:
    """``dtype:`` and a glob; one that fits nothing names the types that are here."""
    for spelling in ("u*", "uint8", "u8", "U8"):
        assert chosen(f"dtype:{spelling}") == list(FQNS)
    with pytest.raises(NotFound, match="none of 7 tensors is left"):
        chosen(exclude=("dtype:uint8",))
    with pytest.raises(NotFound, match="no tensor matches 'dtype:bf16'") as caught:
        chosen("dtype:bf16")
    assert caught.value.hint == "its types: uint8"
