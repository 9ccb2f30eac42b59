"""Runs that are killed with SIGKILL at random moments: nothing half looks whole, and --resume ends with the same bytes.

A few points here; ``make test-storage`` takes 200 (``CKPT_KILL_POINTS``) and prints what was seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.checkpoints import make_safetensors
from tests.storage.real_hdfs import real_hdfs
from tests.storage.real_servers import seaweedfs
from tests.storage.s3_server import BUCKET, s3_environment, s3_server

ROOT = Path(__file__).parents[2]
POINTS = int(os.environ.get("CKPT_KILL_POINTS", "200"))


def seen(source: Path, url: str, n: int, to: str = "dcp", **environment: str) -> dict[str, int]:
    """What ``killing.py`` saw."""
    argv = [sys.executable, str(ROOT / "tests/storage/killing.py"), str(source), url, str(n), "5", to]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    print(f"\n{url.partition(':')[0] if '://' in url else 'local'}, {to}, {n} points: {found}")
    assert found["killed"] == n
    ends = ("same bytes", "whole already", "whole, without its name")
    assert sum(found.get(name, 0) for name in ends) == n + found.get("finished", 0)
    return found


def test_local(tmp_path: Path) -> None:
    """A folder."""
    seen(make_safetensors(tmp_path / "x.safetensors"), str(tmp_path / "out"), 4)


def test_s3(tmp_path: Path) -> None:
    """Objects, with small parts."""
    with s3_server() as (endpoint, bucket):
        bucket.min_part_bytes = 64 << 10
        seen(make_safetensors(tmp_path / "x.safetensors"), f"s3://{BUCKET}/out", 4, **s3_environment(endpoint))


@pytest.mark.storage
@pytest.mark.parametrize("to", ["dcp", "torch-ranks"])
def test_local_matrix(tmp_path: Path, to: str) -> None:
    """A folder, and checksums that must come out of the journal."""
    found = seen(make_safetensors(tmp_path / "x.safetensors", n_tensors=240), str(tmp_path / "out"), POINTS, to)
    assert found["went on from what was there"] >= POINTS // 8


@pytest.mark.storage
@pytest.mark.parametrize("to", ["dcp", "torch-ranks"])
def test_s3_matrix(tmp_path: Path, to: str) -> None:
    """Objects, with small parts, of a server in Python."""
    with s3_server() as (endpoint, bucket):
        bucket.min_part_bytes = 64 << 10
        source = make_safetensors(tmp_path / "x.safetensors", n_tensors=60)
        found = seen(source, f"s3://{BUCKET}/out", POINTS, to, **s3_environment(endpoint))
    assert found["went on from what was there"] >= POINTS // 8


@pytest.mark.storage
def test_seaweedfs_matrix(tmp_path: Path) -> None:
    """Objects of a real server, with parts of 5 MiB."""
    source = make_safetensors(tmp_path / "x.safetensors", n_tensors=32, rows=1024)
    with seaweedfs(tmp_path / "weed") as endpoint:
        environment = {**s3_environment(endpoint), "CKPT_KILLING_PART_BYTES": str(5 << 20)}
        found = seen(source, f"s3://{BUCKET}/out", POINTS, **environment)
    assert found["went on from what was there"] >= POINTS // 8


@pytest.mark.hdfs
def test_hdfs_matrix(tmp_path: Path) -> None:
    """Files of a real cluster, with parts of 1 MiB. A file takes it half a second, so lines of the journal are few."""
    source = make_safetensors(tmp_path / "x.safetensors", n_tensors=24, rows=512)
    with real_hdfs(tmp_path / "hdfs") as cluster:
        environment = {"CKPT_WEBHDFS": cluster.webhdfs, "CKPT_KILLING_PART_BYTES": str(8 << 20)}  # lines of 2 MiB
        found = seen(source, f"{cluster.url}/out", POINTS // 4, **environment)
    assert found["went on from what was there"] >= POINTS // 32
