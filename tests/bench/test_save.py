"""Saves of a job of 4 gloo ranks beside torch's own and, where it is installed, torch-checkpointing's: in turns.

``CKPT_BENCH_SAVE_MB`` sets the size (302), ``CKPT_BENCH_ROUNDS`` the measured rounds (7), ``CKPT_BENCH_PYTHON`` a
python that has torch-checkpointing beside torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench

MEGABYTES = os.environ.get("CKPT_BENCH_SAVE_MB", "302")
ROUNDS = os.environ.get("CKPT_BENCH_ROUNDS", "7")
PYTHON = os.environ.get("CKPT_BENCH_PYTHON", sys.executable)
HERE = Path(__file__).parent
TEXTS = {
    "memcpy": "memcpy of the state",
    "raw": "raw write and fsync",
    "dcp_sync": "dcp.save",
    "dcp_async": "dcp.async_save",
    "peer": "torch-checkpointing async (no fsync)",
    "ours": "ckpt_tool.save",
    "ours_overlapped": "ckpt_tool.save, staging overlapped",
    "ours_sync": "ckpt_tool.save, synchronous",
}


def test_save_beside_others(tmp_path: Path) -> None:
    """A table of milliseconds (longest of any rank): until the call returns, state may change, all is durable."""
    argv = [
        PYTHON, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4",
        str(HERE / "save_job.py"), str(tmp_path / "saved"), MEGABYTES, ROUNDS,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert len(rows) >= 7
    medians = {row["way"]: (row["staged"][1], row["durable"][1]) for row in rows}
    print(f"\n{MEGABYTES} MB, 4 ranks: min / median ms until return, until the state may be changed, until durable")
    for row in rows:
        columns = "  ".join(f"{1e3 * least:6.1f} {1e3 * middle:6.1f}" for least, middle in list(row.values())[1:])
        staged, durable = medians[row["way"]]
        ratios = f"{staged / medians['memcpy'][0]:5.2f}x memcpy  {durable / medians['raw'][1]:5.2f}x raw"
        print(f"  {TEXTS[row['way']]:36} {columns}  {ratios}")


def test_training_beside_saves(tmp_path: Path) -> None:
    """How much longer loops of Python and of matrix products take while a save is under way, beside torch's own."""
    argv = [
        PYTHON, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        str(HERE / "slowed_job.py"), str(tmp_path / "saved"), MEGABYTES, ROUNDS,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert len(rows) == 6
    alone = {row["loop"]: row["seconds"] for row in rows if row["way"] == "nothing"}
    print(f"\n{MEGABYTES} MB, 2 ranks: median seconds of a loop with one save, of which the call, and how much longer")
    for row in rows:
        more = row["seconds"] / alone[row["loop"]] - 1
        print(f"  {row['loop']:9} {row['way']:10} {row['seconds']:7.3f} {row['called']:7.3f}  {100 * more:+6.1f} %")
