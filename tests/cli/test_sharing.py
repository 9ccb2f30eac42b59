"""The same command started several times, by a launcher, by hand or by itself, writes what one process writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from ckpt_tool.api.convert.share import launched_share, local_count, parse_share
from ckpt_tool.engine.team import Share
from ckpt_tool.errors import UsageError
from tests.storage.checkpoints import make_safetensors
from tests.storage.killing import kept_at
from tests.storage.real_hdfs import real_hdfs
from tests.storage.real_servers import seaweedfs
from tests.storage.s3_server import BUCKET, s3_environment, s3_server

SOURCE = Path(__file__).parents[2] / "fixtures/torch/dcp_fsdp2_4r_fp32/ckpt"
LAYOUT = ("--mesh", "dp_shard=2", "--no-fsync")


def start(target: Path | str, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """One process of ``ckpt reshard``."""
    clean = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    return subprocess.Popen(
        [sys.executable, "-m", "ckpt_tool", "reshard", str(SOURCE), str(target), *LAYOUT, *words],
        env={**clean, **(environment or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finished(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each."""
    said = [process.communicate(timeout=300) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def content(folder: Path) -> dict[str, bytes]:
    """Every file's bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes."""
    target = tmp_path_factory.mktemp("alone") / "out"
    ((status, _, errors),) = finished([start(target)])
    assert status == 0, errors
    return content(target)


def test_a_launcher_starts_two(tmp_path: Path, alone: dict[str, bytes]) -> None:
    """RANK and WORLD_SIZE are enough: the first says what was written, the other one only that its share is."""
    names = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "job"}
    processes = [start(tmp_path / "out", environment={**names, "RANK": str(rank)}) for rank in range(2)]
    (first, out, _), (second, other_out, other_errors) = finished(processes)
    assert (first, second) == (0, 0), other_errors
    assert str(tmp_path / "out") in out
    assert other_out == ""
    assert "process 2 of 2" in other_errors
    assert content(tmp_path / "out") == alone


def test_it_starts_four_by_itself(tmp_path: Path, alone: dict[str, bytes]) -> None:
    """--processes needs no launcher."""
    ((status, out, errors),) = finished([start(tmp_path / "out", "--processes", "4", "--json")])
    assert status == 0, errors
    assert out.startswith("{")
    assert content(tmp_path / "out") == alone


def test_it_shares_an_upload() -> None:
    """Two processes send one file each; the objects are those of one process, and both's requests are told."""
    with s3_server() as (endpoint, bucket):
        for name, n in (("alone", "1"), ("shared", "2")):
            words = ("--processes", n)
            url = f"s3://{BUCKET}/{name}/x"
            ((status, _, errors),) = finished([start(url, *words, environment=s3_environment(endpoint))])
            assert status == 0, errors
            assert f"storage: {len(bucket.requests)} requests" in errors
            bucket.requests.clear()
        objects = bucket.objects
        alone = {key.removeprefix("alone/"): data for key, data in objects.items() if key.startswith("alone/")}
        assert {key.removeprefix("shared/"): data for key, data in objects.items() if key[0] == "s"} == alone
        assert len(alone) == 4
        assert bucket.uploads == {}


