"""The legacy torch.save stream: layout, damage, and what it is confused with."""

from __future__ import annotations

import io
import pickle
import tarfile

import pytest
import torch

from ckpt_tool.errors import CkptError, FormatError, UnsafePickle, Unsupported
from ckpt_tool.formats._pickle.legacy import is_legacy, is_legacy_tar, read_legacy
from tests.formats.pickle.materialize import PT_FILES, array_of, reader


def test_storages_are_found_without_being_read() -> None:
    """One read of the head and one of eight bytes, whatever the storages hold."""
    data = (PT_FILES / "odd_legacy.pt").read_bytes()
    reads: list[tuple[int, int]] = []

    def read(offset: int, length: int) -> bytes:
        reads.append((offset, length))
        return data[offset : offset + length]

    legacy = read_legacy(read, len(data), where="odd_legacy.pt")
    assert [length for _, length in reads] == [len(data), 8]
    assert legacy.is_little_endian
    assert max(offset + nbytes for offset, nbytes in legacy.storages.values()) == len(data)


def test_what_torch_writes_now_is_read() -> None:
    """An object of more than the first read, several dtypes, a view."""
    weight = torch.arange(300_000, dtype=torch.float32)
    value = {
        "names": ["n" * 50 + str(k) for k in range(40_000)],
        "w": weight,
        "v": weight[5:9],
        "b": torch.ones(3).bool(),
    }
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=False)
    data = stream.getvalue()
    legacy = read_legacy(reader(data), len(data), where="x")
    assert legacy.root["names"] == value["names"]
    for name, expected in (("w", weight), ("v", weight[5:9]), ("b", value["b"])):
        offset, nbytes = legacy.storages[legacy.root[name].storage.key]
        assert array_of(legacy.root[name], data[offset : offset + nbytes]).tolist() == expected.tolist()


@pytest.mark.parametrize("length", [0, 13, 14, 100, 2_000, 5_400])
def test_a_cut_stream_is_refused(length: int) -> None:
    """Cut within the pickles or within the storages."""
    data = (PT_FILES / "odd_legacy.pt").read_bytes()[:length]
    with pytest.raises(FormatError):
        read_legacy(reader(data), len(data), where="x")


def test_a_cut_storage_is_named() -> None:
    """The message says which storage, and how much is missing."""
    data = (PT_FILES / "odd_legacy.pt").read_bytes()[:-3]
    with pytest.raises(FormatError, match=r"storage '\d+' ends at byte 5,403, the file has 5,400 \(3 missing\)"):
        read_legacy(reader(data), len(data), where="x")


def test_a_wrong_count_is_noticed() -> None:
    """The number of elements before the last storage is checked."""
    data = bytearray((PT_FILES / "cuda_loc_legacy.pt").read_bytes())
    data[-32] = 7
    with pytest.raises(FormatError, match="says it has 7 elements, expected 6"):
        read_legacy(reader(bytes(data)), len(data), where="x")


def test_other_files_are_told_apart() -> None:
    """A bare pickle is no legacy stream; a tar archive of 2016 is named."""
    assert not is_legacy(pickle.dumps([1], protocol=2))
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO(b""))
    data = stream.getvalue()
    assert is_legacy_tar(data[:512])
    with pytest.raises(Unsupported, match="tar archive"):
        read_legacy(reader(data), len(data), where="x")


def test_a_harmful_object_is_refused_with_its_byte_in_the_file() -> None:
    """The offset counts from the start of the stream, not of the fourth pickle."""
    head = (
        pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(1001, protocol=2) + pickle.dumps({}, protocol=2)
    )
    data = head + b"\x80\x02cos\nsystem\n." + pickle.dumps([], protocol=2)
    with pytest.raises(UnsafePickle) as caught:
        read_legacy(reader(data), len(data), where="x")
    assert caught.value.where == f"x:{len(head) + 2}"
    assert isinstance(caught.value, CkptError)
