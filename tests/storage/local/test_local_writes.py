"""Bytes reach their place and the device, or an error says why not."""

from __future__ import annotations

import errno
import os
import threading
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from ckpt_tool.errors import StorageError
from ckpt_tool.storage import fetch
from ckpt_tool.storage.local import target as local_target
from ckpt_tool.storage.local.kernel import exchange, fallocate
from ckpt_tool.storage.local.target import LocalTarget
from ckpt_tool.storage.unfinished import MARKER_NAME

OPTIONS: dict[str, Any] = {"overwrite": False, "resume": False, "durable": True, "single_file": False}


def start(path: Path, **options: bool) -> LocalTarget:
    """A target with all options off but those named, and fsync on."""
    return LocalTarget(str(path), **{**OPTIONS, **options})


def tree(root: Path) -> dict[str, bytes]:
    """All files below ``root``."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_unwritten_bytes_are_zero(tmp_path: Path) -> None:
    """A created file has its size at once; padding need not be written."""
    target = start(tmp_path / "out")
    target.create("a", 10)
    target.create("empty", 0)
    target.write("a", 4, b"x")
    target.commit(None)
    assert tree(tmp_path / "out") == {"a": b"\0\0\0\0x\0\0\0\0\0", "empty": b""}


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    """Others may read what the umask lets them."""
    before = os.umask(0o027)
    try:
        target = start(tmp_path / "out")
        target.create("a", 1)
        target.commit(None)
    finally:
        os.umask(before)
    assert (tmp_path / "out/a").stat().st_mode & 0o777 == 0o640


def test_resumed_file_gets_its_new_size(tmp_path: Path) -> None:
    """A file of another size, from a run with another plan, is cut or grown."""
    first = start(tmp_path / "out")
    first.create("a", 10)
    first.create("b", 1)
    first.abandon()
    second = start(tmp_path / "out", resume=True)
    second.create("a", 3)
    second.create("b", 9)
    second.commit(None)
    assert tree(tmp_path / "out") == {"a": bytes(3), "b": bytes(9)}


def test_full_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that takes one byte at a time gets all of them."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1], offset))
    target = start(tmp_path / "out")
    target.create("a", 300)
    target.write("a", 0, bytes(range(100)))
    monkeypatch.delattr(os, "pwrite")  # as on systems that have none
    target.write("a", 100, bytes(range(100, 200)))
    target.commit(None)
    assert (tmp_path / "out/a").read_bytes() == bytes(range(200)) + bytes(100)


def test_a_system_that_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No progress without an error ends, rather than going on for ever."""
    target = start(tmp_path / "out")
    target.create("a", 10)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(StorageError, match="wrote nothing"):
        target.write("a", 0, b"x")


def test_writes_outside_a_file(tmp_path: Path) -> None:
    """A write that was not announced is refused before it happens."""
    target = start(tmp_path / "out")
    target.create("a", 10)
    with pytest.raises(StorageError, match="a write from 8 to 11 does not fit the 10 bytes"):
        target.write("a", 8, b"abc")
    with pytest.raises(StorageError, match="does not fit"):
        target.write("a", -1, b"abc")
    with pytest.raises(StorageError, match="b: written to before it was created"):
        target.write("b", 0, b"abc")
    assert (tmp_path / "out.partial/a").read_bytes() == bytes(10)


def test_no_room_at_create(tmp_path: Path) -> None:
    """Blocks are reserved at once, so that a disk that is too small is known before the first byte is copied."""
    target = start(tmp_path / "out")
    free = target.free_bytes()
    assert free is not None
    with pytest.raises(StorageError, match=r"no room, 1,125,899,906,842,624 bytes more are needed, [\d,]+ are free"):
        target.create("big", 1 << 50)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_at_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A disk that fills up, or a quota, says how much is missing and how to go on; the work so far is kept."""
    target = start(tmp_path / "out")
    target.create("a", 2000)

    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match=r"'a' cannot be written: no room, 1,500 bytes more are needed") as caught:
        target.write("a", 0, bytes(1500))
    assert "--resume" in (caught.value.hint or "")
    target.abandon()
    assert (tmp_path / "out.partial/a").exists()


def test_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fsync that fails is an error, at flush and at commit, and nothing gets the final name."""
    target = start(tmp_path / "out")
    target.create("a", 1)

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(StorageError, match="'a' cannot be made durable: Input/output error"):
        target.flush()
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match="cannot be completed: Input/output error"):
        target.commit(None)
    assert sorted(os.listdir(tmp_path)) == ["out.partial"]


def test_durability_is_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush syncs what was written since the last one, commit syncs all files and folders; without durable, neither."""
    synced: list[str] = []

    def note(fd: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "fdatasync", note)
    for durable in (False, True):
        target = start(tmp_path / f"out{durable}", durable=durable)
        synced.clear()
        for path in ("a", "s/b"):
            target.create(path, 1)
            target.write(path, 0, b"1")
        target.flush()
        assert sorted(synced) == (["outTrue.partial/a", "outTrue.partial/s/b"] if durable else [])
        synced.clear()
        target.write("s/b", 0, b"2")
        target.flush()
        target.flush()
        assert synced == (["outTrue.partial/s/b"] if durable else [])
        synced.clear()
        target.commit(None)
        names = ["a", MARKER_NAME, "s/b", "s", ""]
        assert sorted(synced) == (
            sorted(["outTrue.partial/" + n for n in names if n] + ["outTrue.partial", "."]) if durable else []
        )


@pytest.mark.parametrize("call", ["fdatasync", "fsync"])
def test_many_files_are_waited_for_at_once(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait for the device behind another takes a commit of the file system's journal each: two are under way."""
    monkeypatch.setattr(fetch, "_CACHED_SECONDS", 0.0)
    calls, together = count(), Barrier(2, timeout=60)
    target = start(tmp_path / "out")
    for name in ("a", "b", "c"):
        target.create(name, 1)
    monkeypatch.setattr(os, call, lambda _: together.wait() if next(calls) in (1, 2) else None)
    if call == "fdatasync":
        target.flush()
    target.commit(None)
    assert next(calls) >= 3


def test_many_threads_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads write to more files than may be open at once, each at its place."""
    monkeypatch.setattr(local_target, "MAX_OPEN_FILES", 3)
    target = start(tmp_path / "out", durable=False)
    for i in range(20):
        target.create(f"{i}", 80)

    def work(k: int) -> None:
        for i in range(20):
            target.write(f"{i}", k * 10, bytes([k + i]) * 10)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    target.commit(None)
    assert tree(tmp_path / "out") == {
        f"{i}": b"".join(bytes([k + i]) * 10 for k in range(8)) for i in sorted(range(20), key=str)
    }


def test_fallocate_reserves(tmp_path: Path) -> None:
    """The call reserves blocks where the file system can, and says when it did not."""
    with (tmp_path / "x").open("wb") as file:
        if fallocate(file.fileno(), 1 << 20):
            assert os.stat(file.fileno()).st_size == 1 << 20
            assert os.stat(file.fileno()).st_blocks * 512 >= 1 << 20
        assert not fallocate(file.fileno(), 0)


def test_exchange(tmp_path: Path) -> None:
    """Two names are swapped in one step; a missing one is an error, not a False."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").write_bytes(b"b")
    if exchange(str(tmp_path / "a"), str(tmp_path / "b")):
        assert (tmp_path / "a").read_bytes() == b"b"
        with pytest.raises(FileNotFoundError):
            exchange(str(tmp_path / "a"), str(tmp_path / "none"))
