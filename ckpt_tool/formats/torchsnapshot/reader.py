"""The reader of torchsnapshot's snapshots.

Tensors that ranks hold parts of are joined by the offsets that are recorded; the shape of the whole is recorded for
chunked ones only, for others it is the end of the last part. A tensor that each rank saved as its own, without being
declared as replicated, is taken for a replica where all ranks have it in one shape, which ``check`` compares; where
shapes differ or some ranks lack it, each rank's is called ``name@rankN``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_tool.checksum import crc32
from ckpt_tool.dtypes import DType, dtype
from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._columns import Columns
from ckpt_tool.formats._dcp import checks
from ckpt_tool.formats._dcp.objects import load_blobs
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats._torch_file import headers
from ckpt_tool.formats._torch_file.archive import open_torch_file
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.formats.torchsnapshot.entries import Entry, Metadata, Shard, parse_metadata
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.items import ItemTable
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, IntArray
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["READER", "TorchSnapshotReader"]

_METADATA = ".snapshot_metadata"
_MAX_METADATA_NBYTES = 1 << 30


class TorchSnapshotReader(ResolvedReader):
    """Requests: one for the manifest, and three for each tensor that was saved with torch.save (complex numbers)."""

    name = "torchsnapshot"

    def probe(self, source: Source) -> Probe:
        """By name."""
        if _METADATA in source.listing.sizes and source.listing.entry in (None, _METADATA):
            return Probe(0.98, f"{_METADATA} is there")
        return Probe(0.0, f"no {_METADATA}")

    def read(self, source: Source) -> Manifest:
        """See the module.

        Raises:
            NotFound: no manifest: the snapshot was not completed.
            FormatError: the manifest is damaged, or contradicts itself.
        """
        metadata = _metadata(source)
        building = _Building(source, metadata)
        by_name: dict[str, list[Entry]] = {}
        for entry in metadata.entries:
            by_name.setdefault(entry.fqn, []).append(entry)
        for fqn, entries in by_name.items():
            building.add(fqn, entries)
        tensors, chunks, files = building.columns.tables()
        info: dict[str, Any] = {"world_size": metadata.world_size, "torchsnapshot_version": metadata.version}
        lists = {
            "replicated_by_assumption": building.assumed,
            "kept_apart": building.apart,
            "int_keyed_dicts": list(metadata.int_keyed),
        }
        info |= {key: names for key, names in lists.items() if names}
        return Manifest(
            self.name,
            source.listing.url,
            tensors,
            chunks,
            files,
            blobs=tuple(building.blobs),
            info=info,
            notes=tuple(building.notes()),
            items=ItemTable.of_full(len(files)).without_full(files.index[path] for path in building.containers),
        )

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """Chunks as they are; those in torch files by their local headers."""
        return headers.resolve(source, manifest, rows)

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """Objects are torch files of their own: one request each."""
        return load_blobs(source, manifest, rows)

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """Of objects and of tensors that were saved with torch.save; the raw bytes of others have none."""
        yield from checks.checksums(source, manifest.replace(chunks=manifest.chunks.take([]), items=None))
        if manifest.items is not None:
            rows = np.flatnonzero(~manifest.items.is_full).tolist()
            paths = [manifest.files.paths[row] for row in rows]
            yield from headers.checksums(source, headers.only_zips(source, manifest, paths))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Replicas by assumption that differ (all their bytes are read); tensors of which ranks have other shapes."""
        for fqn in manifest.info.get("kept_apart", ()):
            message = f"{fqn!r}: each rank has its own, under the name {fqn}@rank<N>"
            yield Finding("per-rank", Severity.INFO, message)
        for fqn in manifest.info.get("replicated_by_assumption", ()):
            rows = manifest.chunks.rows_of(manifest.tensor_id(fqn))
            places = [manifest.chunks.record(int(row), manifest.tensors, manifest.files).where for row in rows]
            if len({crc32(data) for data in source.store.fetch(places)}) > 1:
                said = f"{fqn!r}: same key on all ranks, different bytes, and not declared as replicated"
                yield Finding("different-replicas", Severity.ERROR, said, fqn, places[0])


READER = TorchSnapshotReader()


