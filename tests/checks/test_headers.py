"""Payload headers: one bad chunk does not hide the others."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.api.trust.verify import verify
from ckpt_tool.checks.headers import is_resolved, resolve_all, restricted
from ckpt_tool.errors import CkptError, FormatError, StorageError, UnsafePickle, Unsupported
from ckpt_tool.formats.base import Source
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.storage.memory import MemoryStore
from tests.checks.synthetic import FakeReader, checkpoint_of, chunk, kinds, make, tensor

N = 200
FILES = {"a.bin": bytes(4 * N)}


def unresolved() -> Manifest:
    """``N`` tensors of one element, none resolved."""
    chunks = [
        chunk(f"t{i}", Box((0,), (1,)), FileRange("a.bin", 4 * i, 4), int(ChunkFlag.UNRESOLVED)) for i in range(N)
    ]
    return make([tensor(f"t{i}", (1,)) for i in range(N)], chunks)


def source() -> Source:
    """The files."""
    store = MemoryStore(FILES)
    return Source(store, store.listing())


def test_all_good() -> None:
    """One call resolves all."""
    reader = FakeReader(unresolved())
    resolved, findings = resolve_all(reader, source(), reader.manifest)
    assert findings == []
    assert is_resolved(resolved).all()
    assert reader.n_resolved == [N]


def test_two_bad_chunks_are_found_and_the_rest_resolved() -> None:
    """Slices are halved around the bad ones: a few calls each, not one per chunk."""
    faults = {"t17": FormatError("shape", where="a.bin:68"), "t150": FormatError("dtype")}
    reader = FakeReader(unresolved(), faults=faults)
    resolved, findings = resolve_all(reader, source(), reader.manifest)
    assert kinds(findings) == [("item-mismatch", "t17"), ("item-mismatch", "t150")]
    assert findings[0].message == "a.bin:68: shape"
    assert findings[0].where == FileRange("a.bin", 68, 4)
    assert np.flatnonzero(~is_resolved(resolved)).tolist() == [17, 150]
    assert len(reader.n_resolved) < 40


@pytest.mark.parametrize(
    ("error", "kind", "severity"),
    [
        (FormatError("x"), "item-mismatch", Severity.ERROR),
        (UnsafePickle("os.system"), "unsafe-pickle", Severity.ERROR),
        (Unsupported("x"), "item-mismatch-unsupported", Severity.WARNING),
    ],
)
def test_kind_follows_the_error(error: CkptError, kind: str, severity: Severity) -> None:
    """What cannot be read is no error of the checkpoint; what must not run is its own kind."""
    reader = FakeReader(unresolved(), faults={"t3": error})
    [finding] = resolve_all(reader, source(), reader.manifest)[1]
    assert (finding.kind, finding.severity) == (kind, severity)


def test_failing_storage_is_no_finding() -> None:
    """An unreachable storage says nothing about the checkpoint."""
    reader = FakeReader(unresolved(), faults={"t3": StorageError("timeout")})
    with pytest.raises(StorageError, match="timeout"):
        resolve_all(reader, source(), reader.manifest)


def test_chunks_without_bytes_are_left_out() -> None:
    """What is missing is not asked for again."""
    has_chunk = np.arange(N) % 2 == 0
    small = restricted(unresolved(), has_chunk, np.zeros(0, dtype=np.bool_))
    assert len(small.chunks) == N // 2
    assert small.chunks.tensor.tolist() == list(range(0, N, 2))


def test_own_checks_are_part_of_the_default_level() -> None:
    """Findings of the reader, and its failure as one more; quick asks for neither."""
    finding = Finding("own", Severity.WARNING, "said")
    reader = FakeReader(unresolved(), findings=[finding], check_error=FormatError("broke off"))
    report = verify(checkpoint_of(reader.manifest, FILES, reader))
    assert [found.kind for found in report.findings] == ["check-failed", "own"]
    assert verify(checkpoint_of(reader.manifest, FILES, reader), level="quick").findings == ()
