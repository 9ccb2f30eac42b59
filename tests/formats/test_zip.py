"""torch's zip container: directories and heads of real files, layouts byte for byte, and zips that lie."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import skip_data

from ckpt_tool.checksum import crc32
from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import CkptError, FormatError, IntegrityError, Unsupported, UsageError
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats._zip.directory import Read, is_big_endian, payload_offset, read_directory, read_member
from ckpt_tool.formats._zip.head import parse_item_head
from ckpt_tool.formats._zip.layout import Member, ZipLayout, item_layout, torch_members
from tests.formats.pickle.materialize import FIXTURES, PT_FILES, file_reader, reader

_REAL = [path for path in sorted(PT_FILES.glob("*.pt")) if path.read_bytes()[:2] == b"PK"]
_STORED = [path for path in _REAL if path.stem not in ("repacked_deflate", "bigendian", "torchscript", "no_crc32")]


def _items(folder: str) -> list[tuple[Path, int, int]]:
    """File, offset and length of every zip in the ``.distcp`` files of a real checkpoint."""
    root = FIXTURES / folder / "ckpt"
    rows = load_pickle((root / ".metadata").read_bytes(), where=folder).attribute("storage_data").values()
    return [(root / row.attribute("relative_path"), row.attribute("offset"), row.attribute("length")) for row in rows]


def _relaid(read: Read, nbytes: int) -> bytes:
    """The zip laid out again from its members' names, lengths and checksums, and its payloads put in."""
    directory = read_directory(read, nbytes, where="x")
    stored = {name: read_member(read, member, where="x") for name, member in directory.members.items()}
    is_data = {name: "/data/" in name and "/.data/" not in name for name in stored}
    members = [Member(name, len(data), None if is_data[name] else data) for name, data in stored.items()]
    alignment = int(stored.get(directory.root + ".storage_alignment", b"64"))
    layout = ZipLayout(members, alignment=alignment)
    out = bytearray(layout.nbytes)
    crc32s = [directory.members[name].crc32 for name in stored if is_data[name]]
    for offset, part in layout.heads + layout.tail(crc32s):
        out[offset : offset + len(part)] = part
    for member, offset in zip(members, layout.payload_offsets, strict=True):
        out[offset : offset + member.nbytes] = stored[member.name]
    return bytes(out)


@pytest.mark.parametrize("path", _REAL, ids=lambda path: path.name)
def test_the_directory_agrees_with_zipfile(path: Path) -> None:
    """Names, sizes, checksums and payload of every member."""
    data = path.read_bytes()
    read = reader(data)
    directory = read_directory(read, len(data), where=path.name)
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        assert list(directory.members) == [info.filename for info in infos]
        for info, member in zip(infos, directory.members.values(), strict=True):
            assert (member.nbytes, member.crc32, member.header_offset) == (info.file_size, info.CRC, info.header_offset)
            if info.CRC:
                assert read_member(read, member, where=path.name) == archive.read(info)
    assert directory.root == f"{path.stem}/" or path.stem in ("repacked_deflate", "bigendian", "from_buffer")
    assert directory.is_torchscript == (path.stem == "torchscript")
    assert is_big_endian(read, directory, where=path.name) == (path.stem == "bigendian")


@pytest.mark.parametrize("path", _STORED, ids=lambda path: path.name)
def test_a_layout_is_torchs_byte_for_byte(path: Path) -> None:
    """Names, lengths and checksums of a real file give its every byte."""
    data = path.read_bytes()
    assert _relaid(reader(data), len(data)) == data


@pytest.mark.parametrize("folder", ["dcp_old_t2.1.2", "dcp_threads2", "dcp_no_flatten", "dcp_ddp_dedup"])
def test_heads_and_layouts_of_items_are_exact(folder: str) -> None:
    """In every item of torch 2.1 and 2.13, 1 KiB tells what the directory tells, and the layout is the item's."""
    n_heads = 0
    for path, start, nbytes in _items(folder):
        data = path.read_bytes()[start : start + nbytes]
        read = reader(data)
        directory = read_directory(read, nbytes, where="x", tail_nbytes=1_024)
        pickled, payload = directory.record("data.pkl"), directory.record("data/0")
        assert pickled is not None
        head = parse_item_head(data[:1_024])
        if head is not None:
            n_heads += 1
            assert head.pickle == read_member(read, pickled, where="x")
            assert head.payload_offset == (payload_offset(read, payload, where="x") if payload else None)
            assert (head.root, head.is_big_endian) == (directory.root, False)
        assert _relaid(read, nbytes) == data
    assert n_heads >= len(_items(folder)) - 1