def _metadata(source: Source) -> Metadata:
    if _METADATA not in source.listing:
        raise NotFound(f"no {_METADATA}, which is written last: the snapshot is not complete", where=source.listing.url)
    if source.listing.nbytes(_METADATA) > _MAX_METADATA_NBYTES:
        raise FormatError(f"{counted(source.listing.nbytes(_METADATA), 'byte', 'are')} no manifest", where=_METADATA)
    return parse_metadata(source.read_whole(_METADATA), _METADATA)


@dataclass(slots=True)
class _Building:
    """Columns and objects, name by name."""

    source: Source
    metadata: Metadata
    columns: Columns = field(default_factory=Columns)
    blobs: list[Blob] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    unknown_shape: list[str] = field(default_factory=list)
    kept_whole: list[str] = field(default_factory=list)
    containers: set[str] = field(default_factory=set)
    """Files of torch.save that hold a tensor."""

    def add(self, fqn: str, entries: Sequence[Entry]) -> None:
        """Everything that ranks have under one name.

        Raises:
            FormatError: ranks contradict each other.
        """
        tensors = [entry for entry in entries if entry.kind not in ("value", "object")]
        if len(tensors) not in (0, len(entries)):
            raise FormatError("a tensor on some ranks, another object on others", where=fqn)
        if not tensors:
            self._add_objects(fqn, entries)
        elif all(entry.kind in ("ShardedTensor", "DTensor") for entry in tensors):
            self._add_joined(fqn, tensors)
        else:
            self._add_own(fqn, tensors)

    def notes(self) -> list[str]:
        """What a person should know."""
        notes = []
        if self.assumed:
            notes.append(
                f"{counted(len(self.assumed), 'tensor', 'were')} saved by all ranks as their own, in one shape: taken "
                "for replicas "
                '("ckpt verify --full" compares their bytes)'
            )
        if self.apart:
            notes.append(
                f"{counted(len(self.apart), 'tensor', 'are')} single ranks' own, called name@rankN: {self.apart[0]}"
            )
        if self.unknown_shape:
            notes.append(
                f"{counted(len(self.unknown_shape), 'sharded tensor')}: the end of their last part was taken for "
                "their shape, which a snapshot does not record"
            )
        if self.kept_whole:
            notes.append(f"{counted(len(self.kept_whole), 'quantised tensor', 'are')} objects: {self.kept_whole[0]}")
        return notes

    def _add_objects(self, fqn: str, entries: Sequence[Entry]) -> None:
        first = entries[0]
        is_shared = len(entries) == 1 or (
            len(entries) == self.metadata.world_size
            and all(e.kind == "value" and _same(e.value, first.value) for e in entries)
        )
        for entry in entries[:1] if is_shared else entries:
            rank = None if is_shared else entry.rank
            if entry.kind == "value":
                self.blobs.append(Blob(fqn, "value", None, entry.value, entry.path, rank, is_loaded=True))
            else:
                where = FileRange(entry.location, 0, max(self._nbytes(entry.location), 0))
                self.blobs.append(Blob(fqn, "torch_save", where, path=entry.path, rank=rank))

    def _add_joined(self, fqn: str, entries: Sequence[Entry]) -> None:
        shards = [shard for entry in entries for shard in entry.shards]
        if len({len(shard.sizes) for shard in shards}) > 1 or len({entry.dtype for entry in entries}) > 1:
            raise FormatError("parts of different types or numbers of dimensions", where=fqn)
        ends = np.array([np.add(shard.offsets, shard.sizes) for shard in shards]).reshape(len(shards), -1)
        shape = tuple(int(end) for end in ends.max(axis=0))
        self.unknown_shape.append(fqn)
        kind = _dtype(entries[0])
        tensor = self.columns.add_tensor(fqn, kind, shape, path=entries[0].path)
        for entry in entries:
            for shard in entry.shards:
                self._add_shard(tensor, kind, shard, entry.rank)

    def _add_own(self, fqn: str, entries: Sequence[Entry]) -> None:
        """Tensors that are whole on a rank."""
        first = entries[0]
        if any(not shard.is_raw and first.dtype.startswith("torch.q") for shard in first.shards):
            self.kept_whole.append(fqn)
            for entry in entries:
                where = FileRange(entry.shards[0].location, 0, max(self._nbytes(entry.shards[0].location), 0))
                self.blobs.append(Blob(fqn, "torch_save", where, path=entry.path, rank=entry.rank))
            return
        is_one = first.is_replicated or self.metadata.world_size == 1
        are_alike = len({(entry.dtype, entry.shape) for entry in entries}) == 1
        if not is_one and not (are_alike and len(entries) == self.metadata.world_size):
            self.apart.append(fqn)
        elif not is_one:
            self.assumed.append(fqn)
        for entry in entries:
            own = entry
            if self.apart[-1:] == [fqn]:
                path = (*entry.path[:-1], f"{entry.path[-1]}@rank{entry.rank}")
                own = replace(entry, path=path)
            kind = _dtype(own)
            tensor = self.columns.add_tensor(own.fqn, kind, own.shape or (), path=own.path)
            for shard in own.shards:
                self._add_shard(tensor, kind, shard, None if entry.is_replicated else entry.rank)

    def _add_shard(self, tensor: int, kind: DType, shard: Shard, rank: int | None) -> None:
        shape = self.columns.metas[tensor].shape
        fits = len(shard.sizes) == len(shape) and all(
            o + s <= n for o, s, n in zip(shard.offsets, shard.sizes, shape, strict=True)
        )
        if not fits:
            raise FormatError(
                f"a part {list(shard.sizes)} at {list(shard.offsets)} does not lie in {list(shape)}",
                where=self.columns.metas[tensor].fqn,
            )
        nbytes = kind.nbytes(int(np.prod(shard.sizes, dtype=np.int64)))
        size = self._nbytes(shard.location)
        file = self.columns.add_file(FileEntry(shard.location, size))
        offset, flags = shard.start, 0
        if not shard.is_raw and size >= 0:
            offset, flags = self._in_torch_file(shard, kind)
            self.containers.add(shard.location)
        elif shard.is_raw and (shard.nbytes not in (nbytes, -1) or (shard.nbytes == -1 and size > nbytes)):
            # a file that was cut is read
            fqn = self.columns.metas[tensor].fqn
            raise FormatError(
                f"{kind.name}{list(shard.sizes)} of {fqn!r} takes {counted(nbytes, 'byte')}, got "
                f"{shard.nbytes if shard.nbytes != -1 else size:,}",
                where=shard.location,
            )
        self.columns.add_chunks(
            tensor,
            offsets=[shard.offsets],
            sizes=[shard.sizes],
            file=[file],
            offset=[offset],
            length=nbytes,
            rank=-1 if rank is None else rank,
            flags=flags,
        )

    def _in_torch_file(self, shard: Shard, kind: DType) -> tuple[int, int]:
        """Where the elements lie in a file of torch.save that holds one tensor."""
        opened = open_torch_file(self.source, shard.location)
        tensor = opened.root
        if not isinstance(tensor, TensorRef) or (tensor.dtype, tensor.shape) != (kind, shard.sizes):
            raise FormatError(f"holds another thing than {kind.name}{list(shard.sizes)}", where=shard.location)
        place = opened.storages.get(tensor.storage.key)
        packed = tensor.strides == contiguous_strides(tensor.shape)
        if place is None or place.file.path != shard.location or opened.big_endian or not packed:
            raise FormatError("its tensor is not stored as plain packed bytes", where=shard.location)
        flags = ChunkFlag.NONE if place.is_exact else ChunkFlag.UNRESOLVED
        flags |= ChunkFlag.CONJUGATE if tensor.conj else ChunkFlag.NONE
        flags |= ChunkFlag.NEGATE if tensor.neg else ChunkFlag.NONE
        return place.offset + tensor.offset * kind.itemsize, int(flags)

    def _nbytes(self, path: str) -> int:
        """Bytes of a file, -1 for one that is missing, which ``verify`` tells."""
        return self.source.listing.sizes.get(path, -1)


def _dtype(entry: Entry) -> DType:
    return dtype(entry.dtype)


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))  # noqa: PLR0124 - NaN is NaN
