"""Jobs shared out to threads and to copies of the process: each counts once, whatever becomes of a copy."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.storage import shares
from ckpt_tool.storage.forks import can_fork
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.mapped import are_local, mapped
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.shares import can_share, share_out
from ckpt_tool.storage.store import Listing
from ckpt_tool.storage.virtual.beside import Beside

# The process of the tests has threads of numpy's, which hold nothing that is used here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
N_JOBS = 300


def found(
    n_workers: int, *, in_copies: bool, mishap: Callable[[int], None] = lambda job: None
) -> list[tuple[int, int]]:
    """Process and number of each job; ``mishap`` is what befalls a copy at a job."""

    def make_work(is_copy: bool) -> Callable[[int], tuple[int, int]]:
        def work(job: int) -> tuple[int, int]:
            if is_copy:
                mishap(job)
            return os.getpid(), job

        return work

    results: list[tuple[int, int]] = []
    share_out(range(N_JOBS), make_work, results.append, n_workers=n_workers, in_copies=in_copies)
    return results


@pytest.mark.parametrize("in_copies", [True, False])
@pytest.mark.parametrize("n_workers", [1, 3])
def test_every_job_is_done_once(in_copies: bool, n_workers: int) -> None:
    """By as many workers as were asked for at most, in this process or in others."""
    results = found(n_workers, in_copies=in_copies)
    assert sorted(job for _, job in results) == list(range(N_JOBS))
    pids = {pid for pid, _ in results}
    assert (os.getpid() in pids) is not in_copies
    assert len(pids) <= n_workers


def test_nothing_to_do() -> None:
    """No job, no process."""
    share_out([], lambda is_copy: lambda job: job, lambda result: None, n_workers=2, in_copies=True)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_what_a_copy_does_not_bring_home_is_done_here(n_workers: int) -> None:
    """What it was at when it was ended, and what nobody had begun."""

    def mishap(job: int) -> None:
        if job == 7:
            os.kill(os.getpid(), signal.SIGBUS)

    results = found(n_workers, in_copies=True, mishap=mishap)
    assert sorted(job for _, job in results) == list(range(N_JOBS))
    assert (os.getpid(), 7) in results


def test_an_error_is_raised_here() -> None:
    """Whatever it is, and no process is left."""

    def mishap(job: int) -> None:
        if job == 7:
            raise ValueError("not here")

    before = children()
    with pytest.raises(ValueError, match="not here"):
        found(2, in_copies=True, mishap=mishap)
    assert children() == before


def children() -> set[str]:
    """Processes that this one has begun; other tests may have left some."""
    lists = (path.read_text(encoding="ascii") for path in Path("/proc/self/task").glob("*/children"))
    return {pid for pids in lists for pid in pids.split()}


def test_when_files_are_looked_at_in_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Local files that are worth it; not with a library that keeps threads and devices of its own."""
    store = LocalStore(str(tmp_path))
    monkeypatch.setattr(shares, "can_fork", lambda: True)
    assert can_share(store, ["a"], 1 << 30)
    assert not can_share(store, ["a"], 1 << 20)
    assert not can_share(MemoryStore({}), ["a"], 1 << 30)
    monkeypatch.setattr(shares, "can_fork", lambda: False)
    assert not can_share(store, ["a"], 1 << 30)
    monkeypatch.setattr(os, "listdir", lambda path: ["1"])
    for name in ("torch", "jax", "tensorflow", "cupy", "mpi4py", "ray"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert can_fork()
    monkeypatch.setitem(sys.modules, "torch", sys)
    assert not can_fork()


def test_mapped_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    """From any byte to any byte, and nothing where the file ends before."""
    data = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8)
    (tmp_path / "a").write_bytes(data.tobytes())
    store = LocalStore(str(tmp_path))
    for start, stop in [(0, 1), (0, 40_000), (4095, 4097), (4096, 8192), (13, 39_999)]:
        window = mapped(store, "a", start, stop)
        assert window is not None
        assert window.tobytes() == data[start:stop].tobytes()
    assert mapped(store, "a", 39_000, 50_000) is None
    assert mapped(store, "a", 50_000, 60_000) is None
    assert mapped(store, "b", 0, 1) is None
    store.close()


def test_which_files_are_mapped(tmp_path: Path) -> None:
    """Those of a folder, also of one that a remote store stands beside."""
    (tmp_path / "a").write_bytes(b"here")
    local, other = LocalStore(str(tmp_path)), MemoryStore({"b": b"there"})
    both = Beside(local, other, frozenset({"b"}), Listing("both", {"a": 4, "b": 5}))
    assert are_local(both, ["a"])
    assert not are_local(both, ["a", "b"])
    window = mapped(both, "a", 1, 3)
    assert window is not None
    assert window.tobytes() == b"er"
    assert mapped(both, "b", 1, 3) is None
