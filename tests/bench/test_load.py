"""Loads in a job of 4 gloo ranks beside ``dcp.load``: in turns, from one save, checked to give the same bits.

``CKPT_BENCH_LOAD_MB`` sets the size (302; behind a slow link 96), ``CKPT_BENCH_ROUNDS`` the measured rounds (5).
``CKPT_PEER_TORCH_CHECKPOINTING`` names the python of an environment that has torch-checkpointing, FUSE's ``mfusepy``
and what this package needs; then torch-checkpointing takes part, and storage of 200 MB/s is tried.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.bench

ROUNDS = os.environ.get("CKPT_BENCH_ROUNDS", "5")
PYTHON = os.environ.get("CKPT_PEER_TORCH_CHECKPOINTING", sys.executable)
LINK_MB = 200
HERE = Path(__file__).parent


def run_job(folder: Path, megabytes: str, *layouts: str) -> list[dict[str, Any]]:
    """What a job of 4 ranks printed: a row for each layout and loader."""
    return run_ranks("load_job.py", str(folder), megabytes, ROUNDS, *layouts)


def run_ranks(script: str, *arguments: str) -> list[dict[str, Any]]:
    """The rows that 4 ranks printed."""
    argv = [
        PYTHON, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4",
        str(HERE / script), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(argv, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("ROW ", "WHY "))]
    for kind, text in said:
        if kind == "WHY":
            print(f"\nauto: {json.loads(text)}")
    return [json.loads(text) for kind, text in said if kind == "ROW"]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table with ratios to ``dcp.load`` and, where it took part, to torch-checkpointing."""
    for layout in dict.fromkeys(row["layout"] for row in rows):
        of_layout = [row for row in rows if row["layout"] == layout]
        medians = {row["loader"]: statistics.median(row["seconds"]) for row in of_layout}
        peers = [name for name in ("dcp.load", "torch-checkpointing") if name in medians]
        print(f"\n{layout}, {title}: min / median s, MB read, times faster than {', '.join(peers)}")
        for row in of_layout:
            median = medians[row["loader"]]
            ratios = "".join(f" {medians[name] / median:6.2f}x" for name in peers)
            print(f"  {row['loader']:30} {min(row['seconds']):7.3f} {median:7.3f} {row['read_mb']:8.1f} {ratios}")


def test_load_beside_dcp(tmp_path: Path) -> None:
    """Seconds (longest of any rank) and megabytes read by all ranks, page cache warm."""
    megabytes = os.environ.get("CKPT_BENCH_LOAD_MB", "302")
    rows = run_job(tmp_path / "saved", megabytes)
    show(f"{megabytes} MB, 4 ranks", rows)
    for row in rows:
        if row["loader"] in {"ckpt_tool.load, shared-memory", "ckpt_tool.load, all-to-all"}:
            assert row["read_mb"] <= 1.01 * float(megabytes) + 1


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_first_load_of_a_process(tmp_path: Path, layout: str) -> None:
    """What a restart waits for: a job for each loader and round, in turns. Imports are shown apart."""
    megabytes = os.environ.get("CKPT_BENCH_LOAD_MB", "302")
    run_job(tmp_path / "saved", megabytes, "none")
    loaders = ["dcp.load", "ckpt_tool.load"]
    if (tmp_path / "saved-peer").is_dir():
        loaders.insert(1, "torch-checkpointing")
    rows = [
        row
        for _ in range(int(ROUNDS))
        for loader in loaders
        for row in run_ranks("first_load_job.py", str(tmp_path / "saved"), megabytes, layout, loader)
    ]
    print(f"\nrows to {layout}, {megabytes} MB, 4 ranks, first load of a process: min / median s, and its imports")
    for loader in loaders:
        seconds, imports = ([row[key] for row in rows if row["loader"] == loader] for key in ("seconds", "import"))
        print(f"  {loader:30} {min(seconds):7.3f} {statistics.median(seconds):7.3f} {statistics.median(imports):7.3f}")


@pytest.mark.parametrize("cache", ["", "cached"])
def test_load_through_a_slow_link(tmp_path: Path, cache: str) -> None:
    """Replicated state from storage that gives 200 MB/s to all ranks together, without and with a page cache."""
    megabytes = os.environ.get("CKPT_BENCH_LOAD_MB", "96")
    run_job(tmp_path / "saved", megabytes, "none")
    mount = tmp_path / "mount"
    with throttled(tmp_path, mount, cache):
        rows = run_job(mount / "saved", megabytes, "replicas", "rows")
    show(f"{megabytes} MB, 4 ranks, {LINK_MB} MB/s {cache}", rows)
    medians = {row["loader"]: statistics.median(row["seconds"]) for row in rows if row["layout"] == "rows to replicas"}
    # With a page cache the ranks share what one of them has read in any case: then the link is the limit of both.
    assert medians["ckpt_tool.load, auto"] <= medians["dcp.load"] / (1 if cache else 3)


@contextmanager
def throttled(folder: Path, mount: Path, cache: str) -> Iterator[None]:
    """``mount`` shows ``folder`` through a slow link."""
    mount.mkdir()
    argv = [
        sys.executable,
        str(HERE / "throttled_folder.py"),
        str(folder),
        str(mount),
        str(LINK_MB),
        *([cache] if cache else []),
    ]
    with subprocess.Popen(argv) as process:
        try:
            for _ in range(100):
                if mount.is_mount():
                    break
                time.sleep(0.1)
            assert mount.is_mount()
            yield
        finally:
            subprocess.run(["fusermount", "-uz", str(mount)], check=False)
            process.wait(10)
