"""Compressed parts: once, within bounds, and never more than declared."""

from __future__ import annotations

import tempfile
import zlib
from typing import IO

import pyarrow as pa
import pytest

from ckpt_tool.errors import FormatError, StorageError, Unsupported
from ckpt_tool.manifest.model import FileEntry, FileRange
from ckpt_tool.manifest.tables import FileTable
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import ReadCost
from ckpt_tool.storage.virtual.decode import DecodedStore, open_files
from tests.storage.recording import ReadCall, RecordingStore

DATA = bytes(range(256)) * 5000


def deflate(data: bytes) -> bytes:
    """A raw deflate stream."""
    encoder = zlib.compressobj(wbits=-15)
    return encoder.compress(data) + encoder.flush()


def zstd(data: bytes) -> bytes:
    """A zstd frame."""
    return bytes(pa.compress(data, "zstd", asbytes=True))


ENCODERS = {"deflate": deflate, "zstd": zstd}


def decoded(part: bytes, nbytes: int, codec: str, budget: int = 1 << 30) -> DecodedStore:
    """A store whose file ``x`` is ``part`` decoded; the part lies between other bytes."""
    inner = MemoryStore({"zip": b"head" + part + b"tail"})
    entry = FileEntry("x", nbytes, codec, FileRange("zip", 4, len(part)))
    return DecodedStore(inner, [entry], memory_budget_bytes=budget)


@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_content(codec: str, budget: int) -> None:
    """Blocks of any codec come back as one content, from memory and from the temporary file."""
    store = decoded(ENCODERS[codec](DATA), len(DATA), codec, budget)
    assert store.read("x", 0, len(DATA)) == DATA
    assert store.read("x", 1_234_567, 89) == DATA[1_234_567 : 1_234_567 + 89]
    store.close()


def test_plain_store_is_left_alone() -> None:
    """Without coded files there is nothing to wrap."""
    store = MemoryStore({"x": b""})
    assert open_files(store, FileTable((FileEntry("x", 0),)), 1) is store


def test_decoded_once() -> None:
    """However often a file is read, its part is read once, in requests of the storage's size."""
    part = deflate(DATA)
    inner = RecordingStore(
        MemoryStore({"zip": part}, cost=ReadCost(max_gap_bytes=0, max_read_bytes=3000, concurrency=4))
    )
    store = DecodedStore(
        inner, [FileEntry("x", len(DATA), "deflate", FileRange("zip", 0, len(part)))], memory_budget_bytes=1 << 30
    )
    ranges = [FileRange("x", i * 1000, 1000) for i in range(100)]
    assert b"".join(store.fetch(ranges)) == DATA[:100_000]
    expected = tuple(ReadCall("zip", i, min(3000, len(part) - i)) for i in range(0, len(part), 3000))
    assert inner.calls == expected
    assert len(expected) > 1


def four(budget: int) -> tuple[DecodedStore, RecordingStore]:
    """Files ``x0`` to ``x3`` of 1,000 bytes each, and the store around their parts."""
    parts = [deflate(bytes([i]) * 1000) for i in range(4)]
    inner = RecordingStore(MemoryStore({str(i): part for i, part in enumerate(parts)}))
    entries = [FileEntry(f"x{i}", 1000, "deflate", FileRange(str(i), 0, len(p))) for i, p in enumerate(parts)]
    return DecodedStore(inner, entries, memory_budget_bytes=budget), inner


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[IO[bytes]]:
    """Temporary files that were made."""
    files: list[IO[bytes]] = []
    real = tempfile.TemporaryFile

    def recorded(prefix: str) -> IO[bytes]:
        files.append(real(prefix=prefix))
        return files[-1]

    monkeypatch.setattr("tempfile.TemporaryFile", recorded)
    return files


def test_memory_budget(made: list[IO[bytes]]) -> None:
    """What does not fit the budget goes to one temporary file; what fits never touches it."""
    store, _ = four(2000)
    assert store.read("x0", 0, 900) + store.read("x1", 0, 900) == bytes(900) + b"\1" * 900
    assert made == []
    assert store.read("x2", 0, 900) + store.read("x3", 0, 900) == b"\2" * 900 + b"\3" * 900
    assert len(made) == 1
    assert store.read("x2", 999, 1) == b"\2"
    store.close()


def test_what_was_read_through_makes_room(made: list[IO[bytes]]) -> None:
    """A copy that reads each part once needs no temporary file; what is asked for again is decoded again."""
    store, inner = four(1000)
    for i in range(4):
        assert store.read(f"x{i}", 0, 400) + store.read(f"x{i}", 400, 600) == bytes([i]) * 1000
    assert made == []
    assert [call.path for call in inner.calls] == ["0", "1", "2", "3"]
    assert store.read("x0", 999, 1) == b"\0"
    assert [call.path for call in inner.calls] == ["0", "1", "2", "3", "0"]
    store.close()


