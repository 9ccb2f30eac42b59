"""OCDBT databases that lie: every number in a node is somebody's claim."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pyarrow as pa
import pytest

from ckpt_tool.checksum import crc32c
from ckpt_tool.errors import CkptError, FormatError, IntegrityError, NotFound, Unsupported
from ckpt_tool.formats.orbax.ocdbt import Inline, read_database
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import source_of

MANIFEST, NODE = 0x0CDB3A2A, 0x0CDB20DE


def varint(*values: int) -> bytes:
    """Numbers, seven bits a byte."""
    out = bytearray()
    for value in values:
        left = value
        while left > 127:
            out.append(left & 127 | 128)
            left >>= 7
        out.append(left)
    return bytes(out)


def framed(magic: int, body: bytes, *, compression: int = 0, version: int = 0, length: int | None = None) -> bytes:
    """Header, body and checksum."""
    if compression == 1:
        body = bytes(pa.compress(body, "zstd", asbytes=True))
    tail = varint(version, compression) + body
    whole = struct.pack(">I", magic) + struct.pack("<Q", length or 12 + len(tail) + 4) + tail
    return whole + struct.pack("<I", crc32c(whole))


def table(*files: tuple[str, str]) -> bytes:
    """A data file table of (base, path below it)."""
    texts = [(base + path).encode() for base, path in files]
    head = varint(len(files)) + varint(*[0] * max(len(files) - 1, 0))
    return head + varint(*map(len, texts)) + varint(*(len(base) for base, _ in files)) + b"".join(texts)


def leaf(
    entries: Sequence[tuple[bytes, bytes | tuple[int, int, int]]], *files: tuple[str, str], height: int = 0
) -> bytes:
    """A leaf of keys with inline values, or (file, offset, length)."""
    body = bytes([height]) + table(*files) + varint(len(entries)) + varint(*[0] * max(len(entries) - 1, 0))
    body += varint(*(len(key) for key, _ in entries)) + b"".join(key for key, _ in entries)
    body += varint(*(len(v) if isinstance(v, bytes) else v[2] for _, v in entries))
    body += varint(*(0 if isinstance(v, bytes) else 1 for _, v in entries))
    far = [v for _, v in entries if not isinstance(v, bytes)]
    body += varint(*(v[0] for v in far)) + varint(*(v[1] for v in far))
    return body + b"".join(v for _, v in entries if isinstance(v, bytes))


def interior(height: int, children: Sequence[tuple[bytes, int, int, int, int]], *files: tuple[str, str]) -> bytes:
    """A node of (key, shared prefix, file, offset, length)."""
    body = bytes([height]) + table(*files) + varint(len(children)) + varint(*[0] * max(len(children) - 1, 0))
    body += varint(*(len(c[0]) for c in children)) + varint(*(c[1] for c in children))
    body += b"".join(c[0] for c in children)
    for column in (2, 3, 4):
        body += varint(*(int(c[column]) for c in children))
    return body + varint(*[0] * (3 * len(children)))


def manifest(path: str, offset: int, length: int, *, height: int = 0, kind: int = 0, base: str = "") -> bytes:
    """A manifest with one version."""
    body = bytes(16) + varint(kind, 100, 1 << 20) + bytes([4]) + varint(0) + table((base, path)) + varint(1)
    body += varint(1) + bytes([height]) + varint(0, offset, length, 1, 1, 0) + bytes(8)
    return framed(MANIFEST, body + varint(0))


def database(node: bytes, height: int = 0) -> dict[str, bytes]:
    """Files of a database whose root is ``node``."""
    return {"manifest.ocdbt": manifest("d/x", 0, len(node), height=height), "d/x": node}


def read(files: dict[str, bytes]) -> dict[str, FileRange | Inline]:
    """What is read."""
    return read_database(source_of(MemoryStore(files)), "")


@pytest.mark.parametrize("compression", [0, 1])
def test_values_inline_and_elsewhere(compression: int) -> None:
    """Keys come with their values' places; paths of a child's files go on from its own."""
    node = framed(NODE, leaf([(b"a", b"value"), (b"b", (0, 3, 4))], ("", "e/v")), compression=compression)
    root = framed(NODE, interior(1, [(b"key/", 4, 0, 0, len(node))], ("p/", "d/n")))
    files = {**database(root, height=1), "p/d/n": node, "p/e/v": bytes(9)}
    found = read(files)
    assert list(found) == ["key/a", "key/b"]
    assert found["key/b"] == FileRange("p/e/v", 3, 4)
    inline = found["key/a"]
    if compression:
        assert isinstance(inline, Inline)
        assert (inline.data, inline.codec) == (b"value", "zstd")
    else:
        assert isinstance(inline, FileRange)
        assert files[inline.path][inline.offset : inline.end] == b"value"


@pytest.mark.parametrize("at", [0, 5, 12, 13, 14, 20, -5, -1])
def test_a_flipped_bit_of_a_node_is_noticed(at: int) -> None:
    """Its checksum covers header, keys and the values in it."""
    node = bytearray(framed(NODE, leaf([(b"a", b"value")])))
    node[at] ^= 16
    with pytest.raises((FormatError, IntegrityError)):
        read(database(bytes(node)))


def test_an_empty_database() -> None:
    """No root, no keys."""
    assert read({"manifest.ocdbt": manifest("", (1 << 64) - 1, (1 << 64) - 1)}) == {}


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({"manifest.ocdbt": b"hello"}, FormatError, "0cdb3a2a"),
        ({"manifest.ocdbt": manifest("d/x", 0, 9)[:-1]}, FormatError, "bytes"),
        ({"manifest.ocdbt": manifest("d/x", 0, 9)[:-1] + b"?"}, IntegrityError, "CRC-32C"),
        ({"manifest.ocdbt": framed(MANIFEST, b"", version=7)}, Unsupported, "version 7"),
        ({"manifest.ocdbt": framed(MANIFEST, b"", compression=9)}, Unsupported, "compression 9"),
        ({"manifest.ocdbt": manifest("d/x", 0, 9, kind=1)}, Unsupported, "numbered"),
        ({"manifest.ocdbt": manifest("d/x", 0, 9)}, NotFound, "missing"),
        ({"manifest.ocdbt": manifest("d/x", 0, 9), "d/x": b"12"}, FormatError, "refers to byte 9"),
        ({"manifest.ocdbt": manifest("../x", 0, 9)}, FormatError, "leaves"),
        ({"manifest.ocdbt": manifest("/etc/passwd", 0, 9)}, FormatError, "leaves"),
        (database(framed(NODE, leaf([]), length=12)), FormatError, "says it has 12"),
        (database(framed(NODE, leaf([], height=3))), FormatError, "another height"),
        (database(framed(NODE, b"\0")), FormatError, "ends nowhere"),
        (database(framed(NODE, b"\0" + varint(0) + varint(1 << 40))), FormatError, "entries in"),
        (database(framed(NODE, b"\0" + varint(1 << 40))), FormatError, "entries in"),
        (database(framed(NODE, b"\0" + b"\xff" * 30)), FormatError, "ends nowhere"),
        (database(framed(NODE, leaf([(b"k", (5, 0, 1))], ("", "v")))), FormatError, "data file 5 of 1"),
        (database(framed(NODE, leaf([(b"k", (0, 0, 1))], ("", "../v")))), FormatError, "leaves"),
        (database(framed(NODE, leaf([(b"k", (0, 0, 100))], ("", "d/x")))), FormatError, "refers to byte 100"),
        (database(framed(NODE, leaf([(b"\xff", b"")]))), FormatError, "UTF-8"),
        (database(framed(NODE, b"not zstd", compression=2)), Unsupported, "compression 2"),
        (database(b"\x0c\xdb\x20\xde" + bytes(20)), FormatError, "says it has 0"),
    ],
)
def test_lies(files: dict[str, bytes], kind: type[CkptError], message: str) -> None:
    """One clear error for each."""
    with pytest.raises(kind, match=message):
        read(files)


def test_nodes_that_multiply() -> None:
    """A few nodes that each name the next one a hundred times would be 100^8 nodes: refused by their bytes."""
    files: dict[str, bytes] = {}
    node = framed(NODE, leaf([(b"k", b"v")]))
    for height in range(1, 9):
        files[f"d/{height - 1}"] = node
        children = [(b"%02d" % i, 2, 0, 0, len(node)) for i in range(100)]
        node = framed(NODE, interior(height, children, ("", f"d/{height - 1}")))
    files.update(database(node, height=8))
    with pytest.raises(FormatError, match="more bytes than all files have"):
        read(files)


def test_a_bomb_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that decodes to more than any node has."""
    monkeypatch.setattr("ckpt_tool.formats.orbax.ocdbt._MAX_NODE_NBYTES", 1 << 16)
    with pytest.raises(FormatError, match="decodes to more than 65,536 bytes"):
        read(database(framed(NODE, bytes(1 << 20), compression=1)))
