"""Small checkpoints of no format: arrays cut into chunks of files in memory, and a reader that says what it is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Blob, Chunk, FileEntry, FileRange, Manifest, TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, FileTable, IntArray, TensorTable
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Listing, Store

__all__ = ["FakeReader", "checkpoint_of", "chunk", "kinds", "listing_of", "make", "stored", "tensor"]


def tensor(fqn: str, shape: tuple[int, ...], dtype_name: str = "float32") -> TensorMeta:
    """A tensor whose section is told from its name."""
    return TensorMeta(fqn, dtype(dtype_name), shape, section_of((fqn,), fqn), (fqn,))


def chunk(fqn: str, box: Box, where: FileRange, flags: int = 0, strides: tuple[int, ...] | None = None) -> Chunk:
    """A chunk of no known rank."""
    return Chunk(fqn, box, where, strides, flags, None)


def make(tensors: Sequence[TensorMeta], chunks: Sequence[Chunk], blobs: Sequence[Blob] = (), **fields: Any) -> Manifest:
    """A manifest; its files are those that chunks name, of unknown size."""
    paths = dict.fromkeys(c.where.path for c in chunks)
    files = FileTable(tuple(FileEntry(path, -1) for path in paths))
    table = TensorTable.from_records(tensors)
    columns = ChunkTable.from_records(chunks, table, files)
    return Manifest("synthetic", "memory:", table, columns, files, blobs=tuple(blobs), **fields)


def listing_of(**nbytes: int) -> Listing:
    """Files by name (without ``.bin``) and size."""
    return Listing("memory:", {f"{name}.bin": size for name, size in nbytes.items()})


def stored(
    arrays: Mapping[str, npt.NDArray[Any]], n_files: int = 1, dtypes: Mapping[str, str] | None = None
) -> tuple[Manifest, dict[str, bytes]]:
    """Each array cut along its first dimension into one chunk per file, which lie end to end in ``part_<i>.bin``."""
    parts: dict[str, bytearray] = {f"part_{i}.bin": bytearray() for i in range(n_files)}
    tensors, chunks = [], []
    for fqn, array in arrays.items():
        tensors.append(tensor(fqn, array.shape, (dtypes or {}).get(fqn, array.dtype.name)))
        pieces = np.array_split(array, n_files) if array.ndim else [array]
        start = 0
        for path, piece in zip(parts, pieces, strict=False):
            offsets = (start,) + (0,) * (array.ndim - 1) if array.ndim else ()
            chunks.append(chunk(fqn, Box(offsets, piece.shape), FileRange(path, len(parts[path]), piece.nbytes)))
            parts[path].extend(piece.tobytes())
            start += len(piece) if array.ndim else 0
    return make(tensors, chunks), {path: bytes(data) for path, data in parts.items()}


@dataclass
class FakeReader:
    """A reader of one manifest."""

    manifest: Manifest
    recorded: Sequence[Checksum] = ()
    findings: Sequence[Finding] = ()
    faults: Mapping[str, CkptError] = field(default_factory=dict)
    """Errors that ``resolve`` raises, by tensor."""
    check_error: CkptError | None = None
    name: str = "synthetic"
    n_resolved: list[int] = field(default_factory=list)

    def probe(self, source: Source) -> Probe:
        """Always sure."""
        return Probe(1.0, "told so")

    def read(self, source: Source) -> Manifest:
        """The manifest."""
        return self.manifest

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """Rows resolved where they are, unless their tensor is to fail."""
        self.n_resolved.append(len(rows))
        for row in rows.tolist():
            error = self.faults.get(manifest.tensors.fqns[manifest.chunks.tensor[row]])
            if error is not None:
                raise error
        flags = manifest.chunks.flags.copy()
        flags[rows] &= ~np.uint8(ChunkFlag.UNRESOLVED)
        return manifest.chunks.replace(flags=flags)

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """As they are."""
        return manifest.blobs

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum]:
        """What was recorded."""
        return iter(self.recorded)

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """What was found, and then the error."""
        yield from self.findings
        if self.check_error is not None:
            raise self.check_error


def checkpoint_of(
    manifest: Manifest, files: Mapping[str, bytes], reader: FakeReader | None = None, store: Store | None = None
) -> Checkpoint:
    """An open checkpoint over files in memory."""
    store = MemoryStore(files) if store is None else store
    source = Source(store, store.listing())
    return Checkpoint("memory:", source, reader or FakeReader(manifest), manifest, 1 << 20)


def kinds(findings: Sequence[Finding] | Iterator[Finding]) -> list[tuple[str, str | None]]:
    """Kind and tensor of each finding."""
    return [(finding.kind, finding.fqn) for finding in findings]
