"""Ray starts the processes, and they write what one process writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peer

SOURCE = Path(__file__).parents[2] / "fixtures/torch/dcp_fsdp2_4r_fp32/ckpt"
RAY = os.environ.get("CKPT_PEER_RAY", sys.executable)
"""A Python that has Ray."""


def reshard(target: Path, *words: str) -> dict[str, bytes]:
    """What the command writes."""
    argv = [RAY, "-m", "ckpt_tool", "reshard", str(SOURCE), str(target), "--mesh", "dp_shard=2", *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2])])}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in target.iterdir()}


def test_a_cluster_writes_the_same_bytes(tmp_path: Path) -> None:
    """Two tasks beside the caller, and a cluster that is gone afterwards."""
    alone = reshard(tmp_path / "alone")
    assert reshard(tmp_path / "shared", "--processes", "3", "--engine", "ray") == alone
