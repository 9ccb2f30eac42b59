"""Copies of a process share jobs, and no error, kill or lost parent leaves one of them behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="copies are made on Linux only")


def told(body: str) -> list[str]:
    """Lines that a fresh process, which has one thread, prints."""
    head = "import os, signal, threading, time\nfrom ckpt_tool.errors import IntegrityError\n"
    head += "from ckpt_tool.storage.forks import can_fork, forked\n"
    ran = subprocess.run([sys.executable, "-c", head + body], capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.splitlines()


def test_each_job_is_done_once_by_more_than_one_process() -> None:
    """No job is lost or done twice, and what a job sends on the way arrives too."""
    lines = told(
        "def work(job, send):\n"
        "    send(('half', job)); time.sleep(0.01); return (job, os.getpid())\n"
        "assert can_fork()\n"
        "found = list(forked(range(40), lambda: work, n_processes=3))\n"
        "print(sorted(job for job, _ in found if job != 'half') == list(range(40)))\n"
        "print(sorted(job for half, job in found if half == 'half') == list(range(40)))\n"
        "pids = {pid for half, pid in found if half != 'half'}\n"
        "print(len(pids), os.getpid() in pids)\n"
    )
    assert lines == ["True", "True", "3 False"]


def test_no_job_is_begun_twice(tmp_path: Path) -> None:
    """However short jobs are, so that processes ask for the next one at the same moment."""
    lines = told(
        "import pathlib\n"
        "from ckpt_tool.storage.forks import _opened_list\n"
        "todo = _opened_list(range(100_000))\n"
        "gate, opened = os.pipe()\n"
        "for _ in range(4):\n"
        "    if not os.fork():\n"
        "        os.close(opened); os.read(gate, 1)\n"
        "        taken = b''.join(iter(lambda: os.read(todo, 8), b''))\n"
        f"        pathlib.Path({str(tmp_path)!r}, str(os.getpid())).write_bytes(taken)\n"
        "        os._exit(0)\n"
        "os.close(opened)\n"
        "while True:\n"
        "    try: os.wait()\n"
        "    except ChildProcessError: break\n"
        f"taken = b''.join(path.read_bytes() for path in pathlib.Path({str(tmp_path)!r}).iterdir())\n"
        "print(len(taken) // 8, len({taken[i : i + 8] for i in range(0, len(taken), 8)}))\n"
    )
    assert lines == ["100000 100000"]


def test_an_error_is_raised_as_it_was_and_ends_all() -> None:
    """Type, place, hint and exit status survive; the other copy does not finish its job."""
    lines = told(
        "def work(job, send):\n"
        "    if job == 3: raise IntegrityError('wrong', where='file 3', hint='fetch it')\n"
        "    time.sleep(30 if job > 3 else 0); return job\n"
        "start = time.monotonic()\n"
        "try:\n"
        "    list(forked(range(9), lambda: work, n_processes=2))\n"
        "except IntegrityError as error:\n"
        "    print(error, error.hint, error.exit_code, time.monotonic() - start < 20)\n"
        "try: os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError: print('no child is left')\n"
    )
    assert lines == ["file 3: wrong fetch it 3 True", "no child is left"]


def test_an_error_of_another_kind_says_where_it_was_raised() -> None:
    """The traceback of the copy is the error's cause."""
    lines = told(
        "def work(job, send): return 1 // job\n"
        "try: list(forked([0], lambda: work, n_processes=1))\n"
        "except ZeroDivisionError as error: print('in work' in str(error.__cause__))\n"
    )
    assert lines == ["True"]


def test_a_killed_copy_is_an_error() -> None:
    """As when the system is short of memory."""
    lines = told(
        "def work(job, send):\n"
        "    if job == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return job\n"
        "try: list(forked(range(5), lambda: work, n_processes=2))\n"
        "except OSError as error: print(error)\n"
        "try: os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError: print('no child is left')\n"
    )
    assert lines == ["a process that moved bytes was killed by SIGKILL", "no child is left"]


def test_who_stops_to_iterate_ends_the_copies() -> None:
    """As Ctrl-C does."""
    lines = told(
        "def work(job, send): time.sleep(30 if job else 0); return job\n"
        "results = forked(range(4), lambda: work, n_processes=2)\n"
        "print(next(results)); results.close()\n"
        "try: os.waitpid(-1, os.WNOHANG)\n"
        "except ChildProcessError: print('no child is left')\n"
    )
    assert lines == ["0", "no child is left"]


def test_copies_end_with_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL of the parent alone leaves nobody who writes."""
    body = (
        "import os, pathlib, time\nfrom ckpt_tool.storage.forks import forked\n"
        "def work(job, send):\n"
        f"    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch(); time.sleep(60)\n"
        "list(forked(range(2), lambda: work, n_processes=2))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", body])
    until = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    while any(_runs(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    """Whether a process exists that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_copy_is_made_beside_another_thread() -> None:
    """It would inherit locks that nobody opens."""
    lines = told(
        "stop = threading.Event()\n"
        "thread = threading.Thread(target=stop.wait); thread.start()\n"
        "print(can_fork()); stop.set(); thread.join()\n"
        # On a busy machine a joined thread may take longer to leave than can_fork waits for it.
        "until = time.monotonic() + 30\n"
        "while not can_fork() and time.monotonic() < until: pass\n"
        "print(can_fork())\n"
    )
    assert lines == ["False", "True"]
