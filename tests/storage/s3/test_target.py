"""S3 targets: parts, what is seen when, and going on after a death at any request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import ckpt_tool
from ckpt_tool.errors import FormatError, StorageError, TargetExists, UsageError
from ckpt_tool.storage.parts import target as part_target
from ckpt_tool.storage.parts.place import PartLimits
from ckpt_tool.storage.remote import retry
from ckpt_tool.storage.s3 import place
from ckpt_tool.storage.s3.client import S3Client
from ckpt_tool.storage.target import Target, open_target
from tests.storage.part_runs import FILES, OPTIONS, PART, run, write
from tests.storage.s3_server import BUCKET, Bucket, s3_environment, s3_server

URL = f"s3://{BUCKET}/run//out"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A server that takes small parts."""
    monkeypatch.setattr(place, "PART_LIMITS", PartLimits(PART, PART, 100))
    with s3_server() as (endpoint, bucket):
        bucket.min_part_bytes = PART
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        yield bucket


def files(bucket: Bucket) -> dict[str, bytes]:
    """What is under the final name."""
    prefix = "run//out/"
    return {key.removeprefix(prefix): data for key, data in bucket.objects.items() if key.startswith(prefix)}


def test_nothing_is_seen_before_the_commit(bucket: Bucket) -> None:
    """Until then there is what says that this is unfinished, and small files; after it nothing else than the files."""
    target = open_target(URL, **OPTIONS)
    write(target)
    target.flush()
    assert set(files(bucket)) == {"CKPT_UNFINISHED", "CKPT_JOURNAL/00000000", "sub/c.bin"}
    target.commit(".metadata")
    assert files(bucket) == FILES
    assert bucket.uploads == {}


def test_the_deciding_file_comes_last(bucket: Bucket) -> None:
    """It is put when all others are joined, and only where none is."""
    run(URL)
    joins = [i for i, (method, path, _) in enumerate(bucket.requests) if method == "POST" and "uploadId=" in path]
    last = [i for i, (method, path, _) in enumerate(bucket.requests) if method == "PUT" and path.endswith(".metadata")]
    assert len(joins) == 2
    assert last[0] > max(joins)


@pytest.mark.parametrize("old", [False, True], ids=["new", "over"])
def test_a_file_of_one_part_is_one_request(bucket: Bucket, *, old: bool) -> None:
    """Where nothing is that it would take the place of before all is there; a file in parts costs two more."""
    bucket.objects |= {"run//out/sub/c.bin": b"old"} if old else {}
    target = open_target(URL, **OPTIONS | {"overwrite": old})
    write(target)
    target.flush()
    assert files(bucket)["sub/c.bin"] == (b"old" if old else b"c")
    target.commit(".metadata")
    n_requests = {path: bucket.count("P", path.replace(" ", "%20")) for path in FILES}
    assert n_requests == {".metadata": 1, "a.bin": 6, "empty": 1, "sub/b c.bin": 4, "sub/c.bin": 3 if old else 1}


