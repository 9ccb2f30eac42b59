"""Archives that lie: what the directory and the pickle say is not believed where the local headers say otherwise."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ckpt_tool.errors import CkptError, FormatError
from ckpt_tool.formats.torch_save.reader import READER
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import all_rows, assemble, source_of
from tests.formats.recorded import checksums_of

NUMEL = 20_000


def members_of(**tensors: int) -> dict[str, bytes]:
    """The members of a torch.save file; each tensor is filled with a number."""
    buffer = io.BytesIO()
    torch.save({name: torch.full((NUMEL,), number, dtype=torch.int64) for name, number in tensors.items()}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(
    members: dict[str, bytes],
    *,
    gap: int = 0,
    header_name: Callable[[str], str] = lambda name: name,
    extra: bytes = b"",
) -> bytes:
    """A zip of stored members, with ``gap`` bytes behind each payload and other names in local headers."""
    out, directory = bytearray(), bytearray()
    for name, data in members.items():
        crc, offset = zlib.crc32(data), len(out)
        stated = header_name(name).encode()
        sizes = (crc, len(data), len(data))
        out += struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, *sizes, len(stated), len(extra)) + stated + extra
        out += data + b"\xee" * gap
        directory += struct.pack(
            "<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, *sizes, len(name), 0, 0, 0, 0, 0, offset
        )
        directory += name.encode()
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(members), len(members), len(directory), len(out), 0)
    return bytes(out + directory + end)


@pytest.mark.parametrize("gap", [0, 16, 100])
def test_local_headers_correct_the_reckoned_place(gap: int) -> None:
    """Where a writer leaves gaps, the reckoned offset is wrong and ``resolve`` moves it to where the bytes are."""
    store = MemoryStore({"a.pt": zipped(members_of(a=1, b=2, c=3), gap=gap, extra=b"\x42\x46\x03\x00abc")})
    manifest = READER.read(source_of(store))
    row = manifest.chunks.rows_of(manifest.tensor_id("b"))
    assert manifest.chunks.flags[row].tolist() == [ChunkFlag.UNRESOLVED]
    chunks = READER.resolve(source_of(store), manifest, all_rows(manifest))
    assert bool((chunks.offset[row] != manifest.chunks.offset[row]).all()) is bool(gap)
    assert assemble(store, manifest, chunks, "b").data == np.full(NUMEL, 2).tobytes()
    for checksum in checksums_of(READER, source_of(store), manifest):
        where = checksum.where
        assert zlib.crc32(store.read(where.path, where.offset, where.length)) == checksum.crc32


def test_a_local_header_of_another_member_is_refused() -> None:
    """A local header must be that of the member that the directory points with."""
    swapped = {"archive/data/0": "archive/data/1", "archive/data/1": "archive/data/0"}
    store = MemoryStore({"a.pt": zipped(members_of(a=1, b=2), header_name=lambda name: swapped.get(name, name))})
    manifest = READER.read(source_of(store))
    with pytest.raises(FormatError, match=r"that of 'archive/data/1', expected 'archive/data/0'"):
        READER.resolve(source_of(store), manifest, all_rows(manifest))


def test_a_missing_storage_is_named() -> None:
    """A tensor whose storage is not in the archive is an error that names both."""
    members = members_of(a=1, b=2)
    del members["archive/data/1"]
    with pytest.raises(FormatError, match="'b' needs storage '1', which is not in the file"):
        READER.read(source_of(MemoryStore({"a.pt": zipped(members)})))


def test_a_short_storage_is_refused() -> None:
    """A storage with fewer bytes than its tensor needs is an error with both numbers."""
    members = members_of(a=1)
    members["archive/data/0"] = members["archive/data/0"][:-8]
    with pytest.raises(FormatError, match="elements end at byte 160,000 of storage '0', which has 159,992") as caught:
        READER.read(source_of(MemoryStore({"a.pt": zipped(members)})))
    assert caught.value.where == "a.pt: a"


@pytest.mark.parametrize("text", [b"middle", b"", b"x" * 100])
def test_an_unknown_byte_order_is_refused(text: bytes) -> None:
    """Only little and big are byte orders."""
    members = members_of(a=1) | {"archive/byteorder": text}
    with pytest.raises(FormatError, match="byteorder is"):
        READER.read(source_of(MemoryStore({"a.pt": zipped(members)})))


def test_no_flipped_byte_escapes_as_a_stray_exception() -> None:
    """With any byte of directory or pickle inverted, reading gives a manifest or an error of this package."""
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(4), "n": {"b": torch.ones(2)}, "step": 3}, buffer)
    data = buffer.getvalue()
    for at in range(0, len(data), 7):
        broken = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
        source = source_of(MemoryStore({"a.pt": broken}))
        try:
            READER.probe(source)
            manifest = READER.read(source)
            READER.resolve(source, manifest, all_rows(manifest))
            list(READER.check(source, manifest))
            list(READER.checksums(source, manifest))
        except CkptError as error:
            assert error.message  # noqa: PT017 - whether it raises depends on the byte
