"""Headers of safetensors files, against byte literals, hostile bytes and the reference library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, load_file, save

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import CkptError, FormatError, Unsupported
from ckpt_tool.formats._safetensors.header import (
    PEER_MAX_HEADER_NBYTES,
    Entry,
    Header,
    build_header,
    entry_fields,
    header_nbytes,
    parse_header,
)
from tests.formats.safetensors.places import file_bytes

U8, F32 = DTYPES["uint8"], DTYPES["float32"]
NATIVE = [d for d in DTYPES.values() if d.safetensors]


def parsed(raw: bytes) -> Header:
    """The header of a whole file."""
    return parse_header(raw, len(raw), "f.safetensors")


def entry(dtype: str, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    """One entry as JSON has it."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_the_format_in_66_bytes() -> None:
    """A file with one tensor, byte by byte: the length, the JSON, spaces up to a multiple of 64, two bytes."""
    data, header = build_header([("w", U8, (2,))], {})
    expected = b'8\0\0\0\0\0\0\0{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}   '
    assert (data, len(data)) == (expected, 64)
    assert header == Header((Entry("w", U8, (2,), 0, 2),), {}, 64)
    assert parsed(data + b"ab") == header


def test_the_library_s_own_bytes_are_read() -> None:
    """A literal written by safetensors 0.8."""
    raw = save({"b": np.array([1, 2], np.int16), "a": np.array(3.0, np.float32)}, {"k": "v"})
    header = parsed(raw)
    assert [(e.name, e.dtype.name, e.shape, e.start, e.end) for e in header.entries] == [
        ("a", "float32", (), 0, 4),
        ("b", "int16", (2,), 4, 8),
    ]
    assert header.metadata == {"k": "v"}


names = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[tuple[str, DType, tuple[int, ...]]]:
    """Tensors that a file can hold."""
    found = []
    for name in draw(st.lists(names, unique=True, max_size=6)):
        dtype, shape = draw(st.sampled_from(NATIVE)), draw(shapes)
        if dtype.name == "float4_e2m1fn_x2" and not shape:
            shape = (3,)
        if dtype.bits % 8:
            shape = (*shape, 4)
        found.append((name, dtype, shape))
    return found


