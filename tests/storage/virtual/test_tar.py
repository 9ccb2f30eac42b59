"""Tar archives are folders, whatever program packed them; what they claim is checked."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_tool.errors import CkptError, FormatError, NotFound, StorageError, Unsupported
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.store import Listing
from ckpt_tool.storage.virtual.tar import TarStore, open_tar
from tests.storage.recording import RecordingStore

FILES = {"a.bin": bytes(range(256)) * 10, "sub/b.bin": b"b" * 513, "empty": b"", "x" * 120 + "/" + "y" * 120: b"long"}


def packed(files: dict[str, bytes], form: int = tarfile.PAX_FORMAT, prefix: str = "") -> bytes:
    """An archive by Python's tarfile."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def opened(data: bytes) -> tuple[TarStore | None, RecordingStore]:
    """The archive, and the store around it."""
    inner = RecordingStore(MemoryStore({"x.tar": data}))
    return open_tar(inner, Listing("u", {"x.tar": len(data)}, "x.tar")), inner


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("prefix", ["", "./"])
def test_members_are_files(form: int, prefix: str) -> None:
    """Every member at any range, long names of both kinds; small archives cost two requests to walk."""
    store, inner = opened(packed(FILES, form, prefix))
    assert store is not None
    assert store.listing().sizes == {name: len(data) for name, data in sorted(FILES.items())}
    assert len(inner.calls) == 2
    for name, data in FILES.items():
        assert store.read(name, 0, len(data)) == data
    assert store.fetch([FileRange("a.bin", 5, 7), FileRange("sub/b.bin", 512, 1)]) == [FILES["a.bin"][5:12], b"b"]
    buffer = bytearray(3)
    store.read_into("a.bin", 1, memoryview(buffer))
    assert bytes(buffer) == b"\1\2\3"
    with pytest.raises(StorageError, match="expected 2 bytes, got 1"):
        store.read("sub/b.bin", 512, 2)
    with pytest.raises(NotFound, match="no such member"):
        store.read("other", 0, 1)
    with pytest.raises(FormatError, match="leaves"):
        store.read("../a.bin", 0, 1)


def test_links_and_folders_are_left_out(tmp_path: Path) -> None:
    """A link could lead anywhere."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d/real").write_bytes(b"1")
    (tmp_path / "d/link").symlink_to("/etc/passwd")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "d", "d")
    store, listing = open_store(tmp_path / "x.tar")
    assert listing.sizes == {"d/real": 1}
    assert listing.entry is None
    store.close()


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """What is called .tar and is none stays a file; so do torch's archives of 2017."""
    assert opened(b"PK\3\4" + bytes(600))[0] is None
    assert opened(b"short")[0] is None
    legacy = {"sys_info": b"1", "pickle": b"1", "storages": b"", "tensors": b""}
    assert opened(packed(legacy))[0] is None
    (tmp_path / "x.tar").write_bytes(b"hello" * 200)
    assert open_store(tmp_path / "x.tar")[1].entry == "x.tar"


def broken(at: int, data: bytes) -> Callable[[bytes], bytes]:
    """An archive with other bytes at one place."""
    return lambda whole: whole[:at] + data + whole[at + len(data) :]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda whole: whole[:900], FormatError, "the archive was cut"),
        (broken(0, b"Z"), FormatError, "checksum"),
        (broken(124, b"zzzzzzzzzzz"), FormatError, "no number of tar"),
        (broken(124, b"\xff" * 12), FormatError, "checksum"),
    ],
)
def test_damage(change: Callable[[bytes], bytes], kind: type[CkptError], message: str) -> None:
    """One clear error for each."""
    with pytest.raises(kind, match=message):
        opened(change(packed({"a.bin": bytes(2000)})))


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../../b", "C:/x"])
def test_names_that_leave_the_archive(name: str) -> None:
    """They are refused, although nothing is unpacked."""
    with pytest.raises(FormatError, match="leaves"):
        opened(packed({name: b"1"}))


def test_sparse_members_are_refused() -> None:
    """Their bytes do not lie one behind another."""
    info = tarfile.TarInfo("a")
    info.type = b"S"
    data = info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    with pytest.raises(Unsupported, match="sparse"):
        opened(data)


def test_sizes_beyond_octal() -> None:
    """8 GiB and more, in base 256; a lie about them is noticed."""
    info = tarfile.TarInfo("a")
    info.size = 9 << 30
    with pytest.raises(FormatError, match="9,663,676,416 bytes"):
        opened(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))


def test_a_path_into_an_archive(tmp_path: Path) -> None:
    """What a hint says to type is opened: a folder of the archive; what is not in it is not there."""
    with tarfile.open(tmp_path / "run.tar", "w") as archive:
        for name in ("step-1/a/w", "step-1/x", "step-10/x"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    for path in (tmp_path / "run.tar/step-1", f"{tmp_path}/run.tar/step-1/"):
        store, listing = open_store(path)
        assert (listing.paths, store.read("a/w", 0, 10)) == (("a/w", "x"), b"step-1/a/w")
    for path in (tmp_path / "run.tar/step-2", tmp_path / "run.tar/step-1/x", tmp_path / "other.tar/step-1"):
        with pytest.raises(NotFound, match="no such file or folder"):
            open_store(path)
