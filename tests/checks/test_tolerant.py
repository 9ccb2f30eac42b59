"""One file that contradicts its format does not hide the others."""

from __future__ import annotations

import pytest

from ckpt_tool.checks.tolerant import read_tolerantly
from ckpt_tool.errors import CkptError, FormatError, NotFound, StorageError, UnsafePickle
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Listing
from tests.checks.synthetic import FakeReader, make

FILES = {"a.bin": b"12", "b.bin": b"123", "index.json": b"{}"}


class Picky(FakeReader):
    """Refuses some files, each with its error."""

    def __init__(self, refused: dict[str, CkptError]) -> None:
        super().__init__(make([], []))
        self.refused = refused

    def read(self, source: Source) -> Manifest:
        """An error for the first refused file that is there."""
        for path, error in self.refused.items():
            if path in source.listing:
                raise error
        if not source.listing.sizes:
            raise NotFound("nothing left")
        return self.manifest


def source(entry: str | None = None) -> Source:
    """Three files."""
    store = MemoryStore(FILES)
    return Source(store, Listing("memory:", {path: len(data) for path, data in FILES.items()}, entry))


def test_good_files_are_read_as_they_are() -> None:
    """Nothing is left out of what can be read."""
    reading = read_tolerantly(Picky({}), source())
    assert reading.left_out == ()
    assert set(reading.source.listing.sizes) == set(FILES)


def test_refused_files_are_findings() -> None:
    """Each is named with the reader's reason, and hidden from what follows."""
    errors: dict[str, CkptError] = {
        "a.bin": FormatError("cut", where="a.bin:7"),
        "b.bin": UnsafePickle("os.system", where="b.bin"),
    }
    reading = read_tolerantly(Picky(errors), source())
    assert [(f.kind, f.severity, f.message, f.where) for f in reading.left_out] == [
        ("unreadable-file", Severity.ERROR, "a.bin:7: cut", FileRange("a.bin", 0, 2)),
        ("unsafe-pickle", Severity.ERROR, "b.bin: os.system", FileRange("b.bin", 0, 3)),
    ]
    assert set(reading.source.listing.sizes) == {"index.json"}


@pytest.mark.parametrize("where", [None, "elsewhere.bin", "a", "a.binary"])
def test_error_that_names_no_file_is_raised(where: str | None) -> None:
    """What cannot be pinned to a file stands for the whole checkpoint."""
    with pytest.raises(FormatError, match="cut"):
        read_tolerantly(Picky({"a.bin": FormatError("cut", where=where)}), source())


def test_first_error_is_raised_when_nothing_is_left() -> None:
    """The consequence, that no file is left, would not help."""
    errors: dict[str, CkptError] = {path: FormatError(f"cut {path}", where=path) for path in FILES}
    with pytest.raises(FormatError, match=r"cut a\.bin"):
        read_tolerantly(Picky(errors), source())


def test_named_file_is_all_there_is() -> None:
    """Whoever names one file wants that one."""
    with pytest.raises(FormatError, match="cut"):
        read_tolerantly(Picky({"a.bin": FormatError("cut", where="a.bin")}), source("a.bin"))


def test_storage_failure_is_raised() -> None:
    """An unreachable file is no fault of the checkpoint."""
    errors: dict[str, CkptError] = {
        "a.bin": FormatError("cut", where="a.bin"),
        "b.bin": StorageError("timeout", where="b.bin"),
    }
    with pytest.raises(StorageError, match="timeout"):
        read_tolerantly(Picky(errors), source())


def test_missing_file_findings_of_left_out_files_are_merged() -> None:
    """A reader that does not see the file calls it missing: what is lost with it is kept, the word is not."""
    reading = read_tolerantly(Picky({"a.bin": FormatError("cut", where="a.bin")}), source())
    echo = Finding(
        "missing-file", Severity.ERROR, "a.bin is not here; 2 tensors are lost", "w", FileRange("a.bin", 0, 0)
    )
    bare = Finding("missing-file", Severity.ERROR, "a.bin is missing: its rank's boxes are not here")
    other = Finding(
        "missing-file", Severity.ERROR, "c.bin is not here; 3 tensors are lost", "v", FileRange("c.bin", 0, 0)
    )
    merged = list(reading.merged([echo, bare, other]))
    assert merged == [
        other,
        Finding("unreadable-file", Severity.ERROR, "a.bin: cut; 2 tensors are lost", "w", FileRange("a.bin", 0, 2)),
    ]
