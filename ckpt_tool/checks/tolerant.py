"""A tolerant reading leaves out files that contradict their format, so that one cut file does not hide the others.

Knows no format: the file is the one that the reader's error names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ckpt_tool.errors import CkptError, FormatError, StorageError, UnsafePickle
from ckpt_tool.formats.base import Reader, Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.records import dataclass
from ckpt_tool.storage.store import Listing

__all__ = ["TolerantReading", "read_tolerantly"]

_MAX_LEFT_OUT = 256


@dataclass(frozen=True)
class TolerantReading:
    """A manifest of the files that could be read."""

    source: Source
    """Its listing lacks what was left out."""
    manifest: Manifest
    left_out: tuple[Finding, ...]
    """One for each file that was left out, with the reader's reason."""

    def merged(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """``left_out`` and ``findings``, those that call a left out file missing made part of what is said of it."""
        said = {finding.where.path: finding for finding in self.left_out if finding.where is not None}
        for finding in findings:
            path = finding.where.path if finding.where is not None else finding.message.partition(" is missing")[0]
            if finding.kind != "missing-file" or path not in said:
                yield finding
                continue
            consequence = finding.message.partition("; ")[2]
            if consequence:
                message = f"{said[path].message}; {consequence}"
                said[path] = replace(said[path], message=message, fqn=finding.fqn)
        yield from said.values()


def read_tolerantly(reader: Reader, source: Source) -> TolerantReading:
    """What ``reader`` makes of the source without the files that it refuses.

    Cost: one ``Reader.read`` more for each refused file.

    Raises:
        FormatError: the error names no file, or nothing can be read without the file that it names; always the first.
        NotFound: as the reader.
    """
    left_out: list[Finding] = []
    first: FormatError | None = None
    current = source
    while True:
        read = _read(reader, current, first)
        if isinstance(read, Manifest):
            return TolerantReading(current, read, tuple(left_out))
        first = first or read
        path = _named_file(read, current.listing)
        if path is None or len(left_out) >= _MAX_LEFT_OUT:
            raise first
        where = FileRange(path, 0, current.listing.nbytes(path))
        kind = "unsafe-pickle" if isinstance(read, UnsafePickle) else "unreadable-file"
        left_out.append(Finding(kind, Severity.ERROR, str(read), where=where))
        sizes = {name: nbytes for name, nbytes in current.listing.sizes.items() if name != path}
        current = replace(current, listing=replace(current.listing, sizes=sizes))


def _read(reader: Reader, source: Source, first: FormatError | None) -> Manifest | FormatError:
    """The manifest, or why a file is refused; whatever goes wrong after a first refusal is a consequence of it."""
    try:
        return reader.read(source)
    except FormatError as error:
        return error
    except StorageError:
        raise
    except CkptError:
        if first is None:
            raise
        raise first from None


def _named_file(error: FormatError, listing: Listing) -> str | None:
    """The file of the listing that an error is about; None where the user named one file, which is all."""
    return None if listing.entry is not None else listing.named(error.where)
