"""What is particular to folders of this machine: links, pipes, loops, changing files, many files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from ckpt_tool.errors import FormatError, NotFound, StorageError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.local import store as local
from ckpt_tool.storage.local.store import LocalStore


def put(root: Path, files: dict[str, bytes]) -> None:
    """Write ``files`` below ``root``."""
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


def open_below(root: Path) -> list[str]:
    """Files below ``root`` that this process has open."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.lexists(link) and os.readlink(link).startswith(str(root))]


def test_link_out_of_the_root(tmp_path: Path) -> None:
    """A link that leaves the folder is listed, but refused when read, and the message says where it leads."""
    put(tmp_path, {"secret": b"password", "root/a": b"a"})
    (tmp_path / "root/b").symlink_to("../secret")
    store = LocalStore(str(tmp_path / "root"))
    assert store.listing().paths == ("a", "b")
    with pytest.raises(FormatError, match=r"root/b: is a link out of the checkpoint's folder, to '.*/secret'"):
        store.read("b", 0, 8)


def test_linked_folder_out_of_the_root(tmp_path: Path) -> None:
    """Nor does a path lead out through a linked folder, and a sibling with the same beginning is outside."""
    put(tmp_path, {"root2/secret": b"password", "root/a": b"a"})
    (tmp_path / "root/sub").symlink_to(tmp_path / "root2")
    store = LocalStore(str(tmp_path / "root"))
    assert store.listing().paths == ("a",)
    with pytest.raises(FormatError, match="is a link out"):
        store.read("sub/secret", 0, 8)


def test_links_inside(tmp_path: Path) -> None:
    """Links within the root are followed; a linked folder that is listed already is not listed again."""
    put(tmp_path, {"root/step_5/x": b"data"})
    (tmp_path / "root/latest").symlink_to("step_5")
    (tmp_path / "root/y").symlink_to("step_5/x")
    (tmp_path / "root/step_5/up").symlink_to("..")
    store = LocalStore(str(tmp_path / "root"))
    assert store.listing().sizes == {"step_5/x": 4, "y": 4}
    assert store.read("y", 0, 4) == store.read("latest/x", 0, 4) == b"data"


def test_linked_root(tmp_path: Path) -> None:
    """A root that is itself a link is the user's own choice."""
    put(tmp_path, {"disk/x": b"data"})
    (tmp_path / "run").symlink_to("disk")
    assert LocalStore(str(tmp_path / "run")).read("x", 0, 4) == b"data"


def test_huggingface_cache(tmp_path: Path) -> None:
    """Snapshots of the hub's cache are links into its blobs, which belong to them; other folders do not."""
    put(tmp_path, {"models--a--b/blobs/0123": b"data", "models--a--b/refs/main": b"f00"})
    snapshot = tmp_path / "models--a--b/snapshots/f00"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (snapshot / "other").symlink_to("../../refs/main")
    store = LocalStore(str(snapshot))
    assert store.read("model.safetensors", 0, 4) == b"data"
    with pytest.raises(FormatError, match="is a link out"):
        store.read("other", 0, 3)


def test_named_link(tmp_path: Path) -> None:
    """A link that the user named by itself may lead anywhere."""
    put(tmp_path, {"disk/x.pt": b"data"})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/model.pt").symlink_to("../disk/x.pt")
    assert LocalStore(str(tmp_path / "run"), entry="model.pt").read("model.pt", 0, 4) == b"data"


def test_link_to_nothing(tmp_path: Path) -> None:
    """A link to nothing is not listed and not found."""
    (tmp_path / "x").symlink_to("none")
    store = LocalStore(str(tmp_path))
    assert store.listing().sizes == {}
    with pytest.raises(NotFound, match="x: no such file"):
        store.read("x", 0, 1)


def test_link_to_itself(tmp_path: Path) -> None:
    """A link that leads to itself stops neither the listing nor the program."""
    (tmp_path / "x").symlink_to("x")
    (tmp_path / "y").write_bytes(b"y")
    store = LocalStore(str(tmp_path))
    assert store.listing().sizes == {"y": 1}
    with pytest.raises(StorageError, match="x: cannot be read: Too many levels of symbolic links"):
        store.read("x", 0, 1)


