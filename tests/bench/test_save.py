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
N_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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


@pytest.mark.parametrize("n_ranks", [max(1, N_CORES // 2), max(2, N_CORES)])
def test_training_beside_saves(n_ranks: int, tmp_path: Path) -> None:
    """How much longer loops take beside a save, with a core to spare for each rank's writer and without one."""
    argv = [
        PYTHON, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}",
        str(HERE / "slowed_job.py"), str(tmp_path / "saved"), MEGABYTES, ROUNDS,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    load = os.getloadavg()[0]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert len(rows) == 6
    print(f"\n{MEGABYTES} MB, {n_ranks} ranks on {N_CORES} cores, load {load:.1f} before: medians of {ROUNDS} loops")
    print("  loop      beside      call ms | longer by the clock (quartiles apart), by CPU time | under way for")
    for row in rows:
        columns = f"{1e3 * row['called']:7.1f} | {100 * row['wall']:+6.1f} % ({100 * row['spread']:.1f}) "
        columns += f"{100 * row['cpu']:+6.1f} % | {100 * row['share']:3.0f} %"
        print(f"  {row['loop']:9} {row['way']:10} {columns}")