def test_a_small_zip_costs_one_read() -> None:
    """The directory of an item is in its last kilobyte; a long one costs a second read."""
    for name, n_expected in (("from_buffer.pt", 1), ("train_namespace.pt", 2)):
        data = (PT_FILES / name).read_bytes()
        reads: list[int] = []

        def read(offset: int, length: int, data: bytes = data, reads: list[int] = reads) -> bytes:
            reads.append(length)
            return data[offset : offset + length]

        read_directory(read, len(data), where=name, tail_nbytes=1_024)
        assert len(reads) == n_expected


def test_heads_that_do_not_fit_are_left_to_the_directory() -> None:
    """Cut, foreign, damaged or empty heads give None."""
    data = (PT_FILES / "from_buffer.pt").read_bytes()
    assert parse_item_head(data[:1_024]) is not None
    damaged = bytearray(data)
    damaged[64 + 40] ^= 1
    for head in (b"", data[:20], data[:300], data[:600], data[1:1_024], bytes(damaged), b"PK\x03\x04" + bytes(100)):
        assert parse_item_head(head) is None


def _written(pickle: bytes, payloads: list[bytes], **options: Any) -> bytes:
    layout = ZipLayout(torch_members(pickle, [len(payload) for payload in payloads], **options), **{
        key: value for key, value in options.items() if key == "alignment"
    })  # fmt: skip
    out = bytearray(layout.nbytes)
    for offset, part in layout.heads + layout.tail([crc32(payload) for payload in payloads]):
        out[offset : offset + len(part)] = part
    for offset, payload in zip(layout.payload_offsets[4:], payloads, strict=False):
        out[offset : offset + len(payload)] = payload
    return bytes(out)


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_torch_and_zipfile_read_what_is_laid_out(alignment: int) -> None:
    """Testzip finds no wrong CRC; torch.load and its C++ reader find every record, empty ones too."""
    floats = TensorRef(StorageRef(DTYPES["float32"], "0", "cpu", 6), 0, (2, 3), (3, 1), DTYPES["float32"])
    empty = TensorRef(StorageRef(DTYPES["int64"], "1", "cpu", 0), 0, (0, 4), (4, 1), DTYPES["int64"])
    data = _written(dump_pickle({"w": floats, "e": empty}), [struct.pack("<6f", *range(6)), b""], alignment=alignment)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert loaded["e"].shape == (0, 4)
    native = torch._C.PyTorchFileReader(io.BytesIO(data))
    assert native.get_record("data/0") == struct.pack("<6f", *range(6))
    assert native.get_record_offset("data/0") % alignment == 0
    read = reader(data)
    assert read_directory(read, len(data), where="x").is_torch
    head = parse_item_head(data[: 4 * alignment + 1_024])
    assert head is not None


def test_an_item_is_what_torch_save_writes() -> None:
    """Pickle and container of one tensor equal torch.save's to a file object, but for the random identifier."""
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    stream = io.BytesIO()
    torch.save(tensor, stream)
    expected = stream.getvalue()
    ours = TensorRef(StorageRef(DTYPES["bfloat16"], "0", "cpu", 12), 0, (3, 4), (4, 1), DTYPES["bfloat16"])
    layout = item_layout(dump_pickle(ours), (24,))
    assert layout.nbytes == len(expected)
    identifier = expected.index(b"serialization_id")
    for offset, part in layout.heads:
        actual = expected[offset : offset + len(part)]
        n_compared = identifier - offset if offset < identifier < offset + len(part) else len(part)
        assert actual[:n_compared] == part[:n_compared]


def _sparse_zip64(folder: Path) -> Path:
    """A real torch file with a storage of 4 GiB and 64 bytes that is a hole."""
    path = folder / "zip64.pt"
    with skip_data():
        torch.save({"a": torch.empty(2**32 + 64, dtype=torch.uint8), "b": torch.ones(3)}, path)
    return path


