"""Saving in a job to object storage, and loading from it: bits, faults, and what killed jobs leave.

With a server in this process, and marked ``storage`` and ``hdfs`` with real ones.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.multiprocessing as mp

import ckpt_tool
from ckpt_tool.storage.s3.client import S3Client
from ckpt_tool.storage.s3.place import S3Place
from tests.job import remote_jobs
from tests.job.test_save_faults import loaded
from tests.storage.fault_proxy import fault_proxy
from tests.storage.real_hdfs import real_hdfs
from tests.storage.real_servers import seaweedfs
from tests.storage.s3_server import BUCKET, s3_environment, s3_server

pytestmark = pytest.mark.dist

SIZE = 2


@pytest.fixture(params=["in this process", pytest.param("seaweedfs", marks=pytest.mark.storage)], scope="module")
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server."""
    if request.param == "seaweedfs":
        with seaweedfs(tmp_path_factory.mktemp("weed") / "server") as found:
            yield found
    else:
        with s3_server() as (found, _):
            yield found


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Its bucket, which this process and those that it starts talk to."""
    for name, value in s3_environment(endpoint).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}"


def test_saves_and_faults(s3: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of the truth; a server that refuses to join fails the save on all ranks, leaving nothing."""
    url = f"{s3}/saves/run"

    def choose(_: int, method: str, path: str) -> str | None:
        refuses = method == "POST" and "uploadId" in path and (tmp_path / "refuses").exists()
        return "503" if refuses else None

    with fault_proxy(endpoint, choose) as (proxy, faults), monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy)
        mp.spawn(remote_jobs.saves, (SIZE, str(tmp_path / "rendezvous"), str(tmp_path), url), nprocs=SIZE)
        assert faults.done["503"] >= 5
    for rank in range(SIZE):
        told = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert told["differences"] == []
        assert told["refused"]["kind"] == "StorageError"
        assert "SlowDown" in told["refused"]["text"]
        assert told["after"]["kind"] is None
    assert [(step.path, step.is_complete) for step in ckpt_tool.ls(url).steps] == [
        ("step-1", True), ("step-2", True), ("step-3", True),
    ]  # fmt: skip
    assert (loaded(f"{url}/step-2"), loaded(f"{url}/step-3")) == (2.0, 4.0)
    assert ckpt_tool.verify(f"{url}/step-1", level="full").findings == ()
    assert ckpt_tool.clean(url).leftovers == ()
    assert S3Place(f"{s3}/saves", single_file=False).under_way() == []
    names = {o.key for page in S3Client(BUCKET).pages("saves/") for o in page.objects}
    assert len(names) == 3 * (SIZE + 2)  # a file for each rank, metadata, digests beside them


@pytest.mark.hdfs
def test_saves_to_hdfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of the truth, the second save of a step replaces the first; what did not end is cleaned."""
    with real_hdfs(tmp_path / "hdfs") as cluster:
        monkeypatch.setenv("CKPT_WEBHDFS", cluster.webhdfs)
        url = f"{cluster.url}/saves/run"
        mp.spawn(remote_jobs.saves_to_hdfs, (SIZE, str(tmp_path / "rendezvous"), str(tmp_path), url), nprocs=SIZE)
        for rank in range(SIZE):
            assert json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))["differences"] == []
        assert loaded(f"{url}/step-2") == 2.0
        assert ckpt_tool.verify(f"{url}/step-1", level="full").findings == ()
        (left,) = ckpt_tool.clean(url).leftovers
        assert left.path == "step-3.00000009.partial"
        assert left.nbytes > SIZE * len("bytes")
        assert [step.path for step in ckpt_tool.ls(url).steps if not step.is_complete] == [left.path]
        ckpt_tool.clean(url, dry_run=False)
        assert [step.path for step in ckpt_tool.ls(url).steps] == ["step-1", "step-2"]


@pytest.mark.storage
def test_a_job_that_dies(s3: str, tmp_path: Path) -> None:
    """What it leaves is listed as incomplete; `clean` removes it, parts too, and the next save does not need that."""
    url = f"{s3}/killed/run"
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=remote_jobs.lost_job, args=(rank, SIZE, str(tmp_path / "rendezvous"), url))
        for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [-9, -9]
    assert [(step.path, step.is_complete) for step in ckpt_tool.ls(url).steps] == [("step-1", True), ("step-2", False)]
    assert loaded(f"{url}/step-1") == 1.0
    (left,) = ckpt_tool.clean(url).leftovers
    assert (left.path, left.n_files) == ("step-2", 2)
    assert left.nbytes > 300 * 400 * 4 // SIZE
    assert ckpt_tool.clean(url, dry_run=False).removed
    assert [step.path for step in ckpt_tool.ls(url).steps] == ["step-1"]
    assert S3Place(f"{s3}/killed", single_file=False).under_way() == []
    again = context.Process(target=remote_jobs.saves_alone, args=(f"{url}/step-2",))
    again.start()
    again.join(90)
    assert loaded(f"{url}/step-2") == 4.0
