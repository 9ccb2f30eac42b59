"""A target takes the bytes of a new checkpoint and makes them one, whole and durable, or not at all.

Knows paths and sizes below one final name; what the files mean is not its business.
"""

from __future__ import annotations

import os
from typing import Protocol

from ckpt_tool.errors import UsageError
from ckpt_tool.storage.local.target import LocalTarget
from ckpt_tool.storage.urls import is_local, scheme_of, shown, unfolded

__all__ = ["Bytes", "Log", "Target", "open_target"]

DEFAULT_MEMORY_BYTES = 512 << 20

Bytes = bytes | bytearray | memoryview


class Log(Protocol):
    """Bytes that are added to, and outlive the process."""

    def read(self) -> bytes:
        """All that was appended; nothing at first."""
        ...

    def append(self, data: bytes) -> None:
        """Add ``data`` and wait until it is durable."""
        ...


class Target(Protocol):
    """Where a checkpoint is written to. ``write`` may be called from several threads.

    Call ``create`` for every file before it is written, then ``commit`` once, or ``abandon``.
    """

    url: str
    """The final name."""
    is_sequential: bool
    """Whether each file must be written front to back, every byte of it once."""
    is_resumed: bool
    """Whether files of an interrupted run are there to be continued."""

    @property
    def journal(self) -> Log | None:
        """Where a journal for resuming belongs; removed by ``commit``. None where nothing can be resumed."""
        ...

    def create(self, path: str, nbytes: int, *, is_last: bool = False) -> None:
        """Make a file of ``nbytes``; unwritten bytes are zero where ``is_sequential`` is false.

        ``is_last`` marks the one file whose presence makes the target a checkpoint: it becomes visible in ``commit``.
        """
        ...

    def start_of(self, path: str) -> int:
        """Bytes at the beginning of a created file that an interrupted run has written for good.

        Only a sequential target knows; 0 elsewhere.
        """
        ...

    def write(self, path: str, offset: int, buffer: Bytes) -> None:
        """Write all of ``buffer`` at ``offset`` of a created file."""
        ...

    def flush(self) -> None:
        """Make durable what was written so far, as far as the storage can before ``commit``."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that still fit, None where the storage does not tell."""
        ...

    def commit(self, last_path: str | None) -> None:
        """Make the target visible under its final name; ``last_path`` is the file created with ``is_last``, if any."""
        ...

    def abandon(self, *, discard: bool = False) -> None:
        """Stop without a commit; ``discard`` also removes what a later run could resume."""
        ...


def open_target(
    url: str | os.PathLike[str],
    *,
    overwrite: bool,
    resume: bool,
    durable: bool,
    single_file: bool,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    joins: bool = False,
) -> Target:
    """A target that may be written to.

    Args:
        url: the final name, a path or a URL.
        overwrite: replace what is there under that name, once the new one is complete (local, HDFS), once all its
            bytes are there (S3), or from the first file on (other remote storage).
        resume: continue an interrupted run; local, S3 and HDFS only.
        durable: wait until bytes are on the device before the final name appears; local only.
        single_file: the final name is that of one file.
        memory_bytes: what buffers of a remote target may take.
        joins: another process owns and commits the target; local, S3 and HDFS only.

    Raises:
        TargetExists: something is there, and nothing was said about it.
        UsageError: arguments that do not go together, a URL with one slash, a ``~`` that no shell has replaced, or a
            folder that must not be replaced.
    """
    text = os.fspath(url)
    folded, home = unfolded(text), os.path.expanduser(text)
    if (folded is not None or home != text) and not os.path.isdir(text.partition("/")[0]):
        said, meant = ("a URL has two slashes", folded) if folded is not None else ("only shells know ~", home)
        raise UsageError(said, where=text, hint=f"write {meant}, or ./{text} for a folder")
    if is_local(text):
        return LocalTarget(
            text, overwrite=overwrite, resume=resume, durable=durable, single_file=single_file, joins=joins
        )
    from ckpt_tool.storage.parts.places import part_place

    place = part_place(text, single_file=single_file)
    if place is not None:
        from ckpt_tool.storage.parts.target import PartTarget  # local targets do without its 6 ms

        return PartTarget(
            place, overwrite=overwrite, resume=resume, single_file=single_file, memory_bytes=memory_bytes, joins=joins
        )
    from ckpt_tool.storage.remote.target import StreamTarget  # fsspec costs 80 ms of start-up

    if scheme_of(text) in {"http", "https"}:
        raise UsageError("is only read from", where=shown(text), hint="write to a folder, s3://, hdfs:// or gs://")
    if joins:
        hint = "the first process writes there alone with --split 0/1"
        raise UsageError("several processes write to a local folder, S3 or HDFS only", where=text, hint=hint)
    if resume:
        hint = 'start anew with "--overwrite"'
        raise UsageError("a run to this storage cannot be resumed, its parts are gone", where=text, hint=hint)
    return StreamTarget(text, overwrite=overwrite, single_file=single_file)
