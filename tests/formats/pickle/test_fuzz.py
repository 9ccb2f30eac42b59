"""Damaged pickles and zips: whatever the damage, the answer is a value or one of the package's errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.errors import CkptError
from ckpt_tool.formats._pickle.legacy import read_legacy
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.walk import leaves, plain, storages
from ckpt_tool.formats._zip.directory import read_directory, read_member
from ckpt_tool.formats._zip.head import parse_item_head
from tests.formats.pickle.materialize import FIXTURES, PT_FILES, pickle_of, reader

_PICKLES = [
    pickle_of(PT_FILES / "odd_zip.pt"),
    pickle_of(PT_FILES / "extra_zip.pt"),
    pickle_of(PT_FILES / "train_namespace.pt")[-2_500:],
    pickle_of(PT_FILES / "model_only_proto4.pt"),
    (FIXTURES / "dcp_no_flatten/ckpt/.metadata").read_bytes(),
    pickle_of(Path(FIXTURES / "verl_2d/ckpt/model_world_size_4_rank_1.pt")),
]
_EDITS = st.lists(
    st.tuples(st.sampled_from(["set", "cut", "copy"]), st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6
)


def _damaged(data: bytes, edits: list[tuple[str, float, int]]) -> bytes:
    out = bytearray(data)
    for kind, where, value in edits:
        position = int(where * (len(out) - 1)) if out else 0
        if kind == "set" and out:
            out[position] = value
        elif kind == "cut":
            del out[position : position + value % 9]
        else:
            out[position:position] = out[position // 2 : position // 2 + value % 9]
    return bytes(out)


def _survives(read: Callable[[], Any]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy deprecates some of the dtype codes that damage makes
            root = read()
            for _ in leaves(root, max_values=50_000):
                pass
            plain(root)
            storages(root)
    except CkptError:
        pass


@settings(max_examples=600)
@given(st.sampled_from(_PICKLES), _EDITS)
def test_damaged_pickles_raise_package_errors_only(data: bytes, edits: list[tuple[str, float, int]]) -> None:
    """Flipped, lost and repeated bytes of real pickles."""
    _survives(lambda: load_pickle(_damaged(data, edits), where="x"))


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_random_opcodes_raise_package_errors_only(body: bytes) -> None:
    """Bytes that are no pickle at all, behind a valid start and with an end."""
    _survives(lambda: load_pickle(b"\x80\x04" + body + b".", where="x"))


_OPCODES = [b"(", b"0", b"1", b"2", b"N", b"R", b"a", b"b", b"}", b"d", b"]", b"e", b"l", b"o", b")", b"t", b"u", b"s",
            b"Q", b"\x81", b"\x85", b"\x86", b"\x87", b"\x8f", b"\x90", b"\x91", b"\x92", b"\x93", b"\x94", b"K\x01",
            b"h\x00", b"h\x01", b"q\x05", b"\x8c\x01a", b"C\x02ab", b"ctorch\nfloat32\n", b"ctorch\nSize\n",
            b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"cm\nC\n", b"cbuiltins\nset\n",
            b"cnumpy\ndtype\n", b"cnumpy._core.multiarray\n_reconstruct\n", b"cnumpy._core.multiarray\nscalar\n",
            b"cbuiltins\ngetattr\n", b"cpathlib\nPosixPath\n", b"ctorch\ndevice\n", b"ccollections\ndefaultdict\n",
            b"\x8c\x02f4", b"\x8c\x07storage", b"ctorch\nFloatStorage\n"]  # fmt: skip


@settings(max_examples=600)
@given(st.lists(st.sampled_from(_OPCODES), max_size=40))
def test_programs_of_real_opcodes_raise_package_errors_only(opcodes: list[bytes]) -> None:
    """Every constructor meets arguments of every kind."""
    _survives(lambda: load_pickle(b"\x80\x04" + b"".join(opcodes) + b".", where="x"))


@settings(max_examples=200)
@given(_EDITS)
def test_damaged_legacy_streams_raise_package_errors_only(edits: list[tuple[str, float, int]]) -> None:
    """Flipped, lost and repeated bytes of a real legacy file."""
    data = _damaged((PT_FILES / "odd_legacy.pt").read_bytes(), edits)
    _survives(lambda: read_legacy(reader(data), len(data), where="x").root)


@settings(max_examples=400)
@given(st.sampled_from(["from_buffer.pt", "extra_zip.pt", "torchscript.pt", "bigendian.pt"]), _EDITS, st.booleans())
def test_damaged_zips_raise_package_errors_only(name: str, edits: list[tuple[str, float, int]], at_end: bool) -> None:
    """Flipped, lost and repeated bytes anywhere, or in the directory alone."""
    whole = (PT_FILES / name).read_bytes()
    split = len(whole) - 900 if at_end else 0
    data = whole[:split] + _damaged(whole[split:], edits)
    read = reader(data)
    parse_item_head(data[:1024])
    try:
        directory = read_directory(read, len(data), where="x")
        for member in directory.members.values():
            read_member(read, member, where="x")
    except CkptError:
        pass


@pytest.mark.parametrize("data", _PICKLES[:2])
def test_undamaged_ones_load(data: bytes) -> None:
    """The fuzzed pickles are whole to begin with."""
    assert load_pickle(data, where="x") is not None
