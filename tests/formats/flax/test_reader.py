"""The reader of Flax's MessagePack on what flax.serialization wrote, and on bytes that lie."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.errors import CkptError, FormatError, Unsupported
from ckpt_tool.formats.flax.reader import READER
from ckpt_tool.formats.flax.walk import walk
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import ReaderTests, source_of
from tests.formats.zoo import CHECKPOINTS, case
from tests.reports.made import as_bytes


class TestFlax(ReaderTests):
    """A training state, one with arrays in pieces, a model in two files."""

    reader = READER
    reader_import = "ckpt_tool.formats.flax.reader:READER"
    cases = (
        case("flax_state", max_read_requests=3, max_resolve_requests=0),
        case("flax_pieces", "ckpt/checkpoint_7", max_read_requests=4, max_resolve_requests=0),
        case("flax_parts", max_read_requests=3, max_resolve_requests=0),
    )


def test_values_that_are_no_arrays() -> None:
    """Numbers, text, bytes, complex numbers and what is empty are objects."""
    with open_checkpoint(CHECKPOINTS / "flax_state/ckpt") as checkpoint:
        assert checkpoint.objects() == {
            "opt_state.1": {}, "step": 7, "name": "run", "done": False, "c": 1 + 2j, "lr": 0.1, "none": None,
            "key": b"\1\2",
        }  # fmt: skip


def test_export_of_a_model(tmp_path: Path) -> None:
    """As safetensors, under the names that Flax has."""
    source = CHECKPOINTS / "flax_pieces/ckpt/checkpoint_7"
    export(source, tmp_path / "m.safetensors", include=["params.*"], names="source", durable=False)
    truth = {fqn: tensor for fqn, tensor in as_bytes(source).items() if fqn.startswith("params.")}
    assert as_bytes(tmp_path / "m.safetensors") == truth


def read(data: bytes) -> Any:
    """What is read of a file."""
    return READER.read(source_of(MemoryStore({"a.msgpack": data})))


def array(shape: bytes = b"\x91\x02", name: bytes = b"\xa7float32", data: bytes = b"\xc4\x08" + bytes(8)) -> bytes:
    """An array as an extension."""
    inner = b"\x93" + shape + name + data
    return b"\xc7" + bytes([len(inner)]) + b"\x01" + inner


def test_the_builder_is_right() -> None:
    """The bytes that the next tests break are an array when whole."""
    assert read(b"\x81\xa1x" + array()).tensor("x").shape == (2,)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x81", "are left"),
        (b"\x81\xa1x", "are left"),
        (b"\x81\xa1x" + array()[:-1], "are left"),
        (b"\x81\xa1x" + array() + b"\xc0", "1 byte follows the value"),
        (b"\x81\xa1x\xdf\xff\xff\xff\xff", "are left"),
        (b"\x81\xa1x\xdd\xff\xff\xff\xff", "are left"),
        (b"\x81\xa1x\xc6\xff\xff\xff\xff", "are left"),
        (b"\x81\xa1x\xdb\xff\xff\xff\xff" + bytes(9), "text of 4,294,967,295|are left"),
        (b"\x81\xa1x\xc1", "begins nothing"),
        (b"\x81\x90\xc0", "is no name"),
        (b"\x82\xa1x\xc0\xa1x\xc0", "there twice"),
        (b"\x81\xa1x" + b"\x91" * 300 + b"\xc0", "nested deeper"),
        (b"\x81\xa1x" + array(shape=b"\x91\x03"), "takes 12 bytes, got 8"),
        (b"\x81\xa1x" + array(shape=b"\x91\xff"), "shape"),
        (b"\x81\xa1x" + array(shape=b"\x92" + b"\xcf" + b"\x7f" * 8 + b"\xcf" + b"\x7f" * 8), "shape"),
        (b"\x81\xa1x" + array(shape=b"\x02"), "without shape"),
        (b"\x81\xa1x\xc7\x01\x01\x90", "without shape"),
        (b"\x81\xa1x\xc7\x02\x01\x90\x90", "holds another thing"),
        (b"\x81\xa1x\xd5\x02\x91\x00", "complex"),
    ],
)
def test_lies(data: bytes, message: str) -> None:
    """One clear error for each, and no memory is taken for what a number claims."""
    with pytest.raises(FormatError, match=message):
        read(data)


def test_what_flax_does_not_write() -> None:
    """Other extensions and element types are named."""
    with pytest.raises(Unsupported, match="extension of type 9"):
        read(b"\x81\xa1x\xd4\x09\x00")
    with pytest.raises(Unsupported, match="elements of the type 'object'"):
        read(b"\x81\xa1x" + array(name=b"\xa6object"))


def chunked(shape: bytes, *counts: int) -> bytes:
    """An array in pieces of float32."""
    pieces = b"".join(
        bytes([0xA1, 48 + i])
        + array(b"\x91" + bytes([n]), data=b"\xc4" + bytes([4 * n]) + struct.pack(f"<{n}f", *range(n)))
        for i, n in enumerate(counts)
    )
    head = b"\x83\xb9__msgpack_chunked_array__\xc3\xa5shape" + shape
    return b"\x81\xa1x" + head + b"\xa6chunks" + bytes([0x80 | len(counts)]) + pieces


def test_pieces_that_do_not_add_up() -> None:
    """They must fill the shape, in order."""
    assert read(chunked(b"\x82\xa10\x02\xa11\x03", 4, 2)).tensor("x").shape == (2, 3)
    for shape in (b"\x81\xa10\x07", b"\x81\xa11\x06", b"\x81\xa10\xff", b"\x06"):
        with pytest.raises(FormatError, match=r"pieces|shape"):
            read(chunked(shape, 4, 2))


def test_many_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of nothing but small values is no checkpoint."""
    monkeypatch.setattr("ckpt_tool.formats.flax.walk._MAX_VALUES", 1000)
    data = b"\xdc\x07\xd0" + b"\xc0" * 2000
    with pytest.raises(FormatError, match="more parts"):
        walk(lambda offset, length: data[offset : offset + length], len(data), "a")


@pytest.mark.parametrize("kept", [1, 10, 60, 200, 500, 570])
def test_cut(kept: int) -> None:
    """Wherever the file ends early."""
    data = (CHECKPOINTS / "flax_state/ckpt/checkpoint_7.msgpack").read_bytes()[:kept]
    with pytest.raises(CkptError):
        read(data)