def test_lost_answers(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored, though the server could not say so, is known again; what another process stored is not taken."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0)
    real, asked = S3Client._sent_once, set[tuple[Any, ...]]()

    def losing(self: S3Client, method: str, key: str, query: Any, *more: Any) -> Any:
        answer = real(self, method, key, query, *more)
        if method != "GET" and (method, key, *query) not in asked:
            asked.add((method, key, *query))
            raise ConnectionResetError
        return answer

    monkeypatch.setattr(S3Client, "_sent_once", losing)
    run(URL)
    assert files(bucket) == FILES
    assert bucket.uploads == {}
    target = open_target(f"{URL}/2", **OPTIONS)
    bucket.objects["run//out/2/x"] = b"other"
    target.create("x", 3)
    target.write("x", 0, b"own")
    with pytest.raises(TargetExists, match="another process has written it"):
        target.commit(None)


def test_begun_anew(bucket: Bucket) -> None:
    """Files that a killed run has put are not of the next one that has others; what was there before it stays."""
    for before in ({}, {"run//out/old": b"old"}):
        bucket.objects = dict(before)
        target = open_target(URL, **OPTIONS | {"overwrite": True})
        target.create("other", 5)
        target.write("other", 0, b"other")
        target.abandon()
        anew = open_target(URL, **OPTIONS | {"overwrite": True})
        assert {f"run//out/{path}": data for path, data in files(bucket).items() if "CKPT" not in path} == before
        write(anew)
        anew.commit(".metadata")
        assert files(bucket) == FILES


def test_discarded(bucket: Bucket) -> None:
    """Nothing is left of what is given up."""
    target = open_target(URL, **OPTIONS)
    write(target)
    target.abandon(discard=True)
    assert (bucket.objects, bucket.uploads) == ({}, {})


@pytest.mark.parametrize("old", [False, True], ids=["new", "over"])
def test_cleaned(bucket: Bucket, *, old: bool) -> None:
    """What a killed run has put goes; a checkpoint that it was to replace stays, also one without an index."""
    tensor = save({"w": np.zeros(3, np.float32)})
    before = {"run//out/model.safetensors": tensor} if old else {}
    bucket.objects |= before
    target = open_target(URL, **OPTIONS | {"overwrite": old})
    write(target)
    target.abandon()
    assert [left.path for left in ckpt_tool.clean(f"s3://{BUCKET}/run//", dry_run=False).leftovers] == ["out"]
    assert (bucket.objects, bucket.uploads) == (before, {})


def test_another_process_was_first(bucket: Bucket) -> None:
    """Two runs to one name: the second sees the marker; one that is past it does not replace what the other made."""
    target = open_target(URL, **OPTIONS)
    with pytest.raises(TargetExists, match="an earlier run was interrupted here"):
        open_target(URL, **OPTIONS)
    write(target)
    bucket.objects["run//out/.metadata"] = b"of another process"
    with pytest.raises(TargetExists, match="another process has written a checkpoint of this name"):
        target.commit(".metadata")
    assert files(bucket)[".metadata"] == b"of another process"


def test_existing_target(bucket: Bucket) -> None:
    """What is there stays until all new bytes are there; the file that makes it a checkpoint goes first."""
    bucket.objects |= {f"run//out/{path}": b"old" for path in ("a.bin", "z.bin", "model.safetensors.index.json")}
    bucket.objects["run//outer"] = b"of somebody else"
    with pytest.raises(TargetExists, match="is there already, with 3 files"):
        open_target(URL, **OPTIONS)
    target = open_target(URL, **{**OPTIONS, "overwrite": True})
    write(target)
    target.flush()
    assert files(bucket)["a.bin"] == b"old"
    target.commit(".metadata")
    assert files(bucket) == FILES
    deleted = [path.rpartition("/")[2] for method, path, _ in bucket.requests if method == "DELETE"]
    assert deleted[0] == "model.safetensors.index.json"
    assert bucket.objects["run//outer"] == b"of somebody else"


def test_single_file(bucket: Bucket) -> None:
    """One object under the name itself, which replaces the old one in one step."""
    url = f"s3://{BUCKET}/run/model.safetensors"
    for overwrite, content in ((False, b"1" * 2500), (True, b"2" * 1500)):
        target = open_target(url, **{**OPTIONS, "single_file": True, "overwrite": overwrite})
        target.create("model.safetensors", len(content))
        with pytest.raises(UsageError, match="expected one file"):
            target.create("other", 1)
        target.write("model.safetensors", 0, content)
        target.flush()
        assert bucket.objects.get("run/model.safetensors") != content
        target.commit(None)
        assert bucket.objects == {"run/model.safetensors": content}
    with pytest.raises(TargetExists, match="is there already"):
        open_target(url, **{**OPTIONS, "single_file": True})
    with pytest.raises(TargetExists, match="is a folder"):
        open_target(f"s3://{BUCKET}/run", **{**OPTIONS, "single_file": True})
    with pytest.raises(TargetExists, match="is a file"):
        open_target(url, **OPTIONS)
    with pytest.raises(UsageError, match="is a whole bucket"):
        open_target(f"s3://{BUCKET}/", **{**OPTIONS, "overwrite": True})


def test_out_of_order(bucket: Bucket) -> None:
    """A gap, a step back and a write beyond the end are refused with both offsets."""
    target = open_target(URL, **OPTIONS)
    target.create("a", 4)
    target.write("a", 0, b"ab")
    with pytest.raises(StorageError, match="front to back: expected offset 2, got 3"):
        target.write("a", 3, b"d")
    with pytest.raises(StorageError, match="a write from 2 to 5 does not fit the 4 bytes"):
        target.write("a", 2, b"cde")
    with pytest.raises(StorageError, match="created twice"):
        target.create("a", 4)
    with pytest.raises(StorageError, match="written to before it was created"):
        target.write("b", 0, b"")
    with pytest.raises(FormatError):
        target.create("../x", 1)
    with pytest.raises(StorageError, match="expected 4 bytes before the commit, got 2"):
        target.commit(None)
    target.abandon(discard=True)
    assert (bucket.objects, bucket.uploads) == ({}, {})


def test_many_files_under_way(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of more files than memory holds are an error that says so, not a machine that swaps."""
    monkeypatch.setattr("ckpt_tool.storage.parts.uploads._LEAST_MEMORY_BYTES", 30 * PART)
    target = open_target(URL, **OPTIONS, memory_bytes=1)
    for number in range(50):
        target.create(str(number), 2 * PART)
        if number < 20:
            target.write(str(number), 0, b"1")
    with pytest.raises(UsageError, match="so many files are under way at once"):
        write_first_bytes(target)
    target.abandon()


def write_first_bytes(target: Target) -> None:
    """Of all files that have none."""
    for number in range(20, 50):
        target.write(str(number), 0, b"1")


class Died(BaseException):
    """As if the process was killed: nobody handles it."""


def dying_at(monkeypatch: pytest.MonkeyPatch, number: int, *, is_done: bool) -> Callable[[], int]:
    """From now on the ``number``-th request is the last, sent or not; returns how many were made."""
    real = S3Client._sent_once
    n = 0

    def sent(self: Any, *args: Any) -> Any:
        nonlocal n
        n += 1
        if n > number or (n == number and not is_done):
            raise Died
        answer = real(self, *args)
        if n == number:
            raise Died
        return answer

    monkeypatch.setattr(S3Client, "_sent_once", sent)
    return lambda: n


@pytest.mark.parametrize("old", [False, True], ids=["new", "over"])
def test_death_at_every_request(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, *, old: bool) -> None:
    """Wherever a run dies, nothing looks whole that is not, and going on ends with the same bytes and no leftovers."""
    monkeypatch.setattr("ckpt_tool.storage.parts.uploads.N_UPLOADS", 1)
    monkeypatch.setattr(part_target, "N_UPLOADS", 1)
    before = {"run//out/.metadata": b"old", "run//out/a.bin": FILES["a.bin"][::-1], "run//out/z": b"old"} if old else {}
    number, n_resumed = 0, 0
    while True:
        number += 1
        bucket.objects, bucket.uploads = dict(before), {}
        with monkeypatch.context() as patch:
            made = dying_at(patch, number, is_done=number % 2 == 0)
            try:
                run(URL, overwrite=old)
                assert made() < number
                break
            except Died:
                pass
        left = files(bucket)
        is_old = {f"run//out/{path}": data for path, data in left.items() if "CKPT_" not in path} == before
        assert is_old or ".metadata" not in left or {**left, **FILES} == left
        n_parts = sum(len(parts) for _, parts in bucket.uploads.values())
        bucket.requests.clear()
        run(URL, overwrite=True, resume=True)
        assert files(bucket) == FILES
        assert bucket.uploads == {}
        n_resumed += n_parts > bucket.count("PUT", "partNumber=")
    assert number > 20
    assert n_resumed > 5