def test_zip64_is_read_and_laid_out_as_torch_does(tmp_path: Path) -> None:
    """Beyond 4 GiB: directory, head, payload offsets, and every byte around the payloads."""
    path = _sparse_zip64(tmp_path)
    read, nbytes, descriptor = file_reader(path)
    try:
        directory = read_directory(read, nbytes, where="x")
        big, small = directory.record("data/0"), directory.record("data/1")
        assert big is not None
        assert small is not None
        assert (big.nbytes, payload_offset(read, big, where="x")) == (2**32 + 64, 768)
        head = parse_item_head(read(0, 1_024))
        assert head is not None
        assert head.payload_offset == 768
        members = [
            Member(name, member.nbytes, None if member in (big, small) else read_member(read, member, where="x"))
            for name, member in directory.members.items()
        ]
        layout = ZipLayout(members)
        assert layout.nbytes == nbytes
        assert payload_offset(read, small, where="x") == layout.payload_offsets[5]
        for offset, part in layout.heads + layout.tail([big.crc32, small.crc32]):
            assert read(offset, len(part)) == part
    finally:
        os.close(descriptor)


def test_torch_reads_a_zip64_that_was_laid_out(tmp_path: Path) -> None:
    """Torch maps a file of 4 GiB that was written here, and finds the tensor behind the hole."""
    big = TensorRef(StorageRef(DTYPES["uint8"], "0", "cpu", 2**32 + 1), 0, (2**32 + 1,), (1,), DTYPES["uint8"])
    small = TensorRef(StorageRef(DTYPES["float32"], "1", "cpu", 3), 0, (3,), (1,), DTYPES["float32"])
    layout = ZipLayout(torch_members(dump_pickle({"a": big, "b": small}), [2**32 + 1, 12]))
    payload = struct.pack("<3f", 1, 2, 3)
    path = tmp_path / "ours.pt"
    with path.open("wb") as file:
        file.truncate(layout.nbytes)
        for offset, part in (*layout.heads, *layout.tail([0, crc32(payload)]), (layout.payload_offsets[5], payload)):
            file.seek(offset)
            file.write(part)
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded["a"].shape == (2**32 + 1,)
    assert loaded["b"].tolist() == [1.0, 2.0, 3.0]
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/data/1") == payload


def test_more_members_than_16_bits_count() -> None:
    """Seventy thousand empty members: the short count is saturated, the ZIP64 one is right."""
    layout = ZipLayout([Member(f"archive/data/{key}", 0) for key in range(70_000)])
    out = bytearray(layout.nbytes)
    for offset, part in layout.heads + layout.tail([0] * 70_000):
        out[offset : offset + len(part)] = part
    assert len(read_directory(reader(bytes(out)), len(out), where="x").members) == 70_000


def test_a_layout_checks_what_it_is_given() -> None:
    """Lengths that differ from the bytes, checksums too few, alignments that no extra field can fill."""
    with pytest.raises(UsageError):
        ZipLayout([Member("a", 2, b"x")])
    layout = ZipLayout([Member("a", 2)])
    with pytest.raises(UsageError):
        layout.tail([])
    with pytest.raises(UsageError):
        ZipLayout([], alignment=1 << 16)


def test_items_of_a_kind_share_their_layout() -> None:
    """A layout is computed once for items of equal shape; only checksums differ."""
    layout = item_layout(b"x" * 250, (100,))
    assert item_layout(b"x" * 250, (100,)) is layout
    assert layout.tail([1]) != layout.tail([2])


def _patched(data: bytes, offset: int, raw: bytes) -> bytes:
    return data[:offset] + raw + data[offset + len(raw) :]


def _plain_zip(**options: Any) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02N.")
        archive.writestr("a/data/0", b"12345678" * 8)
    return stream.getvalue()


def _refused(data: bytes, error: type[CkptError], match: str) -> None:
    with pytest.raises(error, match=match):
        _read_all(data)


def _read_all(data: bytes) -> None:
    read = reader(data)
    for member in read_directory(read, len(data), where="x").members.values():
        read_member(read, member, where="x")


def test_local_headers_that_lie_are_refused() -> None:
    """A local header of another name, method or place; one that leaves no room."""
    data = _plain_zip()
    second = data.index(b"PK\x03\x04", 4)
    _refused(_patched(data, second + 30, b"b"), FormatError, "the local header is that of 'b/data/0'")
    _refused(_patched(data, second + 8, b"\x08"), FormatError, "packed by method 8 by its local header, .* method 0 by")
    _refused(_patched(data, second, b"XX"), FormatError, "no local header of 'a/data/0' here")
    _refused(_patched(data, second + 28, b"\xff\xff"), FormatError, "ends at byte")
    _refused(_patched(data, second + 22, b"\x3f"), FormatError, "local header and directory differ")


