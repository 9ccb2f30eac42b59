"""Disks that fail: reads that pass at the second try, and real file systems that are full, stale or broken."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.cli.app import main
from ckpt_tool.errors import StorageError
from ckpt_tool.storage.local import store as local
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.shared_target import open_shared
from ckpt_tool.storage.target import open_target
from tests.storage.checkpoints import make_dcp

RESHARD = ["--tp", "2", "--default", "shard0"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStore]:
    """One file, and no patience."""
    (tmp_path / "x").write_bytes(bytes(range(100)))
    monkeypatch.setattr(local, "_TRIES", (0.0, 0.0, None))
    store = LocalStore(str(tmp_path))
    yield store
    store.close()


def failing(monkeypatch: pytest.MonkeyPatch, code: int, times: int) -> list[int]:
    """The next reads fail; returns the file descriptors of all reads."""
    real, seen = os.preadv, list[int]()

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.append(fd)
        if len(seen) <= times:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return seen


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
def test_passing_failure(store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A handle that a network file system has forgotten is opened anew."""
    buffer = bytearray(10)
    store.read_into("x", 0, memoryview(buffer))
    seen = failing(monkeypatch, code, 2)
    store.read_into("x", 20, memoryview(buffer))
    assert bytes(buffer) == bytes(range(20, 30))
    assert len(seen) == 3


@pytest.mark.parametrize(("code", "n"), [(errno.EIO, 3), (errno.EACCES, 1)])
def test_lasting_failure(store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, n: int) -> None:
    """It is tried a bounded number of times, and what will not pass once."""
    seen = failing(monkeypatch, code, 99)
    with pytest.raises(StorageError, match=r"x: cannot be read"):
        store.read_into("x", 20, memoryview(bytearray(10)))
    assert len(seen) == n


@pytest.mark.parametrize(("code", "n"), [(errno.ESTALE, 3), (errno.EACCES, 1)])
def test_folders_that_fail(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, n: int
) -> None:
    """They are listed as files are read: again where that may help."""
    real, seen = os.scandir, list[str]()

    def scandir(path: str) -> Any:
        seen.append(path)
        if len(seen) <= n_failures:
            raise OSError(code, os.strerror(code))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    n_failures = n - 1
    assert store.listing().sizes == {"x": 100}
    seen.clear()
    n_failures = 99
    with pytest.raises(StorageError, match="cannot be read"):
        LocalStore(str(tmp_path)).listing()
    assert len(seen) == n


def test_close_tells_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may say at the end of a file alone that there was no room for it."""
    real = os.close

    def close(fd: int) -> None:
        real(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    shared = open_shared(str(tmp_path / "out"), "00000001", overwrite=False, durable=False)
    finished, given_up = shared.create("a", 1), shared.create("b", 1)
    finished.write([memoryview(b"1")])
    target = open_target(str(tmp_path / "other"), overwrite=False, resume=False, durable=False, single_file=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(StorageError, match="a: no room"):
            finished.finish()
        given_up.abandon()
        target.abandon()
    shared.discard()
    assert not (tmp_path / "out").exists()


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[..., None]]]:
    """A mounted file system, and what makes it fail from now on."""
    root, mount, control = tmp_path / "root", tmp_path / "mount", tmp_path / "control.json"
    root.mkdir()
    mount.mkdir()

    def fail(**settings: float) -> None:
        partial = control.with_suffix(".new")
        partial.write_text(json.dumps(settings))
        partial.replace(control)

    fail()
    script = Path(__file__).with_name("fuse_fs.py")
    with subprocess.Popen([sys.executable, str(script), str(root), str(mount), str(control)]) as process:
        try:
            ends = time.monotonic() + 20
            while not mount.is_mount():
                assert process.poll() is None
                assert time.monotonic() < ends
                time.sleep(0.05)
            yield mount, fail
        finally:
            fail()
            subprocess.run(["umount", "-l", str(mount)], check=False)
            process.kill()


@pytest.mark.fuse
def test_failing_reads(failing_disk: tuple[Path, Callable[..., None]], tmp_path: Path) -> None:
    """Every 7th read fails with EIO: commands come through. All fail: status 4. Stale, then not: the next run reads."""
    mount, fail = failing_disk
    source = make_dcp(mount, n_ranks=2, n_tensors=10)
    fail(eio_read_every=7)
    assert main(["reshard", str(source), str(tmp_path / "out"), *RESHARD]) == 0
    fail()
    assert main(["diff", str(source), str(tmp_path / "out")]) == 0
    fail(estale=1)
    assert main(["inspect", str(source)]) in {3, 4}
    fail()
    assert main(["verify", str(source), "--full"]) == 0


@pytest.mark.fuse
@pytest.mark.parametrize(
    "settings", [{"eio_write_every": 5}, {"eio_fsync": 1}, {"eio_close": 1}, {"enospc_after": 300_000}], ids=str
)
def test_failing_writes(
    failing_disk: tuple[Path, Callable[..., None]], tmp_path: Path, settings: dict[str, int]
) -> None:
    """Status 4, nothing under the final name; well again, --resume ends with a checkpoint of the same content."""
    mount, fail = failing_disk
    source, target = make_dcp(tmp_path, n_ranks=2, n_tensors=10), mount / "out"
    fail(**settings)
    assert main(["reshard", str(source), str(target), *RESHARD]) == 4
    assert not target.exists()
    fail()
    assert main(["reshard", str(source), str(target), *RESHARD, "--resume"]) == 0
    assert main(["diff", str(source), str(target)]) == 0


@pytest.mark.fuse
def test_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real file system that is too small is refused before a byte is moved; what fits is written."""
    source, disk = make_dcp(tmp_path, n_ranks=2, n_tensors=30, rows=512), tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)], check=True)
    try:
        assert main(["reshard", str(source), str(disk / "out"), *RESHARD]) == 4
        assert "needs" in capsys.readouterr().err
        assert os.listdir(disk) == []
        assert main(["reshard", str(source), str(disk / "out"), *RESHARD, "--include", "layer.1?.w"]) == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)
