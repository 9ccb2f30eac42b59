"""What a format is to the rest of the program: a reader that produces a manifest, a writer that lays one out.

Readers never interpret tensor payload and writers never touch it: a reader says where bytes are, a writer says where
they go and which header bytes surround them, the engine moves them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, overload, runtime_checkable

import numpy as np
import numpy.typing as npt

from ckpt_tool.formats._options import WriterOptions
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest, MeshInfo
from ckpt_tool.manifest.tables import ChunkTable, FileTable, IntArray, TensorTable
from ckpt_tool.records import dataclass, field
from ckpt_tool.storage.store import Listing, Store

__all__ = [
    "SURE",
    "TAKEN_ABOVE",
    "ArrangingWriter",
    "BoxTable",
    "Checksum",
    "CuttingWriter",
    "LaterSegments",
    "LayOut",
    "MetadataChecker",
    "PartReader",
    "PlacingWriter",
    "Probe",
    "Reader",
    "Segment",
    "Source",
    "StyledWriter",
    "WriteRequest",
    "Writer",
    "WriterOptions",
]


@dataclass(frozen=True)
class Source:
    """A store with its listing, and the first bytes of files read at most once."""

    store: Store
    listing: Listing
    is_salvage: bool = False
    """Whether a reader shall make do with what is left of a file, where that can be told for sure."""
    _heads: dict[tuple[str, int], bytes] = field(default_factory=dict, repr=False)
    remembered: dict[str, Any] = field(default_factory=dict, repr=False)
    """What a reader keeps from one call to the next, by a name of its own."""

    def head(self, path: str, length: int) -> bytes:
        """The first ``length`` bytes of ``path``, or all of a shorter file; cached, one request.

        Where a request costs more than the bytes, a small file is read as a whole, for `read_wholes` to find.
        """
        nbytes = self.listing.nbytes(path)
        cost = self.store.cost
        wanted = nbytes if cost.read_ahead_bytes and nbytes <= cost.max_gap_bytes else min(length, nbytes)
        key = (path, wanted)
        if key not in self._heads:
            self._heads[key] = self.store.read(path, 0, wanted)
        return self._heads[key][:length]

    def read_whole(self, path: str) -> bytes:
        """All bytes of a (small) file: one request."""
        return self.read_wholes([path])[0]

    def read_wholes(self, paths: Sequence[str]) -> list[bytes]:
        """All bytes of (small) files, a request each, but for those that are known from ``head``."""
        known = {path: self._heads.get((path, self.listing.nbytes(path))) for path in paths}
        missing = [FileRange(path, 0, self.listing.nbytes(path)) for path, data in known.items() if data is None]
        found = dict(zip((r.path for r in missing), self.store.fetch(missing), strict=True)) if missing else {}
        return [found[path] if data is None else data for path, data in ((path, known[path]) for path in paths)]

    def remember(self, name: str, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        """Keep what reading showed of this listing, for `recall`, under a name of the reader's own."""
        kept = tuple(findings)
        self.remembered[name] = self.listing, kept
        return kept

    def recall(self, name: str, find: Callable[[], Iterable[Finding]]) -> Iterable[Finding]:
        """What `remember` kept of this listing; where nothing was read of it, what ``find`` finds."""
        known: tuple[Listing, tuple[Finding, ...]] | None = self.remembered.get(name)
        return known[1] if known is not None and known[0] is self.listing else find()


SURE = 0.9
"""A probe of this confidence ends the search."""
TAKEN_ABOVE = 0.5
"""A reader of more confidence is taken where none is sure."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How sure a reader is that a source is its format."""

    confidence: float
    """0 certainly not, 1 certainly."""
    why: str
    """What was seen, or what is missing; shown when no reader fits."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum that the checkpoint itself records for some of its bytes."""

    where: FileRange
    crc32: int
    fqn: str | None = None
    """The tensor or object that the bytes belong to, None for container parts."""


