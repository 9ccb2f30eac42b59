"""Runs a local target and kills itself, with SIGKILL, right before one numbered system call.

Usage: ``python crash.py FINAL overwrite|fresh exchange|rename``. For each number in turn the folder is made anew below
``FINAL`` and a forked process runs; one line of JSON is printed for each: what was left behind.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from typing import Any

from ckpt_tool.errors import TargetExists
from ckpt_tool.storage.local import kernel, renaming
from ckpt_tool.storage.local.target import LocalTarget

OLD = {"a.bin": b"old", "sub/old.bin": b"old"}
NEW = {"a.bin": b"new" * 1000, "sub/b.bin": b"b" * 5000, ".metadata": b"commit"}
CALLS = ("mkdir", "open", "ftruncate", "pwrite", "fsync", "fdatasync", "unlink", "rename", "replace", "rmdir", "write")


def write_new(final: str, *, overwrite: bool, resume: bool = False) -> None:
    """A whole run."""
    target = LocalTarget(final, overwrite=overwrite, resume=resume, durable=True, single_file=False)
    for path, data in NEW.items():
        target.create(path, len(data), is_last=path == ".metadata")
        target.write(path, 0, data)
        target.flush()
        with open(target.journal_path, "a") as journal:
            journal.write(path)
    target.commit(".metadata")


def contents(root: str) -> str:
    """``none``, ``old``, ``new``, or a list of what is there."""
    if not os.path.lexists(root):
        return "none"
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            full = os.path.join(folder, name)
            with open(full, "rb") as file:
                found[os.path.relpath(full, root)] = file.read()
    return "old" if found == OLD else "new" if found == NEW else f"other: {sorted(found)}"


def die_before(number: int) -> None:
    """From now on, the ``number``-th system call that changes something does not happen."""
    counter = itertools.count(1)

    def deadly(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    # What was written outlives a killed process without them, and they take most of the time.
    os.fsync = os.fdatasync = lambda fd: None
    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))
    vars(renaming)["exchange"] = deadly(vars(renaming)["exchange"])


def run_once(final: str, number: int, *, overwrite: bool) -> dict[str, Any]:
    """One run that dies at ``number``: what is left, and how going on ends."""
    folder = os.path.dirname(final)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    if overwrite:
        for path, data in OLD.items():
            os.makedirs(os.path.dirname(os.path.join(final, path)), exist_ok=True)
            with open(os.path.join(final, path), "wb") as file:
                file.write(data)
    pid = os.fork()
    if pid == 0:
        try:
            die_before(number)
            write_new(final, overwrite=overwrite)
        except BaseException:  # noqa: BLE001 - a fault of this script must not pass for a kill
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("the run failed by itself")
    is_dead = status != 0
    left = {name: contents(final + name) for name in ("", ".partial", ".replaced")}
    went_on = "not needed"
    if left[""] != "new":
        try:
            write_new(final, overwrite=overwrite, resume=True)
            went_on = contents(final)
        except TargetExists as error:
            went_on = error.message
    after = sorted(os.listdir(folder))
    return {"is_dead": is_dead, "left": left, "went_on": went_on, "after": after}


def main(final: str, old: str, swap: str) -> None:
    """Every number until a run survives."""
    if swap == "rename":
        vars(renaming)["exchange"] = lambda _first, _second: False
    kernel.fallocate(0, 0)
    for number in itertools.count(1):
        outcome = run_once(final, number, overwrite=old == "overwrite")
        print(json.dumps(outcome))
        if not outcome["is_dead"]:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