@given(tensor_lists(), st.dictionaries(names, st.text(st.characters(codec="utf-8"), max_size=8), max_size=3))
def test_parse_gives_back_what_was_built(
    tensors: list[tuple[str, DType, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    """``parse(build(tensors))`` is the same header, with the payload at a multiple of 64."""
    data, header = build_header(tensors, metadata)
    again = parsed(data + bytes(header.payload_nbytes))
    assert len(data) % 64 == 0
    assert sorted(again.entries, key=lambda e: e.name) == sorted(header.entries, key=lambda e: e.name)
    assert (again.metadata, again.data_start, again.aliases) == (metadata, len(data), ())


@given(st.data())
def test_the_library_reads_what_was_built(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever types numpy has, the reference reader sees the same names, shapes and values."""
    plain = [d for d in NATIVE if d.numpy in {"float64", "float32", "float16", "int64", "int8", "uint16", "bool"}]
    rows = data.draw(st.lists(st.tuples(names, st.sampled_from(plain), shapes), unique_by=lambda r: r[0], max_size=5))
    head, header = build_header(rows, {"format": "pt"})
    arrays = {n: np.ones(s, d.as_numpy()) * (i % 2) for i, (n, d, s) in enumerate(rows)}
    arrays = {n: a.astype(d.as_numpy()) for (n, d, _), a in zip(rows, arrays.values(), strict=True)}
    path = tmp_path_factory.mktemp("st") / "m.safetensors"
    path.write_bytes(head + b"".join(arrays[e.name].tobytes() for e in header.entries))
    loaded = load_file(path)
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (loaded[name].dtype, loaded[name].shape) == (array.dtype, array.shape)
        assert loaded[name].tobytes() == array.tobytes()


def test_new_and_unknown_types(tmp_path: Path) -> None:
    """R95: F8_E8M0 is known, F4 counts two to a byte, F6 packs, and X9 is opaque bytes of the width it takes."""
    listed = {
        "scale": entry("F8_E8M0", [4], 0, 4),
        "packed": entry("F4", [2, 8], 4, 12),
        "odd": entry("F4", [2, 3], 12, 15),
        "six": entry("F6_E2M3", [4], 15, 18),
        "new": entry("X9", [2, 3], 18, 30),
    }
    header = parsed(file_bytes(listed, bytes(30)))
    assert {e.name: (e.dtype.name, e.dtype.bits, e.shape) for e in header.entries} == {
        "scale": ("float8_e8m0fnu", 8, (4,)),
        "packed": ("float4_e2m1fn_x2", 8, (2, 4)),
        "odd": ("F4", 4, (2, 3)),
        "six": ("float6_e2m3fn", 6, (4,)),
        "new": ("X9", 16, (2, 3)),
    }
    again, _ = build_header([(e.name, e.dtype, e.shape) for e in header.entries], {})
    assert json.loads(again[8:]) == listed
    known = {k: listed[k] for k in ("scale", "packed")}
    (tmp_path / "m.safetensors").write_bytes(file_bytes(known, bytes(12)))
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.get_slice("packed").get_dtype() == "F4"


def test_types_without_a_name_are_refused() -> None:
    """complex128 has no name in the format, and a packed scalar no last dimension."""
    with pytest.raises(Unsupported, match="safetensors has no complex128"):
        entry_fields(DTYPES["complex128"], (1,))
    with pytest.raises(Unsupported, match="no packed fp4 scalar"):
        entry_fields(DTYPES["float4_e2m1fn_x2"], ())
    with pytest.raises(Unsupported, match="no whole number of bytes"):
        build_header([("w", DTYPES["float6_e2m3fn"], (3,))], {})


def test_two_names_of_the_same_bytes_are_kept_apart() -> None:
    """R89: the reference reader refuses the file; here both names are readable, and reported."""
    raw = file_bytes({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 0, 2), "c": entry("U8", [1], 2, 3)}, b"xyz")
    header = parsed(raw)
    assert header.aliases == (("a", "b"),)
    assert [e.name for e in header.entries] == ["a", "b", "c"]


CONTRADICTIONS = [
    ("overlap", {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, 3, r"'b' starts 1 byte before 'a' ends"),
    ("hole", {"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, 3, r"1 byte before 'b', of no tensor"),
    ("hole at the start", {"a": entry("U8", [1], 1, 2)}, 2, r"1 byte before 'a', of no tensor"),
    ("trailing", {"a": entry("U8", [1], 0, 1)}, 3, r"2 bytes after the last tensor, of none"),
    ("trailing, no tensor", {}, 3, r"3 bytes after the last tensor"),
    ("cut", {"a": entry("U8", [9], 0, 9)}, 4, r"'a' ends at byte 77, the file has 72 \(5 missing\)"),
    ("length", {"a": entry("F32", [2], 0, 4)}, 4, r"F32 of shape \[2\] takes 8 bytes, its data_offsets span 4"),
    ("bits", {"a": entry("F4", [3], 0, 2)}, 2, r"F4 of shape \[3\] takes 12 bits, which fill no whole bytes, its"),
    ("packed", {"a": entry("F4", [2, 8], 0, 4)}, 4, r"F4 of shape \[2, 8\] takes 8 bytes, its data_offsets span 4"),
    ("backwards", {"a": entry("U8", [0], 3, 1)}, 3, "must be ascending counts"),
    ("negative", {"a": entry("U8", [-1, -1], 0, 1)}, 1, "must be ascending counts"),
    ("bool", {"a": entry("U8", [True], 0, 1)}, 1, "must be ascending counts"),
    ("huge", {"a": entry("U8", [2**63], 0, 1)}, 1, "must be ascending counts"),
    ("overflow", {"a": entry("U8", [2**40, 2**40], 0, 1)}, 1, r"more than 2\*\*63 elements"),
    ("dimensions", {"a": entry("U8", [1] * 65, 0, 1)}, 1, "has 65 dimensions, expected at most 64"),
    ("uneven", {"a": entry("X9", [3], 0, 4)}, 4, "'a': unknown dtype 'X9': 4 bytes do not divide into 3"),
    ("no shape", {"a": {"dtype": "U8", "data_offsets": [0, 1]}}, 1, "expected dtype, shape and two data_offsets"),
    ("list", {"a": [1]}, 1, "expected dtype, shape and two data_offsets"),
    ("three offsets", {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, 1, "expected dtype, shape and"),
    ("dtype type", {"a": entry(8, [1], 0, 1)}, 1, "has the wrong type"),  # type: ignore[arg-type]
    ("metadata", {"__metadata__": {"a": 1}}, 0, "expected __metadata__ to map strings to strings"),
    ("surrogate", b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, "expected dtype, shape"),
    ("twice", b'{"a":{},"a":{}}', 0, "'a' is listed twice in the header"),
    ("not JSON", b"{nope}", 0, "the header is not JSON"),
    ("NaN", b'{"a":NaN}', 0, "NaN in the header"),
    ("not UTF-8", b'{"\xff":1}', 0, "the header is not JSON"),
    ("deep", b'{"a":' + b"[" * 100_000, 0, "the header is not JSON"),
]


@pytest.mark.parametrize(
    ("listed", "payload", "message"), [c[1:] for c in CONTRADICTIONS], ids=[c[0] for c in CONTRADICTIONS]
)
def test_contradictions_are_named(listed: Any, payload: int, message: str) -> None:
    """Each way in which a header can be wrong is one error with its numbers."""
    with pytest.raises(FormatError, match=message) as caught:
        parsed(file_bytes(listed, bytes(payload)))
    assert (caught.value.where or "").startswith("f.safetensors")


@pytest.mark.parametrize("name", ["overlap", "hole", "trailing", "length", "cut", "twice", "not JSON", "metadata"])
def test_the_library_refuses_them_too(name: str, tmp_path: Path) -> None:
    """What is refused here is refused by the reference reader; nothing valid is lost."""
    listed, payload = next((c[1], c[2]) for c in CONTRADICTIONS if c[0] == name)
    (tmp_path / "m.safetensors").write_bytes(file_bytes(listed, bytes(payload)))
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "m.safetensors")


def test_a_cut_header_is_a_cut_file() -> None:
    """A file that ends inside its header says how much is missing."""
    raw = file_bytes({"a": entry("U8", [1], 0, 1)}, b"x")
    with pytest.raises(FormatError, match=r"the header ends at byte 68, the file has 40 \(28 missing\)"):
        parse_header(raw[:40], 40, "f")


def test_headers_beyond_the_library_s_limit_are_read() -> None:
    """R85: 101 MB of header is valid; the length alone decides, no limit of 100 MB."""
    raw = file_bytes(json.dumps({"a": entry("U8", [1], 0, 1)}).encode() + b" " * 101_000_000, b"x")
    assert parsed(raw).data_start - 8 > PEER_MAX_HEADER_NBYTES
    assert header_nbytes((1 << 30).to_bytes(8, "little") + b"{", (1 << 30) + 8, "f") == (1 << 30) + 8
    with pytest.raises(FormatError, match="expected the length of a JSON header"):
        header_nbytes(((1 << 30) + 1).to_bytes(8, "little") + b"{", 1 << 40, "f")


VALID = file_bytes(
    {"__metadata__": {"k": "v"}, "a": entry("F32", [2, 1], 0, 8), "b": entry("BF16", [], 8, 10)}, bytes(range(10))
)


@given(
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(VALID)),
    st.sampled_from([b"", b"[", b'"', b",", b"9" * 5000, b"{}", b"\\u"]),
)
def test_damage_never_gives_anything_but_an_error_of_ours(
    flips: list[tuple[int, int]], at: int, inserted: bytes
) -> None:
    """Any bytes give a header or a `CkptError`."""
    raw = bytearray(VALID)
    for position, value in flips:
        raw[position] = value
    raw[at:at] = inserted
    try:
        header = parsed(bytes(raw))
    except CkptError:
        return
    assert header.data_start + header.payload_nbytes == len(raw)


@given(st.binary(max_size=600))
def test_any_bytes_are_refused_politely(raw: bytes) -> None:
    """Files of something else are `FormatError`s."""
    with pytest.raises(FormatError, match=r"."):
        parsed(raw)


def test_a_header_must_be_given_whole() -> None:
    """The caller reads as much as `header_nbytes` says."""
    raw = file_bytes({"a": entry("U8", [1], 0, 1)}, b"x")
    with pytest.raises(FormatError, match="header of 68 bytes given only to byte 20"):
        parse_header(raw[:20], len(raw), "f")


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_names_that_no_header_can_hold_are_refused(name: str) -> None:
    """The first would be read as the file's metadata, the second has no UTF-8 form."""
    with pytest.raises(Unsupported, match="can call no tensor"):
        build_header([(name, U8, (2,))], {})


def test_metadata_of_null_is_none() -> None:
    """As the library reads it."""
    text = b'{"__metadata__":null,"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    data = len(text).to_bytes(8, "little") + text
    assert set(load(data + b"x")) == {"w"}
    assert parse_header(data, len(data) + 1, "f").metadata == {}