def test_not_a_regular_file(tmp_path: Path) -> None:
    """A pipe would block whoever opens it, so it is neither listed nor opened; a folder is no file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    store = LocalStore(str(tmp_path))
    assert store.listing().sizes == {}
    with pytest.raises(FormatError, match="pipe: expected a file, got a pipe"):
        store.read("pipe", 0, 1)
    with pytest.raises(FormatError, match="folder: expected a file, got a folder"):
        store.read("folder", 0, 1)


def test_file_as_folder(tmp_path: Path) -> None:
    """A path through a file is not found."""
    put(tmp_path, {"x": b"1"})
    with pytest.raises(NotFound, match="x/y"):
        LocalStore(str(tmp_path)).read("x/y", 0, 1)


def test_depth_and_count_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of the wrong folder ends: deep folders are left out, too many files are an error."""
    deep = "/".join(["d"] * local.MAX_DEPTH)
    put(tmp_path, {f"{deep}/in": b"", f"{deep}/d/out": b"", "lost+found/x": b""})
    assert LocalStore(str(tmp_path)).listing().paths == (f"{deep}/in",)
    put(tmp_path, {"x": b"", "y": b""})
    monkeypatch.setattr(local, "MAX_FILES", 2)
    with pytest.raises(ValueError, match="more than 2 files"):
        LocalStore(str(tmp_path)).listing()


def test_file_cut_while_open(tmp_path: Path) -> None:
    """A file that shrinks under an open handle gives an error, not a signal and not zeros."""
    put(tmp_path, {"x": bytes(5_000_000)})
    store = LocalStore(str(tmp_path))
    store.read("x", 0, 10)
    os.truncate(tmp_path / "x", 1000)
    for length in (2000, 4_000_000):
        with pytest.raises(StorageError, match=f"expected {length:,} bytes, got 1,000"):
            store.read("x", 0, length)
    buffer = bytearray(2000)
    with pytest.raises(StorageError, match=r"1,000 missing"):
        store.read_into("x", 0, memoryview(buffer))


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that gives a few bytes at a time is asked again."""
    put(tmp_path, {"x": b"0123456789"})
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, n, offset: pread(fd, min(n, 3), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:3]], offset))
    store = LocalStore(str(tmp_path))
    assert store.read("x", 1, 8) == b"12345678"
    buffer = bytearray(8)
    store.read_into("x", 1, memoryview(buffer))
    assert bytes(buffer) == b"12345678"


def test_system_error_is_chained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk becomes a StorageError that names the file and keeps the original."""
    put(tmp_path, {"x": b"0123456789"})

    def broken(fd: int, n: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    store = LocalStore(str(tmp_path))
    with pytest.raises(StorageError, match="x: cannot be read: Input/output error") as caught:
        store.read("x", 0, 1)
    assert isinstance(caught.value.__cause__, OSError)
    store.close()  # else it is the error's until somebody looks for garbage, in whatever test


def test_open_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading more files than the limit from several threads leaves no more than the limit open, and close none."""
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 5)
    put(tmp_path, {f"{i}": f"{i:04}".encode() for i in range(40)})
    store = LocalStore(str(tmp_path))
    ranges = [FileRange(str(i), 0, 4) for i in range(40)] * 3
    assert store.fetch(ranges) == [f"{i:04}".encode() for i in range(40)] * 3
    assert len(open_below(tmp_path)) == 5
    store.close()
    assert open_below(tmp_path) == []


def test_a_file_in_use_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read under way survives that its file falls out of the cache, and that the store is closed."""
    monkeypatch.setattr(local, "MAX_OPEN_FILES", 1)
    put(tmp_path, {"slow": b"slow", "x": b"x", "y": b"y"})
    store = LocalStore(str(tmp_path))
    started, go_on = threading.Event(), threading.Event()
    pread = os.pread

    def waiting(fd: int, n: int, offset: int) -> bytes:
        if n == 4:
            started.set()
            assert go_on.wait(10)
        return pread(fd, n, offset)

    monkeypatch.setattr(os, "pread", waiting)
    results: list[bytes] = []
    thread = threading.Thread(target=lambda: results.append(store.read("slow", 0, 4)))
    thread.start()
    assert started.wait(10)
    assert store.read("x", 0, 1) + store.read("y", 0, 1) == b"xy"
    store.close()
    go_on.set()
    thread.join()
    assert results == [b"slow"]


def test_missing_root(tmp_path: Path) -> None:
    """A folder that is gone is not found."""
    with pytest.raises(NotFound, match="none"):
        LocalStore(str(tmp_path / "none")).listing()


def test_listing_tells_times_and_empty_folders(tmp_path: Path) -> None:
    """A listing says when each file was written, and which folders hold nothing."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "c").mkdir()
    (tmp_path / "c/f").write_bytes(b"x")
    os.utime(tmp_path / "c/f", (1000, 2000))
    listing = LocalStore(str(tmp_path)).listing()
    assert (listing.modified, listing.empty) == ({"c/f": 2000.0}, ("a/b",))
