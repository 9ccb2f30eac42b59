"""Jobs on two hosts: shared memory ends at a host, bytes and reports go between them.

The plain suite has four ranks that say where they are. ``make test-job``, as root, gives each host a network, a name
and processes of its own; ranks of two such hosts cannot see each other but through the link between them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool
from tests.job import host_jobs, workers

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
SIZE, PER_HOST = host_jobs.SIZE, host_jobs.PER_HOST
TIMEOUT_S = 240


def told(folder: Path) -> list[dict[str, Any]]:
    """What each rank of a job said."""
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(SIZE)]


def check(ranks: list[dict[str, Any]], folder: Path) -> None:
    """Bits, bytes read, the tree of a save, and failures that reach the other host."""
    assert [rank["groups"] for rank in ranks] == [[[0, 1], [2, 3]]] * SIZE
    assert {
        name: load["different"] for rank in ranks for name, load in rank["loads"].items() if load["different"]
    } == {}
    distinct = ranks[0]["loads"]["replicas none"]["needed"]

    def read(case: str) -> int:
        return sum(int(rank["loads"][case]["read"]) for rank in ranks)

    assert read("replicas none") == SIZE * distinct
    assert read("replicas shared-memory") == 2 * distinct
    assert read("hsdp shared-memory") == 2 * distinct
    assert [read(f"{layout} all-to-all") for layout in host_jobs.LAYOUTS] == [distinct] * len(host_jobs.LAYOUTS)
    assert read("replicas slow") <= 2 * distinct
    for case in ranks[0]["loads"]:
        loads = [rank["loads"][case] for rank in ranks]
        assert len({(load["exchange"], load["why"]) for load in loads}) == 1
    assert "through an all-to-all" in ranks[0]["loads"]["replicas slow"]["why"]
    assert ranks[0]["loads"]["replicas slow"]["exchange"] != "none"
    assert [rank["tree"] for rank in ranks] == [[None, [1, 2]], [0, []], [0, [3]], [2, []]]
    for name in host_jobs.FORMATS:
        for number in range(2):
            assert sum(rank["saves"][name][number] for rank in ranks) == distinct
        report = ckpt_tool.verify(folder / f"{name}-2", level="full", manifest=f"{folder / name}-2.digests.json")
        assert report.is_ok, [finding.message for finding in report.findings]
        extra = [ckpt_tool.load_extra_state(folder / f"{name}-1", rank, SIZE) for rank in range(SIZE)]
        assert extra == [{"rank": rank} for rank in range(SIZE)]
    for rank in ranks:
        assert rank["failure"]["kind"] == "StorageError"
        assert "no word from rank 3 within 1 s" in rank["failure"]["text"]


def test_ranks_that_say_where_they_are(tmp_path: Path) -> None:
    """Two ranks on each of two hosts, as far as they know."""
    workers.start(host_jobs.pretending, SIZE, tmp_path)
    check(told(tmp_path), tmp_path)


@contextmanager
def two_hosts() -> Iterator[list[tuple[list[str], str, str]]]:
    """For each of two hosts: what to put before the command of each of its ``RANKS``; network device, address."""
    mark = f"ckpt{os.getpid()}"
    names = [f"{mark}{letter}" for letter in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link0", "netns", names[1])
        hosts = []
        for number, name in enumerate(names):
            address = f"10.99.0.{number + 1}"
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "link0")
            ip("-n", name, "link", "set", "link0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            inside = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
            each = f'hostname host-{"ab"[number]}; for rank in $RANKS; do RANK=$rank "$@" & done; wait'
            hosts.append((["ip", "netns", "exec", name, *inside, "sh", "-c", each, "sh"], "link0", address))
        yield hosts
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


@pytest.mark.hosts
def test_two_hosts(tmp_path: Path) -> None:
    """Two ranks on each of two hosts; in the end one is killed, and both hosts hear of it."""
    with two_hosts() as hosts:
        jobs = []
        for number, (before, device, _) in enumerate(hosts):
            environment = {
                **os.environ, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                "MASTER_ADDR": hosts[0][2], "MASTER_PORT": "29517", "WORLD_SIZE": str(SIZE),
                "RANKS": " ".join(str(number * PER_HOST + rank) for rank in range(PER_HOST)),
            }  # fmt: skip
            argv = [*before, sys.executable, "-W", "ignore", "-m", "tests.job.host_jobs", str(tmp_path)]
            jobs.append(subprocess.Popen(argv, env=environment))
        try:
            for job in jobs:
                job.wait(TIMEOUT_S)
        finally:
            for job in jobs:
                job.kill()  # and with it all of its host
                job.wait()
    ranks = told(tmp_path)
    check(ranks, tmp_path)
    assert [rank["name"] for rank in ranks] == ["host-a", "host-a", "host-b", "host-b"]
    for rank in range(SIZE - 1):
        lost = json.loads((tmp_path / f"lost.{rank}.json").read_text(encoding="utf-8"))
        assert {name: each["kind"] for name, each in lost.items()} == {"load": "StorageError", "save": "StorageError"}
        assert f"rank {rank} of {SIZE} cannot go on: rank 3 has ended" in lost["load"]["text"]
        assert f"rank 3 of {SIZE} has gone" in lost["save"]["text"]
