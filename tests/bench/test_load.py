"""Loads in a job of 4 gloo ranks beside ``dcp.load``: in turns, from one save, checked to give the same bits.

``CKPT_BENCH_LOAD_MB`` sets the size (302), ``CKPT_BENCH_ROUNDS`` the measured rounds (5).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench

MEGABYTES = os.environ.get("CKPT_BENCH_LOAD_MB", "302")
ROUNDS = os.environ.get("CKPT_BENCH_ROUNDS", "5")
HERE = Path(__file__).parent


def test_load_beside_dcp(tmp_path: Path) -> None:
    """A table of seconds (longest of any rank) and megabytes read by all ranks, for each layout."""
    argv = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4",
        str(HERE / "load_job.py"), str(tmp_path / "saved"), MEGABYTES, ROUNDS,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert len(rows) == 15
    layout = ""
    for row in rows:
        if row["layout"] != layout:
            layout = row["layout"]
            peer = next(r["median_s"] for r in rows if r["layout"] == layout and r["loader"] == "dcp.load")
            print(f"\n{layout}, {MEGABYTES} MB, 4 ranks: min / median s, MB read, x of dcp.load")
        print(
            f"  {row['loader']:28} {row['min_s']:7.3f} {row['median_s']:7.3f} {row['read_mb']:8.1f}"
            f" {row['median_s'] / peer:6.2f}x"
        )