class Reader(Protocol):
    """Turns the metadata of one on-disk format into a manifest. Stateless."""

    name: str

    def probe(self, source: Source) -> Probe:
        """Look at names, and at the first bytes of a few files where names do not tell."""
        ...

    def read(self, source: Source) -> Manifest:
        """The manifest; chunks may be ``UNRESOLVED`` when their payload's place costs a request each."""
        ...

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """All chunks of ``manifest``, those named by ``rows`` with exact payload offset, length, strides and flags.

        Raises:
            FormatError: the payload's own header contradicts the manifest (dtype, shape, extent).
        """
        ...

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """All blobs of ``manifest``, those named by ``rows`` with their value loaded (inert, never executed)."""
        ...

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """Every checksum that the files record, and faults among bytes that none covers: for ``verify --full``."""
        ...

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Contradictions that only this format can have (index against headers, stray files ...)."""
        ...


@runtime_checkable
class MetadataChecker(Protocol):
    """A reader whose metadata lies in several places, so that it can contradict itself before any payload is read."""

    def check_metadata(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """The part of ``Reader.check`` that reads metadata and headers of files only: for ``verify --quick``."""
        ...


@runtime_checkable
class PartReader(Reader, Protocol):
    """A reader of many files with an index, which tells the file of a tensor before any of them is opened."""

    def read_part(self, source: Source, fqns: Collection[str]) -> Manifest | None:
        """The manifest of whole tensors ``fqns``, by the index and the headers of their files alone.

        None where only ``read`` can tell: no index, or one that does not name them all, or not where they are.
        """
        ...


@dataclass(frozen=True, eq=False)
class BoxTable:
    """Boxes to be stored: one row per box and rank that stores it, columns as in ``ChunkTable``."""

    tensor: npt.NDArray[np.int32]  # int32[n]
    offsets: IntArray  # int64[n, D]
    sizes: IntArray  # int64[n, D]
    rank: npt.NDArray[np.int32]  # int32[n]

    def __len__(self) -> int:
        """Number of boxes."""
        return len(self.tensor)

    def nbytes(self, tensors: TensorTable) -> IntArray:
        """int64[n]: bytes of each box, packed; ``tensor`` is a row of ``tensors``."""
        bits: IntArray = np.prod(self.sizes, axis=1, dtype=np.int64) * tensors.bits[self.tensor]
        return (bits + 7) // 8


@dataclass(frozen=True)
class WriteRequest:
    """What a writer is to lay out."""

    tensors: TensorTable
    """Names, dtypes, shapes and key paths as the target shall have them."""
    boxes: BoxTable
    """Boxes of ``tensors``; ``tensor`` is a row of it."""
    world_size: int
    """Number of ranks of the target layout; 1 for a full checkpoint."""
    blobs: tuple[Blob, ...] = ()
    """Objects to carry over, loaded; a ``torch_save`` blob may bring its original bytes in ``blob_bytes``."""
    blob_bytes: Mapping[str, bytes] = field(default_factory=dict)
    """By fqn: original encoded bytes of blobs whose encoding the target shares."""
    mesh_axes: tuple[str, ...] = ()
    mesh_sizes: tuple[int, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)
    options: WriterOptions = WriterOptions()

    def manifest(
        self,
        name: str,
        entries: Iterable[FileEntry],
        *,
        file: npt.ArrayLike,
        offset: npt.ArrayLike,
        blobs: tuple[Blob, ...] = (),
        mesh: MeshInfo | None = None,
        notes: Iterable[str] = (),
    ) -> Manifest:
        """What a target of the format ``name`` holds whose files have each box packed, as one run of bytes.

        ``file`` is int[n_boxes], the row of each box's file in ``entries``; ``offset`` int[n_boxes], its first byte
        there. ``blobs`` are the objects that the target carries.
        """
        boxes = self.boxes
        chunks = ChunkTable.from_columns(
            tensor=boxes.tensor,
            offsets=boxes.offsets,
            sizes=boxes.sizes,
            file=file,
            offset=offset,
            length=boxes.nbytes(self.tensors),
            rank=boxes.rank,
        )
        files = FileTable(tuple(entries))
        return Manifest(name, "", self.tensors, chunks, files, blobs, mesh, dict(self.info), tuple(notes))


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes that are not tensor payload: headers, directories, metadata files."""

    path: str
    offset: int
    data: bytes


class LaterSegments(Sequence[Segment]):
    """Segments that are made when the first of them is looked at: a plan that is only shown needs none."""

    def __init__(self, make: Callable[[], Iterable[Segment]]) -> None:
        self._make = make
        self._made: tuple[Segment, ...] | None = None

    def _all(self) -> tuple[Segment, ...]:
        if self._made is None:
            self._made = tuple(self._make())
        return self._made

    def __len__(self) -> int:
        """Number of segments."""
        return len(self._all())

    @overload
    def __getitem__(self, index: int) -> Segment: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Segment]: ...

    def __getitem__(self, index: int | slice) -> Segment | Sequence[Segment]:
        """One segment, or several."""
        return self._all()[index]