def three_upload(base: str, source: Path, to: str, told: Mapping[str, str]) -> None:
    """The bytes of three processes are those that one sends; none are seen when the first one is killed."""
    words = ("--dp", "5", "--dp-mode", "shard", "--default", "shard0", "--to", to)
    argv = [sys.executable, "-m", "ckpt_tool", "reshard", str(source)]
    environment = {**os.environ, **told, "TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "3"}
    alone = [*argv, f"{base}/alone", *words, "--split", "0/1"]
    subprocess.run(alone, check=True, capture_output=True, timeout=300, env=environment)

    def started(*more: str) -> list[subprocess.Popen[str]]:
        return [
            subprocess.Popen(
                [*argv, f"{base}/out", *words, *more], env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(3)
        ]  # fmt: skip

    processes = started()
    processes[2].send_signal(signal.SIGSTOP)  # before it can have sent anything
    processes[1].wait(timeout=300)
    processes[0].send_signal(signal.SIGKILL)
    processes[2].send_signal(signal.SIGKILL)
    finished(processes)
    with patch.dict(os.environ, environment):
        left = kept_at(f"{base}/out").files()
        assert not left or ("CKPT_UNFINISHED" in left and ".metadata" not in left)
        said = finished(started("--resume"))
        assert [status for status, _, _ in said] == [0, 0, 0], said
        assert "were there already" in " ".join(said[0][1].split())
        folder = kept_at(f"{base}/out")
        assert folder.files() == kept_at(f"{base}/alone").files()
        assert folder.leftovers() == 0


@pytest.mark.storage
@pytest.mark.parametrize("to", ["dcp", "torch-ranks"])
def test_a_launcher_uploads_to_seaweedfs(tmp_path: Path, to: str) -> None:
    """Three processes to a real server of objects."""
    source = make_safetensors(tmp_path / "x.safetensors", n_tensors=40, rows=512)
    with seaweedfs(tmp_path / "weed") as endpoint:
        three_upload(f"s3://{BUCKET}", source, to, s3_environment(endpoint))


@pytest.mark.hdfs
def test_a_launcher_writes_to_hdfs(tmp_path: Path) -> None:
    """Three processes to a real cluster, in both kinds of formats: with a file that comes last, and without."""
    source = make_safetensors(tmp_path / "x.safetensors", n_tensors=40, rows=512)
    with real_hdfs(tmp_path / "hdfs") as cluster:
        for to in ("dcp", "torch-ranks"):
            three_upload(f"{cluster.url}/{to}", source, to, {"CKPT_WEBHDFS": cluster.webhdfs})


def test_export_is_shared_too(tmp_path: Path) -> None:
    """Whole tensors in one folder, by two processes and by one."""
    argv = [sys.executable, "-m", "ckpt_tool", "export", str(SOURCE), "--no-fsync"]
    for name, words in (("alone", ()), ("shared", ("--processes", "2"))):
        subprocess.run([*argv, str(tmp_path / name), *words], check=True, capture_output=True, timeout=300)
    assert content(tmp_path / "shared") == content(tmp_path / "alone")
    assert (tmp_path / "shared.digests.json").read_bytes() == (tmp_path / "alone.digests.json").read_bytes()


def test_a_killed_process_leaves_nothing_that_looks_whole(tmp_path: Path, alone: dict[str, bytes]) -> None:
    """Kill -9 the one that commits: the other one stops too; two that resume end with the same bytes."""
    target = tmp_path / "out"
    first, second = (start(target, "--split", f"{number}/3") for number in range(2))  # the third never comes
    deadline = time.monotonic() + 60
    partial = tmp_path / "out.partial"
    while not list(partial.glob("CKPT_PROCESS*.1")) if partial.exists() else True:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second.wait(timeout=60)
    first.send_signal(signal.SIGKILL)
    (killed, _, _), _ = finished([first, second])
    assert killed == -signal.SIGKILL
    assert not target.exists()
    resumed = [start(target, "--split", f"{number}/2", "--resume") for number in range(2)]
    (status, out, errors), (other, _, other_errors) = finished(resumed)
    assert (status, other) == (0, 0), errors + other_errors
    assert content(target) == alone
    assert "were there already" in out


def test_a_member_that_is_killed_is_named(tmp_path: Path) -> None:
    """The first process says who is missing and how to go on, with the exit status of storage failures."""
    target = tmp_path / "out"
    first, second = (start(target, "--split", f"{number}/3") for number in range(2))
    partial = tmp_path / "out.partial"
    deadline = time.monotonic() + 60
    while not (partial.exists() and list(partial.glob("CKPT_PROCESS*.1"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    token = next(partial.glob("CKPT_PROCESS*.1")).name.split(".")[1]
    (partial / f"CKPT_PROCESS.{token}.2").write_text("")  # as the system leaves it when its process is gone
    (status, _, errors), _ = finished([first, second])
    assert status == 4
    assert "process 3 of 3 ended before its share was written" in errors
    assert "--resume" in errors
    assert not target.exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "a", "MASTER_PORT": "1"}, Share(2, 4, "a 1")),
        ({"RANK": "0"}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "n"}, Share(1, 2, "n")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Share(1, 2)),
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
            Share(3, 8, "7 0"),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script, which is alone
    ],
)
def test_what_launchers_say(environment: dict[str, str], expected: Share | None) -> None:
    """Rank, number and name of the run by torchrun's, Open MPI's, MPICH's and Slurm's variables."""
    found = launched_share(environment)
    assert (found and found[0]) == expected


def test_threads_are_shared_on_a_machine() -> None:
    """The number of processes on this machine, in each launcher's spelling."""
    assert local_count({"LOCAL_WORLD_SIZE": "8"}) == 8
    assert local_count({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}) == 4
    assert local_count({}) == 1


@pytest.mark.parametrize("text", ["4/4", "1", "-1/2", "a/b", "1/"])
def test_shares_that_cannot_be(text: str) -> None:
    """A number from 0, below how many there are."""
    with pytest.raises(UsageError, match="expected a process's number from 0"):
        parse_share(text)