def test_directories_that_lie_are_refused() -> None:
    """Counts, sizes, offsets, overlaps, doubles."""
    data = _plain_zip()
    first = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", first + 4)
    end = data.rindex(b"PK\x05\x06")
    _refused(_patched(data, end + 8, b"\x03\0\x03\0"), FormatError, "inside an entry|no entry|has room for")
    _refused(_patched(data, end + 8, b"\x01\0\x01\0"), FormatError, "follow the last of 1 member")
    _refused(_patched(data, end + 8, b"\xf0\xff\xf0\xff"), FormatError, "says it has 65,520 members")
    _refused(_patched(data, end + 8, b"\x01\0\x02\0"), FormatError, "several volumes")
    _refused(_patched(data, end + 16, b"\xf0"), FormatError, "ends at byte|no entry")
    _refused(_patched(data, end + 12, b"\xff\xff\xff\x7f"), FormatError, "zip directory ends at byte")
    _refused(_patched(data, second + 42, b"\0\0\0\0"), FormatError, "ends at byte")
    _refused(_patched(data, second + 20, b"\xff\xff\0\0\xff\xff\0\0"), FormatError, "ends at byte")
    _refused(_patched(data, second + 20, b"\x01\0\0\0"), FormatError, "is stored, but")
    _refused(
        _patched(data, second + 8, b"\x01"), FormatError, "method 0 by its local header, encrypted by the directory"
    )
    _refused(_patched(data, second + 10, b"\x0e"), FormatError, "method 0 by its local header, packed by method 14 by")
    _refused(data[:-1], FormatError, "no zip directory")
    _refused(data[:end], FormatError, "no zip directory")
    _refused(b"", FormatError, "no zip directory")
    names = ZipLayout([Member("a/x", 1, b"1"), Member("a/x", 1, b"2")])
    out = bytearray(names.nbytes)
    for offset, part in names.heads + names.tail([]):
        out[offset : offset + len(part)] = part
    _refused(bytes(out), FormatError, "has the name of another")


def test_members_that_cannot_be_unpacked_are_refused_where_they_are_wanted() -> None:
    """A program's zip with one encrypted or oddly packed member still says what is in the others."""
    data = _plain_zip()
    local, entry = data.index(b"PK\x03\x04", 4), data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    for at, raw, match in ((6, b"\x01", "is encrypted"), (8, b"\x0e", "is packed by method 14")):
        odd = _patched(_patched(data, local + at, raw), entry + at + 2, raw)
        read = reader(odd)
        first, second = read_directory(read, len(odd), where="x").members.values()
        assert read_member(read, first, where="x") == b"\x80\x02N."
        assert not second.is_stored
        with pytest.raises(Unsupported, match=match):
            read_member(read, second, where="x")


def test_wrong_payloads_are_noticed() -> None:
    """A flipped byte fails its CRC; a deflated member that unpacks to another length is refused."""
    data = _plain_zip()
    position = data.index(b"12345678")
    _refused(_patched(data, position, b"0"), IntegrityError, "expected CRC-32")
    packed = _plain_zip(compression=zipfile.ZIP_DEFLATED)
    entry = packed.index(b"PK\x01\x02", packed.index(b"PK\x01\x02") + 4)
    local = packed.index(b"PK\x03\x04", 4)
    bomb = _patched(_patched(packed, entry + 24, b"\x05\0\0\0"), local + 22, b"\x05\0\0\0")
    _refused(bomb, FormatError, "does not unpack to 5 bytes")


@pytest.mark.parametrize(
    ("field", "raw"),
    [(8, struct.pack("<Q", 1 << 60)), (40, struct.pack("<Q", 1 << 60)), (48, struct.pack("<Q", 1 << 62)), (0, b"XX")],
)
def test_zip64_records_that_lie_are_refused(field: int, raw: bytes) -> None:
    """Wrong sizes and offsets in the ZIP64 end record, and a locator that points elsewhere."""
    data = (PT_FILES / "from_buffer.pt").read_bytes()
    record = data.rindex(b"PK\x06\x06")
    locator = data.rindex(b"PK\x06\x07")
    if field != 8:
        _refused(_patched(data, record + field, raw), FormatError, "differ|no ZIP64 record")
    else:
        _refused(_patched(data, locator + 8, raw), FormatError, "ZIP64 record is said to lie")