@dataclass(frozen=True)
class LayOut:
    """A target manifest with everything that surrounds the payload, known before the first byte is written."""

    manifest: Manifest
    """Chunks are packed, row-major, and aligned row by row with ``WriteRequest.boxes``; file sizes are exact."""
    segments: Sequence[Segment]
    """Bytes known before payload is; together with the chunks, ``seal`` and zero padding they fill every file."""
    commit_path: str | None
    """The file whose presence makes the target a checkpoint; it is written last. None when any complete file is one."""
    needs_crc32: bool = False
    """Whether ``seal`` wants the CRC-32 of every chunk's bytes."""
    seal: Callable[[npt.NDArray[np.uint32]], Iterable[Segment]] | None = None
    """Called once all payload is written, with uint32[n_chunks] (zeros if not needed); yields the remaining bytes."""


class Writer(Protocol):
    """Lays out one on-disk format. Stateless."""

    name: str
    per_rank: bool
    """Whether ranks get files of their own, so that boxes replicated over model-parallel ranks are stored in each."""

    def lay_out(self, request: WriteRequest) -> LayOut:
        """Where every box goes.

        Raises:
            Unsupported: a dtype or an object that the format cannot hold; the message says which and what to do.
        """
        ...


@runtime_checkable
class PlacingWriter(Writer, Protocol):
    """A writer of one program's own tree: it knows what the program has a place for, and how the program cuts tensors.

    It is asked for both in place of rules and policies that are the same for all formats.
    """

    def left_out(
        self,
        source: Manifest,
        blobs: Sequence[Blob],
        mesh: Mapping[str, int],
        rank_state: Literal["keep", "drop", "emit"] | None,
    ) -> Mapping[str, str]:
        """Tensors and objects that the target has no place for, by fqn, each with the reason.

        Args:
            source: what is to be written.
            blobs: its objects, loaded.
            mesh: sizes of the target's axes, in rank order, slowest first.
            rank_state: what to do with states of single ranks; ``emit`` for new ones, None for what suits it.

        Raises:
            LayoutError: a fact is missing without which the program could not load the rest.
            UsageError: states of ranks are to be kept, and the target has other ranks.
        """
        ...

    def place(
        self,
        tensors: TensorTable,
        blobs: Sequence[Blob],
        mesh: Mapping[str, int],
        info: Mapping[str, Any],
        options: WriterOptions,
    ) -> BoxTable:
        """Boxes that cover each tensor, by the rank whose file holds them.

        Args:
            tensors: what is left of the source's.
            blobs: what is left of its objects.
            mesh: see above.
            info: what the source says beyond tensors.
            options: choices of the writer.
        """
        ...


@runtime_checkable
class CuttingWriter(Writer, Protocol):
    """A writer whose metadata list boxes of any size: what several ranks hold can be cut, for each to store a part."""

    def may_cut(self, tensors: TensorTable) -> npt.NDArray[np.bool_]:
        """bool[n_tensors]: of which tensors."""
        ...


@runtime_checkable
class StyledWriter(Writer, Protocol):
    """A writer whose program calls everything otherwise where its optimizer names or numbers its parameters."""

    def restyled(
        self, source: Manifest, blobs: Sequence[Blob], style: Literal["ids", "fqn", "fqn-flat"]
    ) -> tuple[Manifest, tuple[Blob, ...]]:
        """``source`` and its objects under the names that go with a style of optimizers, which have it already."""
        ...


@runtime_checkable
class ArrangingWriter(Writer, Protocol):
    """A writer whose program arranges the same state in another way than the source; it is asked for that first."""

    def values(self, source: Manifest, blobs: Sequence[Blob]) -> Sequence[str]:
        """Tensors of one element that the target has inside of its objects: they come as objects that are arrays."""
        ...

    def arranged(
        self, source: Manifest, blobs: Sequence[Blob], mesh: Mapping[str, int], options: WriterOptions
    ) -> Manifest:
        """``source`` as the target has it: the same bytes under other or further names, and what it says of itself.

        Raises:
            LayoutError: a fact is missing without which the program could not load it.
            Unsupported: something that the program has no place for.
        """
        ...
