"""How a writer process goes about a save: at which priority, while nobody waits and when somebody does."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt_tool.engine.save.commands import SaveCommand
from ckpt_tool.engine.save.links import Place
from ckpt_tool.engine.save.work import Work

COMMAND = SaveCommand(
    number=0, url="/nowhere", format="dcp", key="", arena=0, is_partial=False, timeout_s=1.0, overwrite=True,
    durable=True, digests=None, is_urgent=False, objects=(),
)  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no such policy")
def test_a_hurry_reaches_every_thread() -> None:
    """The thread that writes and the one that it has for checksums are idle ones, until somebody waits for the save."""
    work = Work(COMMAND, Place(0, 1, None, None, (), "token"), "01234567", None, {})
    usual = os.sched_getscheduler(0)
    seen: list[list[int]] = []
    turn = threading.Barrier(2)

    def write() -> None:
        work._lower_priority()
        with ThreadPoolExecutor(1) as checker:
            seen.append([checker.submit(os.sched_getscheduler, 0).result(), os.sched_getscheduler(0)])
            turn.wait(10)
            turn.wait(10)
            seen.append([checker.submit(os.sched_getscheduler, 0).result(), os.sched_getscheduler(0)])

    thread = threading.Thread(target=write)
    thread.start()
    turn.wait(10)
    work.hurry()
    turn.wait(10)
    thread.join()
    assert seen == [[os.SCHED_IDLE] * 2, [usual] * 2]
