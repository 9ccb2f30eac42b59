"""Remote targets: front to back, the deciding file last."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractBufferedFile

from ckpt_tool.errors import FormatError, StorageError, TargetExists, UsageError
from ckpt_tool.storage.remote import target as stream_target
from ckpt_tool.storage.remote.target import StreamTarget
from ckpt_tool.storage.target import open_target

OPTIONS: dict[str, Any] = {"overwrite": False, "resume": False, "durable": True, "single_file": False}


@pytest.fixture
def url() -> Iterator[str]:
    """A name in memory under which nothing is yet."""
    root = f"/{uuid.uuid4().hex}"
    yield f"memory:/{root}/out"
    fs = fsspec.filesystem("memory")
    for path in fs.find(root):
        fs.rm_file(path)


def files(url: str) -> dict[str, bytes]:
    """What is there now."""
    fs = fsspec.filesystem("memory")
    root = url.removeprefix("memory:/")
    return {path[len(root) :].lstrip("/"): fs.cat_file(path) for path in fs.find(root)}


def test_last_file_comes_last(url: str) -> None:
    """All files are there before commit except the one that makes them a checkpoint."""
    target = open_target(url, **OPTIONS)
    assert (target.is_sequential, target.journal, target.free_bytes()) == (True, None, None)
    target.create(".metadata", 6, is_last=True)
    target.create("sub/a.bin", 10)
    target.create("empty", 0)
    target.write(".metadata", 0, b"commit")
    target.write("sub/a.bin", 0, b"0123")
    target.write("sub/a.bin", 4, memoryview(b"456789"))
    target.flush()
    assert files(url) == {"sub/a.bin": b"0123456789", "empty": b""}
    target.commit(".metadata")
    assert files(url) == {"sub/a.bin": b"0123456789", "empty": b"", ".metadata": b"commit"}


def test_out_of_order(url: str) -> None:
    """A gap, a step back and a write beyond the end are refused with both offsets."""
    target = open_target(url, **OPTIONS)
    target.create("a", 4)
    target.write("a", 0, b"ab")
    with pytest.raises(StorageError, match="front to back: expected offset 2, got 3"):
        target.write("a", 3, b"d")
    with pytest.raises(StorageError, match="expected offset 2, got 0"):
        target.write("a", 0, b"a")
    with pytest.raises(StorageError, match="a write from 2 to 5 does not fit the 4 bytes"):
        target.write("a", 2, b"cde")
    with pytest.raises(StorageError, match="created twice"):
        target.create("a", 4)
    with pytest.raises(StorageError, match="out/b: written to before it was created"):
        target.write("b", 0, b"")
    with pytest.raises(FormatError):
        target.create("../x", 1)


def test_incomplete_commit(url: str) -> None:
    """A file that misses bytes, or a last file that was not announced, stops the commit."""
    target = open_target(url, **OPTIONS)
    target.create("a", 4)
    target.create("m", 1, is_last=True)
    target.write("m", 0, b"1")
    with pytest.raises(StorageError, match="out/a: expected 4 bytes before the commit, got 0"):
        target.commit("m")
    target.write("a", 0, b"abcd")
    with pytest.raises(StorageError, match="'a', was not created as the last one"):
        target.commit("a")
    assert "m" not in files(url)


def test_abandon(url: str) -> None:
    """Nothing is left: neither complete files nor those under way."""
    target = open_target(url, **OPTIONS)
    target.create("done", 4)
    target.write("done", 0, b"abcd")
    target.create("half", 4)
    target.write("half", 0, b"ab")
    target.create("m", 1, is_last=True)
    target.write("m", 0, b"1")
    target.abandon()
    assert files(url) == {}


def test_existing_target(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there stays without --overwrite; with it, it goes when the first file comes, the deciding file first."""
    fs = fsspec.filesystem("memory")
    root = url.removeprefix("memory:/")
    for path in ("a.bin", ".metadata", "z.bin", "model.safetensors.index.json"):
        fs.pipe_file(f"{root}/{path}", b"old")
    with pytest.raises(TargetExists, match="is there already, with 4 files") as caught:
        open_target(url, **OPTIONS)
    assert "--overwrite" in (caught.value.hint or "")
    target = open_target(url, **{**OPTIONS, "overwrite": True})
    assert len(files(url)) == 4
    removed: list[str] = []
    real = fs.rm_file

    def noting(key: str) -> None:
        removed.append(key[len(root) + 1 :])
        real(key)

    monkeypatch.setattr(fs, "rm_file", noting)
    target.create("a.bin", 3)
    assert removed == [".metadata", "model.safetensors.index.json", "a.bin", "z.bin"]
    target.write("a.bin", 0, b"new")
    target.commit(None)
    assert files(url) == {"a.bin": b"new"}


