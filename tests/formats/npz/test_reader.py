"""The reader of ``.npz`` on files of numpy.savez and savez_compressed, and on damaged ones."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.errors import CkptError, FormatError, UnsafePickle
from ckpt_tool.formats.npz.reader import READER
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import FIXTURES, Case, ReaderTests, source_of
from tests.formats.zoo import CHECKPOINTS, case
from tests.storage.recording import RecordingStore


class TestNpz(ReaderTests):
    """What numpy.savez writes."""

    reader = READER
    reader_import = "ckpt_tool.formats.npz.reader:READER"
    cases = (
        case("npz_plain", max_read_requests=16, max_resolve_requests=0),
        case("npz_plain", "ckpt/model.npz", max_read_requests=16, max_resolve_requests=0),
    )


class TestCompressedNpz(ReaderTests):
    """What numpy.savez_compressed writes."""

    reader = READER
    reader_import = "ckpt_tool.formats.npz.reader:READER"
    cases = (case("npz_deflated", max_read_requests=16, max_resolve_requests=0),)

    def test_read_takes_no_payload(self, case: Case, store: RecordingStore) -> None:
        """Each array's header lies in the compressed bytes: of these no more is unpacked than the header needs."""
        manifest = self.reader.read(source_of(store))
        assert {entry.codec for entry in manifest.files} == {None, "deflate"}


def npz(**arrays: Any) -> bytes:
    """What numpy.savez writes."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def zipped(**members: bytes) -> bytes:
    """A zip of ``.npy`` members with these bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


def npy(header: str, payload: bytes = b"") -> bytes:
    """An array's file with this header."""
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + payload


def test_objects_are_read_as_data() -> None:
    """Text and pickled objects are values; nothing of a pickle runs."""
    with open_checkpoint(CHECKPOINTS / "npz_deflated/ckpt") as checkpoint:
        found = checkpoint.objects()
    assert found["labels"] == ["a", "bc"]
    assert str(found["config"].tolist()) == "{'lr': 0.1}"


class _Runs:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch owned",)


def test_a_pickle_that_asks_for_a_command_is_refused() -> None:
    """An array of objects is a pickle like any other."""
    with pytest.raises(UnsafePickle, match=r"asks for (posix|os)\.system"):
        READER.read(source_of(MemoryStore({"a.npz": npz(x=np.array(_Runs(), dtype=object))})))


def test_types_that_numpy_has_no_name_for_keep_their_bytes(tmp_path: Path) -> None:
    """bfloat16 is written as void: so it is called, with a note."""
    values = np.arange(4).astype(ml_dtypes.bfloat16)
    (tmp_path / "a.npz").write_bytes(npz(x=values))
    with open_checkpoint(tmp_path / "a.npz") as checkpoint:
        assert checkpoint.manifest.tensor("x").dtype.name == "V2"
        assert checkpoint["x"][:].tobytes() == values.tobytes()
        assert "numpy has no name for bfloat16" in checkpoint.manifest.notes[0]


def test_a_file_of_any_name_is_told_by_content(tmp_path: Path) -> None:
    """Numpy's zips are not taken for torch's, nor torch's for numpy's."""
    (tmp_path / "weights").write_bytes(npz(x=np.zeros(3)))
    with open_checkpoint(tmp_path / "weights") as checkpoint:
        assert checkpoint.format == "npz"
    with open_checkpoint(FIXTURES / "torch/pt_files/ckpt/train_namespace.pt") as checkpoint:
        assert checkpoint.format == "torch-save"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (zipped(x=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000,)}")), "takes 8,000,000,000"),
        (zipped(x=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}")), "describe no array"),
        (zipped(x=npy("{'descr': '<f8', 'fortran_order': False, 'shape': (9223372036854775807, 9)}")), "no array"),
        (zipped(x=npy("__import__('os').system('true')")), "no header of a numpy array"),
        (zipped(x=npy("{" * 3000)), "no header of a numpy array"),
        (zipped(x=npy("{'descr': '<q9', 'fortran_order': False, 'shape': ()}")), "no header of a numpy array"),
        (zipped(x=b"\x93NUMPY\x02\x00\xff\xff\xff\xff"), "at most 65,536"),
        (zipped(x=b"hello"), "no numpy array"),
        (zipped(x=b""), "no numpy array"),
        (npz(x=np.zeros(100))[:-30], "no zip directory"),
    ],
)
def test_lies_are_one_clear_error(data: bytes, message: str) -> None:
    """A header that claims more than is there, or is no header, is refused without memory being taken for it."""
    with pytest.raises(FormatError, match=message):
        READER.read(source_of(MemoryStore({"a.npz": data})))


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    """A member that unpacks to more than the directory says, or claims more than deflate can hold."""
    header = npy("{'descr': '|u1', 'fortran_order': False, 'shape': (50000000,)}")
    data = bytearray(zipped(x=header + bytes(50_000_000)))
    claimed = (50_000_000 + len(header)).to_bytes(4, "little")
    assert data.count(claimed) == 2
    forged = bytes(data).replace(claimed, (1000 + len(header)).to_bytes(4, "little"))
    with pytest.raises(FormatError, match="takes 50,000,000 bytes, the member has 1,000"):
        READER.read(source_of(MemoryStore({"a.npz": forged})))


def test_members_named_to_leave_the_folder_are_only_names(tmp_path: Path) -> None:
    """Nothing is unpacked, so a name is a name."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("../../x.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", bytes(4)))
    (tmp_path / "a.npz").write_bytes(file.getvalue())
    with open_checkpoint(tmp_path / "a.npz") as checkpoint:
        assert list(checkpoint) == ["../../x"]
        assert checkpoint["../../x"][:].tolist() == [0.0]


@pytest.mark.parametrize("cut", [3, 40, 200, 700, 1500])
def test_a_cut_file_is_an_error(cut: int) -> None:
    """Wherever a file ends early."""
    data = npz(x=np.arange(200), y=np.zeros((3, 4)))[:-cut]
    with pytest.raises(CkptError):
        READER.read(source_of(MemoryStore({"a.npz": data})))
