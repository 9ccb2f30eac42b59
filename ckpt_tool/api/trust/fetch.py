"""What to fetch again of a damaged checkpoint: whole files, or ranges of bytes where these are known."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

from ckpt_tool.api.trust.verify import verify
from ckpt_tool.checks.report import VerifyReport
from ckpt_tool.errors import CkptError, FormatError, IntegrityError, NotFound, UnsafePickle
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.lacking import lacking_files, unreadable_files
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.store import Listing

__all__ = ["SCHEMA", "FetchPlan", "plan_fetch"]

SCHEMA = "ckpt-tool/fetch/1"


@dataclass(frozen=True)
class FetchPlan:
    """Files and ranges that another copy would mend."""

    ranges: tuple[FileRange, ...]
    """A range by its first byte; length 0 is the whole file, -1 all from the offset on."""
    is_ok: bool
    """Whether nothing is wrong."""
    notes: tuple[str, ...]
    """Why nothing more is known."""

    def to_json(self) -> dict[str, Any]:
        """Schema ``ckpt-tool/fetch/1``: ``fetch[] {file offset length}``, ``notes[]``.

        ``length`` is null for the rest of a file, both numbers for all of it.
        """
        fetch = [
            {
                "file": each.path,
                "offset": each.offset if each.length else None,
                "length": each.length if each.length > 0 else None,
            }
            for each in self.ranges
        ]
        return {"schema": SCHEMA, "fetch": fetch, "notes": list(self.notes)}


def plan_fetch(checkpoint: str | os.PathLike[str], **options: Any) -> FetchPlan:
    """What to fetch again, after a verification with these options.

    Where a file is so damaged that nothing can be read without it, that file alone is known.

    Raises:
        CkptError: nothing is there, or it is wrong in a way that no other copy of a file mends.
    """
    try:
        report = verify(checkpoint, **options)
    except (FormatError, IntegrityError, NotFound) as error:
        files = () if isinstance(error, UnsafePickle) else _files_of(error, checkpoint)
        if not files:
            raise
        return FetchPlan(tuple(FileRange(path, 0, 0) for path in files), is_ok=False, notes=(str(error),))
    ranges = report.to_fetch()
    return FetchPlan(ranges, report.is_ok and not ranges, tuple(_notes(report, ranges)))


def _files_of(error: CkptError, checkpoint: str | os.PathLike[str]) -> tuple[str, ...]:
    """Files that an error is about: those it says are missing, the one it was raised for, or what all others lack."""
    if error.files:
        return error.files
    try:
        store, listing = open_store(checkpoint)
    except CkptError:
        return ()
    with closing(store):
        if listing.entry is not None:
            return (listing.entry,) if _is_known(listing.entry) else ()
        named = listing.named((error.where or "").removeprefix(f"{listing.url.rstrip('/')}/"))
        if named is not None:
            return (named,)
        if isinstance(error, NotFound) and _is_inside(error.where, listing):
            return (str(error.where),)
        return tuple(sorted({*lacking_files(listing.sizes), *unreadable_files(Source(store, listing))}))


def _is_inside(where: str | None, listing: Listing) -> bool:
    """Whether a place is a path relative to the checkpoint: one of a file beside others that are here."""
    if not where or "://" in where or where.startswith(("/", ".", listing.url)):
        return False
    folder = where.rpartition("/")[0]
    return not folder or any(path.startswith(f"{folder}/") for path in listing.sizes)


def _is_known(path: str) -> bool:
    return path.endswith((".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".npz", ".gguf", ".h5", ".keras", ".msgpack"))


def _notes(report: VerifyReport, ranges: tuple[FileRange, ...]) -> list[str]:
    if not report.is_ok and not ranges:
        return ["no error that another copy of a file would mend"]
    if report.is_ok and report.level != "full":
        return ["payload was not read: --full compares it with the recorded checksums"]
    n = len(report.unproven_files)
    return [f"{n:,} of the files have no recorded checksum, so that nothing proves their bytes"] if n else []
