"""Measuring whole processes side by side: interleaved runs, time and peak memory as the system says.

Machines are noisy and drift, so commands take turns, and what counts is the ratio of medians.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Figure", "Row", "beyond_start", "interleaved", "report"]

RESULTS = Path("bench-results")


@dataclass(frozen=True, slots=True)
class Row:
    """One command of a comparison."""

    name: str
    argv: Sequence[str]
    output: Path | None = None
    """Removed right before the next run, of whatever row: nothing of it is still to be written then, and all find the
    memory that was its page cache. (A virtual machine's host takes back free memory, and who writes to it first waits.)
    """
    environment: Mapping[str, str] | None = None
    reads_cold: Path | None = None
    """A folder whose files are taken out of the page cache before each run, so that they are read from storage."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What was seen of one command: seconds and megabytes (10**6 bytes)."""

    name: str
    min_s: float
    median_s: float
    max_s: float
    peak_mb: float
    cpu_s: float | None = None
    """Median of the processors' seconds, in the program and in the kernel: what other load changes least."""


def interleaved(rows: Sequence[Row], *, n_rounds: int) -> list[Figure]:
    """Run all commands in turn, one unmeasured round first; a command that fails stops the benchmark."""
    seconds: dict[str, list[float]] = {row.name: [] for row in rows}
    cpu: dict[str, list[float]] = {row.name: [] for row in rows}
    peaks: dict[str, list[float]] = {row.name: [] for row in rows}
    left: Path | None = None
    for number in range(n_rounds + 1):
        # In another order each time: what the system does every few seconds would else meet the same row every round.
        for row in random.Random(number).sample(rows, len(rows)):
            if left is not None:
                _remove(left)
            wall, cpu_s, peak = _run(row, is_sampled=not number)
            left = row.output
            peaks[row.name].append(peak)
            if number:
                seconds[row.name].append(wall)
                cpu[row.name].append(cpu_s)
    if left is not None:
        _remove(left)
    return [
        Figure(name, min(times), statistics.median(times), max(times), max(peaks[name]), statistics.median(cpu[name]))
        for name, times in seconds.items()
    ]


def beyond_start(figure: Figure, start: Figure) -> Figure:
    """What a command takes beyond one that only starts and reads metadata: minima, medians, maxima less those."""
    return Figure(
        figure.name.replace("ckpt verify", "net:"),
        figure.min_s - start.min_s,
        figure.median_s - start.median_s,
        figure.max_s - start.max_s,
        figure.peak_mb,
    )


def _run(row: Row, *, is_sampled: bool) -> tuple[float, float, float]:
    """Wall and processor seconds, and peak megabytes: of the largest process, or ``is_sampled`` of all together."""
    # An installed program has its bytecode; a shell that forbids writing it would time the compiler.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | dict(row.environment or {})
    if row.reads_cold is not None:
        _cool(row.reads_cold)
    started = time.perf_counter()
    with subprocess.Popen(row.argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment) as process:
        peak = _peak_together(process.pid) if is_sampled else 0.0
        errors = process.stderr.read() if process.stderr is not None else b""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError(f"{row.name} exited with {process.returncode}: {errors.decode()[-2000:]}")
    return wall, usage.ru_utime + usage.ru_stime, max(peak, usage.ru_maxrss * 1024 / 1e6)


def _peak_together(pid: int) -> float:
    """Megabytes of a process and its descendants until it ends, what they share counted once; sampled."""
    peak = 0.0
    while (now := sum(map(_proportional, _family(pid)))) > 0:
        peak = max(peak, now)
        time.sleep(0.005)
    return peak


def _family(pid: int) -> list[int]:
    family = [pid]
    for member in family:
        with suppress(OSError):  # it has ended
            family += [int(child) for child in Path(f"/proc/{member}/task/{member}/children").read_text().split()]
    return family


def _proportional(pid: int) -> float:
    """Megabytes of a process, each page divided by those who have it; 0 when it has ended."""
    try:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(row.split()[1]) for row in rows if row.startswith("Pss:")) * 1024 / 1e6
    except OSError:
        return 0.0


def _cool(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is still to be written stays
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


def report(title: str, figures: Sequence[Figure], *, peer: str, write: Callable[[str], object] = print) -> None:
    """Print a table with ratios to ``peer`` and keep it as JSON, beside the ratios of the run before."""
    base = next(figure for figure in figures if figure.name == peer)
    path = RESULTS / f"{title.split(':', maxsplit=1)[0]}.json"
    before: dict[str, float] = {}
    if path.exists():
        before = {row["name"]: row["ratio"] for row in json.loads(path.read_text())["rows"]}
    write(f"\n{title}")
    times = " ".join(f"{head:>8s}" for head in ("min s", "median", "max"))
    write(f"{'':34s} {times} {'x ' + peer:>12s} {'last':>8s} {'cpu s':>8s} {'peak MB':>9s}")
    rows = []
    for figure in figures:
        ratio = figure.median_s / base.median_s
        cpu = f"{'-':>8s}" if figure.cpu_s is None else f"{figure.cpu_s:8.3f}"
        last = f"{before[figure.name]:8.2f}" if figure.name in before else f"{'-':>8s}"
        write(
            f"{figure.name:34s} {figure.min_s:8.3f} {figure.median_s:8.3f} {figure.max_s:8.3f} {ratio:12.2f} {last} "
            f"{cpu} {figure.peak_mb:9.0f}"
        )
        rows.append({**asdict(figure), "ratio": ratio})
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps({"title": title, "peer": peer, "rows": rows}, indent=1) + "\n")
