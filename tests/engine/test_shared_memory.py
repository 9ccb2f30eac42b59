"""Shared memory between processes that are forks of nobody in particular."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from ckpt_tool.engine import shared_memory
from ckpt_tool.engine.save.arena import Arena
from ckpt_tool.engine.shared_memory import Segment, has_ended, host_key
from ckpt_tool.errors import StorageError

OTHER = """
import sys
from ckpt_tool.engine import shared_memory
from ckpt_tool.engine.shared_memory import Segment, host_key
segment = Segment.of_process(int(sys.argv[1]), int(sys.argv[2]), 100)
print(host_key(), bytes(segment.bytes[:5]).decode())
segment.bytes[99] = 7
"""


def test_another_process_maps_it() -> None:
    """What one writes the other reads, both ways, and both say that they share a host."""
    segment = Segment.holding([b"hel", memoryview(b""), b"lo", bytes(95)])
    run = subprocess.run(
        [sys.executable, "-c", OTHER, str(os.getpid()), str(segment.fd)], capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [str(host_key()), "hello"]
    assert segment.bytes[99] == 7
    segment.close()
    assert segment.bytes[99] == 7  # what is mapped stays


def test_what_cannot_be_mapped() -> None:
    """A descriptor that is not there, and more memory than there is."""
    with pytest.raises(StorageError, match="the shared memory of process 1 cannot be opened"):
        Segment.of_process(1, 987_654, 10)
    assert shared_memory._available_bytes() < 1 << 50
    with pytest.raises(StorageError, match=r"no shared memory of .* bytes: .* are available"):
        Segment.create(1 << 50)


def test_has_ended() -> None:
    """A process that nobody has waited for has ended all the same."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not has_ended(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process.pid)
    assert has_ended(process.pid)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems map page by page")
def test_memory_is_mapped_when_it_is_made() -> None:
    """Who fills a segment or an arena for the first time meets no page that is not there."""
    nbytes = 1024 * mmap.PAGESIZE
    segment, arena = Segment.create(nbytes), Arena.allocated(nbytes)
    assert not Segment.create(nbytes).bytes.any()
    filling = np.full(nbytes, 7, dtype=np.uint8)
    for memory in (segment.bytes, np.frombuffer(arena.memory, dtype=np.uint8)):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        memory[:] = filling
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 512
    del memory
    segment.close()
    arena.close()


def test_a_segment_of_nothing() -> None:
    """It is there and has no byte."""
    segment = Segment.holding([])
    assert len(segment.bytes) == 0
    assert len(Segment.of_process(os.getpid(), segment.fd, 0).bytes) == 0
    segment.close()
