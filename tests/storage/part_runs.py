"""What the tests of targets that take parts write, whatever the storage."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_tool.storage.target import Target, open_target

__all__ = ["FILES", "OPTIONS", "PART", "run", "write"]

OPTIONS: dict[str, Any] = {"overwrite": False, "resume": False, "durable": True, "single_file": False}
PART = 1000
"""Bytes of a part."""
FILES = {
    ".metadata": b"commit",
    "a.bin": np.random.default_rng(0).bytes(3500),
    "empty": b"",
    "sub/b c.bin": np.random.default_rng(1).bytes(2000),
    "sub/c.bin": b"c",
}


def write(target: Target, *, step: int = 300) -> None:
    """Everything but the commit, from where an earlier run was, files in turn."""
    for path, data in FILES.items():
        target.create(path, len(data), is_last=path == ".metadata")
    if target.journal is not None:
        target.journal.append(b"plan\n")
    at = {path: target.start_of(path) for path in FILES}
    while any(at[path] < len(data) for path, data in FILES.items()):
        for path, data in FILES.items():
            piece = data[at[path] : at[path] + step]
            target.write(path, at[path], piece)
            at[path] += len(piece)


def run(url: str, **options: bool) -> None:
    """A whole run."""
    target = open_target(url, **{**OPTIONS, **options})
    try:
        write(target)
        target.commit(".metadata")
    except BaseException:
        target.abandon()
        raise
