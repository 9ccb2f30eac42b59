"""Files that change while they are read: what was made of two versions of them is refused, wherever they lie."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import ckpt_tool
from ckpt_tool.api.convert.reshard import prepare_reshard
from ckpt_tool.api.digest import digests
from ckpt_tool.api.job import load as load_module
from ckpt_tool.api.job.load_move import run_moves
from ckpt_tool.cli.app import main
from ckpt_tool.engine import moving
from ckpt_tool.errors import CkptError, StorageError, UsageError
from ckpt_tool.storage.remote import retry
from tests.storage.checkpoints import make_dcp, objects_of
from tests.storage.s3_server import BUCKET, Bucket, s3_environment, s3_server

FILE = "__1_0.distcp"
OPTIONS: dict[str, Any] = {"tp": 2, "default": "shard0", "durable": False, "digest": None}
"""Without digests, since the byte that changes gets no new CRC."""


class Source:
    """A checkpoint somewhere, one file of which can be written anew with other bytes, as many as before."""

    def __init__(self, url: str, rewrite: Callable[[], None]) -> None:
        self.url = url
        self.rewrite = rewrite
        self.n_calls = 0

    def rewrite_once(self, *_: object) -> None:
        """For who tells progress."""
        self.n_calls += 1
        if self.n_calls == 1:
            self.rewrite()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    return make_dcp(tmp_path_factory.mktemp("unchanged"), n_ranks=2, n_tensors=4)


def other(data: bytes) -> bytes:
    """As many bytes, one of them, which is a tensor's, another."""
    at = len(data) // 3
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Bucket]:
    """A server that holds it."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    with s3_server() as (endpoint, bucket):
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        bucket.objects |= objects_of(folder, "run")
        yield bucket


def local(folder: Path, tmp_path: Path) -> Source:
    """Files here; the hour tells."""
    objects = objects_of(folder, "run")
    (tmp_path / "run").mkdir()
    for path, data in objects.items():
        (tmp_path / path).write_bytes(data)
    file = tmp_path / "run" / FILE

    def rewrite() -> None:
        before = file.stat().st_mtime_ns
        file.write_bytes(other(file.read_bytes()))
        os.utime(file, ns=(before, before + 1_000_000))

    return Source(str(tmp_path / "run"), rewrite)


def far(folder: Path) -> Source:
    """Files that fsspec reaches."""
    fs = fsspec.filesystem("memory")
    root = f"/{uuid.uuid4().hex}"
    for path, data in objects_of(folder, root).items():
        fs.pipe_file(path, data)
    return Source(f"memory:/{root}", lambda: fs.pipe_file(f"{root}/{FILE}", other(fs.cat_file(f"{root}/{FILE}"))))


def object_store(bucket: Bucket) -> Source:
    """Objects, all of one hour; the tag tells."""
    key = f"run/{FILE}"
    return Source(f"s3://{BUCKET}/run", lambda: bucket.objects.update({key: other(bucket.objects[key])}))


@pytest.fixture(params=["local", "s3", "memory"])
def source(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Source:
    """Each kind of storage."""
    if request.param == "local":
        return local(folder, tmp_path)
    return object_store(request.getfixturevalue("bucket")) if request.param == "s3" else far(folder)


CHANGED = rf"{FILE}: has changed while it was read: what was read is no one checkpoint"


def test_a_conversion_ends_without_a_target(source: Source, tmp_path: Path) -> None:
    """Read in part before and in part after, it would be whole by all that files tell; it gets no name."""
    conversion = prepare_reshard(source.url, tmp_path / "out", **OPTIONS)
    with conversion.checkpoint, pytest.raises(StorageError, match=CHANGED) as caught:
        conversion.run(source.rewrite_once)
    assert source.n_calls
    assert caught.value.hint == "wait until whatever writes it has ended, then run the command again"
    assert not (tmp_path / "out").exists()
    ckpt_tool.reshard(source.url, tmp_path / "out", **OPTIONS, overwrite=True)
    assert ckpt_tool.verify(tmp_path / "out").is_ok


@pytest.mark.parametrize("operation", [ckpt_tool.verify, digests, ckpt_tool.diff])
def test_who_reads_every_byte_says_nothing_of_two_versions(source: Source, folder: Path, operation: Any) -> None:
    """A report would be of a checkpoint that never was."""
    arguments = {"level": "full"} if operation is ckpt_tool.verify else {}
    sides = (source.url, folder) if operation is ckpt_tool.diff else (source.url,)
    with pytest.raises(StorageError, match=CHANGED):
        operation(*sides, **arguments, progress=source.rewrite_once)
    assert operation(*sides, **arguments) is not None


@pytest.mark.parametrize("is_replayed", [False, True])
def test_a_load_ends_with_an_error(source: Source, monkeypatch: pytest.MonkeyPatch, is_replayed: bool) -> None:
    """A state that is of two steps trains on without a word; also where the plan is that of an earlier load."""
    state = dict(ckpt_tool.stream(source.url, default="shard0", as_torch=True, sections=None))
    if is_replayed:
        ckpt_tool.load(state, source.url)
        assert ckpt_tool.load(state, source.url).is_replayed or source.url.startswith("s3:")

    def rewriting(*arguments: Any) -> Any:
        moved = run_moves(*arguments)
        source.rewrite_once()
        return moved

    monkeypatch.setattr(load_module, "run_moves", rewriting)
    with pytest.raises(StorageError, match=CHANGED):
        ckpt_tool.load(state, source.url)
    assert source.n_calls == 1
    assert ckpt_tool.load(state, source.url).n_tensors == len(state)


def test_a_stream_ends_with_an_error(source: Source) -> None:
    """After its last tensor, when all that it gave were read."""
    stream = ckpt_tool.stream(source.url, default="shard0", sections=None, memory_budget_bytes=1024)
    next(stream)
    source.rewrite_once()
    with pytest.raises(StorageError, match=CHANGED):
        list(stream)
    assert list(ckpt_tool.stream(source.url, default="shard0", sections=None))


def test_what_fails_for_that_reason_says_so(folder: Path, tmp_path: Path) -> None:
    """A file that is cut under a reader is one that is written again, and the error of its end is only chained."""
    source = local(folder, tmp_path)
    conversion = prepare_reshard(source.url, tmp_path / "out", **OPTIONS)
    with conversion.checkpoint:
        os.truncate(tmp_path / "run" / FILE, 1000)
        with pytest.raises(StorageError, match=CHANGED) as caught:
            conversion.run()
        assert isinstance(caught.value.__cause__, CkptError)
        assert "before the end of the file" in str(caught.value.__cause__)


def test_files_and_folders_that_are_gone(folder: Path, tmp_path: Path) -> None:
    """An open file can be read on after it was removed; whether all that were read belong together nobody can tell."""
    source = local(folder, tmp_path)
    os.rename(tmp_path / "run" / "__0_0.distcp", tmp_path / "aside")
    os.link(tmp_path / "aside", tmp_path / "run" / "__0_0.distcp")
    conversion = prepare_reshard(source.url, tmp_path / "out", **OPTIONS)
    with conversion.checkpoint, pytest.raises(StorageError, match=r"__0_0\.distcp: has gone while it was read"):
        conversion.run(lambda _: (tmp_path / "run" / "__0_0.distcp").unlink(missing_ok=True))
    os.rename(tmp_path / "aside", tmp_path / "run" / "__0_0.distcp")
    conversion = prepare_reshard(source.url, tmp_path / "out", **OPTIONS, overwrite=True)
    with conversion.checkpoint, pytest.raises(StorageError, match="run: has gone while it was read"):
        conversion.run(lambda _: shutil.rmtree(source.url, ignore_errors=True))
    assert not (tmp_path / "out").exists()


def test_files_that_nobody_reads_may_change(folder: Path, tmp_path: Path) -> None:
    """A log that grows beside a checkpoint is no part of it."""
    source = local(folder, tmp_path)
    conversion = prepare_reshard(source.url, tmp_path / "out", **OPTIONS)
    with conversion.checkpoint:
        conversion.run(lambda _: (tmp_path / "run" / "log.txt").touch())
    assert ckpt_tool.verify(tmp_path / "out").is_ok


@pytest.mark.parametrize("target", ["local", "s3"])
def test_no_unfinished_target_is_ended_from_another_source(
    bucket: Bucket, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """What an earlier run has written came from other bytes, though each lies where the plan says."""
    monkeypatch.setattr(moving, "_JOURNAL_BYTES", 1)
    source = local(folder, tmp_path)
    out = str(tmp_path / "out") if target == "local" else f"s3://{BUCKET}/out"
    options = OPTIONS | {"durable": True}
    with pytest.raises(StorageError, match="has changed while it was read"):
        ckpt_tool.reshard(source.url, out, **options, progress=source.rewrite_once)
    with pytest.raises(UsageError, match="files of the source have changed since the unfinished target was begun"):
        ckpt_tool.reshard(source.url, out, **options, resume=True)
    ckpt_tool.reshard(source.url, out, **options, overwrite=True)
    assert ckpt_tool.diff(source.url, out).is_same


def test_the_command_tells_it_as_a_failure_of_storage(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, one hint, and the code of storage."""
    source = local(folder, tmp_path)
    real = moving.move_units

    def rewriting(*args: Any, **options: Any) -> Any:
        source.rewrite_once()
        return real(*args, **options)

    monkeypatch.setattr("ckpt_tool.engine.run.move_units", rewriting)
    assert main(["reshard", source.url, str(tmp_path / "out"), "--tp", "2", "--default", "shard0"]) == 4
    said = capsys.readouterr().err
    assert "has changed while it was read" in said
    assert "hint: wait until whatever writes it has ended" in said
    assert not (tmp_path / "out").exists()