def test_single_file(url: str) -> None:
    """The one file has the URL itself, is held back, and a second one is refused; a folder is not replaced by it."""
    target = open_target(url, **{**OPTIONS, "single_file": True})
    target.create("model.safetensors", 3)
    target.write("model.safetensors", 0, b"one")
    with pytest.raises(UsageError, match="expected one file"):
        target.create("b", 1)
    assert files(url) == {}
    target.commit(None)
    assert files(url) == {"": b"one"}
    with pytest.raises(TargetExists, match="is a folder, expected to write a file"):
        open_target(url.rpartition("/")[0], **{**OPTIONS, "single_file": True, "overwrite": True})


def test_resume(url: str) -> None:
    """Remote runs do not resume, and say so instead of starting over."""
    with pytest.raises(UsageError, match="cannot be resumed"):
        open_target(url, **{**OPTIONS, "resume": True})


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    """A multipart upload as object stores do it: visible only once completed."""

    parts: list[bytes]

    def _initiate_upload(self) -> None:
        self.parts = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        """Complete the upload."""
        self.fs.objects[self.path] = b"".join(self.parts)

    def discard(self) -> None:
        """Abort the upload."""
        self.fs.n_aborted += 1


class Bucket:
    """As much of an object store as a target needs."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.n_aborted = 0
        self.block_bytes: list[int] = []

    def open(self, path: str, mode: str, *, block_size: int, autocommit: bool) -> Upload:
        """An upload."""
        self.block_bytes.append(block_size)
        return Upload(self, path, mode, block_size=block_size, autocommit=autocommit)

    def pipe_file(self, path: str, data: bytes) -> None:
        """One request."""
        self.objects[path] = data

    def find(self, path: str, *, detail: bool) -> dict[str, dict[str, Any]]:
        """Keys; some stores also list a folder that is empty by now, as a folder."""
        found = {key: {"type": "file"} for key in self.objects if key == path or key.startswith(path + "/")}
        return found or {path: {"type": "directory"}}

    def exists(self, path: str) -> bool:
        """Whether it is complete."""
        return path in self.objects

    def rm_file(self, path: str) -> None:
        """Delete one."""
        del self.objects[path]

    def _parent(self, path: str) -> str:
        return path.rpartition("/")[0]

    def invalidate_cache(self, path: str | None = None) -> None:
        """Nothing is kept."""


def bucket_target(monkeypatch: pytest.MonkeyPatch, root: str, objects: dict[str, bytes], **options: bool) -> Any:
    """A bucket and a target in it."""
    bucket = Bucket(objects)
    monkeypatch.setattr(stream_target, "open_remote", lambda _url: (bucket, root))
    return bucket, StreamTarget(f"s3://{root}", **{"overwrite": False, "single_file": False, **options})


def test_large_last_file_is_uploaded_but_not_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last file too large to hold back is invisible until commit all the same."""
    monkeypatch.setattr(stream_target, "HELD_BYTES", 2)
    bucket, target = bucket_target(monkeypatch, "b/out.bin", {}, single_file=True)
    target.create("x", 10)
    target.write("x", 0, b"01234")
    target.write("x", 5, b"56789")
    assert bucket.objects == {}
    target.commit(None)
    assert bucket.objects == {"b/out.bin": b"0123456789"}


def test_abandoned_uploads_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload under way is aborted, and forgetting its file object does not complete it after all."""
    bucket, target = bucket_target(monkeypatch, "b/out", {"b/other": b"1"})
    target.create("done", 2)
    target.write("done", 0, b"12")
    target.create("x", 10)
    target.write("x", 0, b"01234")
    assert bucket.objects == {"b/other": b"1", "b/out/done": b"12"}
    target.abandon()
    del target
    gc.collect()
    assert (bucket.objects, bucket.n_aborted) == ({"b/other": b"1"}, 1)


def test_parts_fit_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a file, it has no more than 10,000 parts; small ones have parts of 16 MiB."""
    bucket, target = bucket_target(monkeypatch, "b/out", {})
    sizes = [1 << 20, 1 << 40]
    for i, nbytes in enumerate(sizes):
        target.create(str(i), nbytes)
        target.write(str(i), 0, b"1")
    assert bucket.block_bytes[0] == 16 << 20
    assert 9_990 <= sizes[1] / bucket.block_bytes[1] <= 10_000
    target.abandon()


def test_whole_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """--overwrite with nothing but a bucket would delete everything in it."""
    with pytest.raises(UsageError, match="is a whole bucket, and is not overwritten"):
        bucket_target(monkeypatch, "b", {"b/x": b"1"}, overwrite=True)


def test_failed_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that fails is an error with the file's name, and does not count as written."""

    def failing(self: Upload, final: bool = False) -> bool:
        raise OSError("SlowDown")

    _, target = bucket_target(monkeypatch, "b/out", {})
    monkeypatch.setattr(stream_target, "MIN_BLOCK_BYTES", 4)
    monkeypatch.setattr(Upload, "_upload_chunk", failing)
    target.create("x", 10)
    with pytest.raises(StorageError, match="s3://b/out/x: OSError: SlowDown"):
        target.write("x", 0, b"0123456")
    with pytest.raises(StorageError, match="expected 10 bytes before the commit, got 0"):
        target.commit(None)
    target.abandon()