def test_room_of_the_temporary_file_is_used_again(made: list[IO[bytes]]) -> None:
    """Parts that were read through make room there, too."""
    store, _ = four(0)
    for i in range(4):
        assert store.read(f"x{i}", 0, 1000) == bytes([i]) * 1000
    made[0].seek(0, 2)
    assert made[0].tell() <= 1000
    store.close()


def test_steps_and_slices() -> None:
    """A coded value inside of a coded container; its neighbours share the container."""
    inside = zstd(DATA)
    around = zstd(b"before" + inside + b"behind")
    inner = RecordingStore(MemoryStore({"node": around}))
    part = FileRange("node", 0, len(around))
    entries = [
        FileEntry("value", len(DATA), f"zstd|slice:6:{len(inside)}|zstd", part),
        FileEntry("plain", 6, "zstd|slice:0:6", part),
        FileEntry("none", 2_000_000, "zeros:2000000", FileRange("node", 0, 0)),
        FileEntry("beyond", 6, f"zstd|slice:{len(inside) + 9}:6", part),
    ]
    store = DecodedStore(inner, entries, memory_budget_bytes=1 << 30)
    assert store.read("value", 0, len(DATA)) == DATA
    assert store.read("plain", 0, 6) == b"before"
    assert len(inner.calls) == 1
    assert store.read("none", 1_500_000, 3) == bytes(3)
    with pytest.raises(FormatError, match="ends before byte"):
        store.read("beyond", 0, 1)


@pytest.mark.parametrize("width", [1, 2, 8])
def test_shuffled(width: int) -> None:
    """Bytes of one place of all elements stand together; what is left over stays behind."""
    content = DATA[:8000]
    planes = b"".join(content[place::width] for place in range(width))
    store = decoded(zlib.compress(planes + b"rest"[: width - 1]), 8000 + min(width - 1, 4), f"zlib|shuffle:{width}")
    assert store.read("x", 0, 8000) == content


def test_zlib() -> None:
    """Deflate with its own header and checksum."""
    store = decoded(zlib.compress(DATA), len(DATA), "zlib")
    assert store.read("x", 5, 10) == DATA[5:15]


@pytest.mark.parametrize("codec", ENCODERS)
def test_bomb(codec: str) -> None:
    """A stream of more than its declared bytes is stopped there."""
    store = decoded(ENCODERS[codec](bytes(50_000_000)), 100, codec)
    with pytest.raises(FormatError, match=r"zip:4\+\d+: decodes to more than the 100 bytes that are declared"):
        store.read("x", 0, 1)


@pytest.mark.parametrize("codec", ENCODERS)
def test_too_small(codec: str) -> None:
    """A stream of fewer than its declared bytes is an error, also where the wanted bytes are there; and stays one."""
    store = decoded(ENCODERS[codec](b"abc"), 4, codec)
    for _ in range(2):
        with pytest.raises(FormatError, match="expected 4 decoded bytes, got 3"):
            store.read("x", 0, 1)


@pytest.mark.parametrize("codec", ENCODERS)
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_damaged(codec: str, damage: str) -> None:
    """A cut stream and one that is none are format errors."""
    part = ENCODERS[codec](DATA)
    store = decoded(part[: len(part) // 2] if damage == "cut" else b"\xff" * 2000, len(DATA), codec)
    with pytest.raises(FormatError, match="zip:4"):
        store.read("x", 0, 1)


def test_trailing_bytes() -> None:
    """Bytes behind the end of a deflate stream belong to nobody."""
    store = decoded(deflate(b"abc") + b"?", 3, "deflate")
    with pytest.raises(FormatError, match="ends before its part does"):
        store.read("x", 0, 3)


def test_impossible_size() -> None:
    """More bytes than deflate can yield are refused before a byte is read."""
    with pytest.raises(FormatError, match="10 bytes of deflate cannot hold the 1,000,000 that are declared"):
        decoded(bytes(10), 1_000_000, "deflate")


def test_unknown_codec() -> None:
    """A codec that is not known is named, with those that are."""
    with pytest.raises(Unsupported, match="compressed with lzma, expected deflate or zstd"):
        decoded(b"", 0, "lzma")


def test_unknown_size() -> None:
    """A part whose size nobody recorded is measured before it is read."""
    store = decoded(zstd(DATA), -1, "zstd")
    assert store.read("x", 1000, 256) == DATA[1000:1256]
    assert store.listing().nbytes("x") == len(DATA)
    with pytest.raises(StorageError, match="expected 2 bytes, got 1"):
        store.read("x", len(DATA) - 1, 2)
