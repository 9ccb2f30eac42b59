"""A folder of S3 or HDFS that several processes write together: what is seen when, who may, and what is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pytest

import ckpt_tool
from ckpt_tool.errors import NotFound, StorageError, TargetExists, UsageError
from ckpt_tool.storage.hdfs import client as hdfs_client
from ckpt_tool.storage.hdfs import place as hdfs_place
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.parts.place import PartLimits
from ckpt_tool.storage.remote import retry
from ckpt_tool.storage.remote.shared_remote import SharedRemote
from ckpt_tool.storage.s3 import place as s3_place
from ckpt_tool.storage.shared_target import SharedTarget, open_shared
from tests.storage.fault_proxy import fault_proxy
from tests.storage.hdfs_fake import Cluster, fake_module
from tests.storage.s3_server import BUCKET, Bucket, s3_environment, s3_server

PART = 1000
OF_RANK = [
    {"__0_0.distcp": np.random.default_rng(0).bytes(3500), "empty": b""},
    {"__1_0.distcp": np.random.default_rng(1).bytes(900)},
]
LAST = [("names", b"first"), (".metadata", b"commit")]
WHOLE = OF_RANK[0] | OF_RANK[1] | dict(LAST)


@dataclass
class Place:
    """Storage of one kind."""

    url: str
    bucket: Bucket | None
    opened: ExitStack = field(default_factory=ExitStack)
    """Closes what a test has opened here."""


@pytest.fixture(params=["s3", "hdfs"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Storage that takes small parts."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    limits = PartLimits(PART, PART, 100)
    if request.param == "hdfs":
        monkeypatch.setitem(sys.modules, "hdfs_native", fake_module(Cluster()))
        monkeypatch.setattr(hdfs_client, "_check_answers", lambda _: None)
        monkeypatch.setattr(hdfs_place, "PART_LIMITS", limits)
        place = Place("hdfs://nn/run/step-2", None)
        with place.opened:
            yield place
        return
    monkeypatch.setattr(s3_place, "PART_LIMITS", limits)
    with s3_server() as (endpoint, bucket):
        bucket.min_part_bytes = PART
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        place = Place(f"s3://{BUCKET}/run/step-2", bucket)
        with place.opened:
            yield place


@pytest.fixture
def s3(place: Place) -> Bucket:
    """Tests of S3 alone."""
    assert place.bucket is not None
    return place.bucket


def targets(place: Place, token: str = "00000001", *, overwrite: bool = True) -> list[SharedTarget]:
    """Those of two processes of one save."""
    opened = [open_shared(place.url, token, overwrite=overwrite, durable=True) for _ in OF_RANK]
    for target in opened:
        place.opened.callback(target.close)
    return opened


def sent(target: SharedTarget, files: dict[str, bytes]) -> dict[str, Any]:
    """What one process says when its files are durable."""
    said = {}
    for path, data in files.items():
        file = target.create(path, len(data))
        for start in range(0, len(data), 300):
            file.write([memoryview(data)[start : start + 100], memoryview(data)[start + 100 : start + 300]])
        said[path] = file.finish()
    return said


def save(place: Place, token: str = "00000001", *, overwrite: bool = True) -> None:
    """A whole one."""
    both = targets(place, token, overwrite=overwrite)
    said = [sent(target, files) for target, files in zip(both, OF_RANK, strict=True)]
    commit(both[0], said)


def commit(target: SharedTarget, said: list[dict[str, Any]]) -> None:
    """What the first process does."""
    sizes = {path: len(data) for files in OF_RANK for path, data in files.items()}
    target.commit(sizes, LAST, {path: receipt for each in said for path, receipt in each.items()})


def found(url: str) -> dict[str, bytes]:
    """What is under a name."""
    try:
        store, listing = open_store(url)
    except NotFound:
        return {}
    with closing(store):
        return {path: store.read(path, 0, nbytes) for path, nbytes in listing.sizes.items()}


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_connections_end_with_the_target(place: Place, s3: Bucket) -> None:
    """Not when somebody looks for garbage: a job saves for weeks. What was written stays."""
    target = targets(place)[0]
    said = sent(target, OF_RANK[0])
    client = target._place._client._http  # type: ignore[attr-defined]
    assert client._idle
    target.close()
    assert not client._idle
    assert said.keys() == OF_RANK[0].keys()
    assert len(s3.uploads) == 1


def test_nothing_is_seen_before_the_commit(place: Place) -> None:
    """Until then there is only what says that this is unfinished; after it nothing else than the files."""
    both = targets(place)
    said = [sent(target, files) for target, files in zip(both, OF_RANK, strict=True)]
    assert set(found(place.url)) <= {"CKPT_UNFINISHED"}
    commit(both[0], said)
    assert found(place.url) == WHOLE
    assert list(found(place.url.rpartition("/")[0])) == [f"step-2/{path}" for path in sorted(WHOLE)]
    for target in both:
        target.discard()
    assert found(place.url) == WHOLE


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_the_deciding_object_comes_last_and_only_where_none_is(place: Place, s3: Bucket) -> None:
    """Every file is joined, or put, on condition that there is none of its name; the last one after all others."""
    save(place)
    joins = [i for i, (method, path, _) in enumerate(s3.requests) if method == "POST" and "uploadId=" in path]
    last = [i for i, (method, path, _) in enumerate(s3.requests) if method == "PUT" and path.endswith(".metadata")]
    assert (len(joins), len(last)) == (2, 1)
    assert last[0] > max(joins)
    assert s3.uploads == {}


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_another_save_completes_first(place: Place, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has made stays as it is, byte by byte, whatever the other one was about to do."""
    both = targets(place)
    said = [sent(target, files) for target, files in zip(both, OF_RANK, strict=True)]
    real = s3_place.S3Place.old_files

    def overtaken(place: s3_place.S3Place) -> Any:
        old = real(place)
        s3.objects["run/step-2/__1_0.distcp"] = s3.objects["run/step-2/.metadata"] = b"of the other"
        return old

    monkeypatch.setattr(s3_place.S3Place, "old_files", overtaken)
    with pytest.raises(TargetExists, match="another save is completing a checkpoint of this name"):
        commit(both[0], said)
    for target in both:
        target.discard()
    assert {path: data for path, data in found(place.url).items() if path != "CKPT_UNFINISHED"} == {
        "__1_0.distcp": b"of the other", ".metadata": b"of the other",
    }  # fmt: skip
    assert s3.uploads == {}


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_another_save_begins_to_complete(place: Place, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker names who completes: the one that finds another name there gives up, and deletes nothing of it."""
    both = targets(place)
    said = [sent(target, files) for target, files in zip(both, OF_RANK, strict=True)]
    real = s3_place.S3Place.files

    def overtaken(place: s3_place.S3Place) -> Any:
        s3.objects["run/step-2/CKPT_UNFINISHED"] = b"Save 00000002"
        return real(place)

    monkeypatch.setattr(s3_place.S3Place, "files", overtaken)
    with pytest.raises(TargetExists):
        commit(both[0], said)
    both[0].discard()
    assert ".metadata" not in found(place.url)
    assert "__0_0.distcp" in found(place.url)


def test_replaced_once_all_bytes_are_there(place: Place) -> None:
    """What was there stays until then, and nothing of it after; without overwrite it is refused."""
    save(place)
    old = targets(place, "00000002")[0]
    old.create("__0_0.distcp", 5000).write([memoryview(bytes(5000))])
    assert {p: d for p, d in found(place.url).items() if p != "CKPT_UNFINISHED"} == WHOLE
    old.discard()
    assert found(place.url) == WHOLE
    with pytest.raises(TargetExists, match="is there already"):
        targets(place, "00000003", overwrite=False)[0].check()
    save(place, "00000004")
    assert found(place.url) == WHOLE


def test_given_up(place: Place) -> None:
    """When all processes have let go, nothing is left; as long as one has not, the marker says what there is."""
    both = targets(place)
    for target, files in zip(both, OF_RANK, strict=True):
        sent(target, files)
    both[1].discard()
    if place.bucket is not None:
        assert set(found(place.url)) == {"CKPT_UNFINISHED"}
    both[0].discard()
    assert found(place.url.rpartition("/")[0]) == {}
    assert place.bucket is None or place.bucket.uploads == {}


def test_killed(place: Place) -> None:
    """What it leaves is an incomplete step; `clean` removes it with its parts, and the next save does not need that."""
    run = place.url.rpartition("/")[0]
    save(replace(place, url=f"{run}/step-1"))
    for target, files in zip(targets(place), OF_RANK, strict=True):
        sent(target, files)
    (step,) = [step for step in ckpt_tool.ls(run).steps if step.step == 2]
    assert not step.is_complete
    (left,) = ckpt_tool.clean(run).leftovers
    assert left.path.startswith("step-2")
    assert left.nbytes >= sum(len(data) for files in OF_RANK for data in files.values())
    save(place, "00000002")
    assert found(place.url) == WHOLE
    for target, files in zip(targets(replace(place, url=f"{run}/step-3")), OF_RANK, strict=True):
        sent(target, files)
    assert ckpt_tool.clean(run, dry_run=False, min_age_s=1e12).leftovers[-1].is_recent
    assert ckpt_tool.clean(run, dry_run=False).removed
    assert ckpt_tool.clean(run).leftovers == ()
    assert place.bucket is None or place.bucket.uploads == {}
    assert sorted({path.partition("/")[0] for path in found(run)}) == ["step-1", "step-2"]


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_killed_over_a_checkpoint(place: Place, s3: Bucket) -> None:
    """The checkpoint that was to be replaced stays; what is sent but now is left alone, the hour of a part counts."""
    run = place.url.rpartition("/")[0]
    save(place)
    sent(targets(place, "00000002")[0], OF_RANK[0])
    (left,) = ckpt_tool.clean(run).leftovers
    assert (left.path, left.n_files) == ("step-2", 2)
    assert datetime.fromtimestamp(left.modified, timezone.utc).hour == 2  # listed objects are of midnight
    ckpt_tool.clean(run, dry_run=False)
    assert found(place.url) == WHOLE
    assert s3.uploads == {}


@pytest.mark.parametrize("place", ["s3"], indirect=True)
@pytest.mark.parametrize("dies_at", range(1, 12))
def test_killed_while_it_joins(place: Place, s3: Bucket, monkeypatch: pytest.MonkeyPatch, dies_at: int) -> None:
    """A server fails from some request of the commit on: half a checkpoint reads as none, and the next save works."""
    both = targets(place)
    said = [sent(target, files) for target, files in zip(both, OF_RANK, strict=True)]
    monkeypatch.setattr(retry, "ATTEMPTS", 1)
    with fault_proxy(_endpoint(), lambda number, *_: "503" if number >= dies_at else None) as (url, faults):
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", url)
            root = targets(place)[0]
            try:
                commit(root, said)
            except StorageError:
                assert ".metadata" not in found_by(s3)
            else:
                assert faults.n_requests >= 9
        assert (".metadata" in found_by(s3)) <= (found_by(s3).keys() >= WHOLE.keys())
    save(place, "00000002")
    assert found(place.url) == WHOLE
    assert s3.uploads == {}


def found_by(bucket: Bucket) -> dict[str, bytes]:
    """What the server has under the name."""
    return {key.removeprefix("run/step-2/"): data for key, data in bucket.objects.items()}


def _endpoint() -> str:
    return os.environ["AWS_ENDPOINT_URL"]


def test_memory_of_a_process() -> None:
    """Each process of a save would have one of its own."""
    with pytest.raises(UsageError, match="which no other one sees"):
        open_shared("memory://run/step-2", "00000001", overwrite=True, durable=True)


def test_what_fsspec_offers() -> None:
    """Files get their names at once, the deciding one last; what is there is not replaced."""
    url = "memory://shared-parts/step-2"
    both = [SharedRemote(url), SharedRemote(url)]
    said = [sent(target, files) for target, files in zip(both, OF_RANK, strict=True)]
    assert ".metadata" not in found(url)
    commit(both[0], said)
    assert found(url) == WHOLE
    with pytest.raises(TargetExists, match="a checkpoint is there already"):
        commit(both[1], said)
    for target in both:
        target.discard()
    assert set(found(url)) == dict(LAST).keys()
