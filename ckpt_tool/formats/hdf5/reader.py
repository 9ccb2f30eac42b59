"""The reader of HDF5 files, as Keras writes them: each dataset is a tensor under its path, groups joined by dots.

Where a dataset's bytes lie is asked of HDF5's library (h5py, the extra ``h5``): one run for a contiguous dataset, a run
for each chunk of others, with the filters that it went through. Text is an object; links are not followed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.errors import FormatError, NotFound, Unsupported
from ckpt_tool.formats._columns import Columns
from ckpt_tool.formats._npy import dtype_of_numpy
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats._zip.member_sums import member_sums
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.formats.hdf5.file import MAGIC, end_of_file, opened, span_of, zip_of
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.items import ItemTable
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag, FileTable
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted, counted_of

__all__ = ["READER", "Hdf5Reader"]

_SUFFIXES = (".h5", ".hdf5", ".keras")
_DEFLATE, _SHUFFLE, _FLETCHER32, _ZSTD = 1, 2, 3, 32015
_FLETCHER32_NBYTES = 4
_MAX_TEXTS = 100_000
_MAX_ATTRIBUTE_NBYTES = 64 << 20
_MAX_DATASETS = 1_000_000
_MAX_CHUNKS = 20_000_000


class Hdf5Reader(ResolvedReader):
    """Requests: blocks of 64 KiB, as HDF5's library asks for them."""

    name = "hdf5"

    def probe(self, source: Source) -> Probe:
        """By first bytes; ``.keras`` by name and those of a zip."""
        try:
            path = _path(source)
        except NotFound as error:
            has_some = any(path.endswith(_SUFFIXES) for path in source.listing.paths)
            return Probe(0.1 if has_some else 0.0, error.message)
        head = source.head(path, 8)
        if head == MAGIC:
            return Probe(0.95, f"{path} begins as HDF5 does")
        if path.endswith(".keras") and head.startswith(b"PK\x03\x04"):
            return Probe(0.95, f"{path} is a zip named .keras")
        return Probe(0.0, f"{path} does not begin as HDF5 does")

    def read(self, source: Source) -> Manifest:
        """The manifest; text attributes of the root are in ``info["attributes"]``, JSON among them as objects.

        Raises:
            Unsupported: h5py is missing, or a dataset lies in other files or went through unknown filters.
            FormatError: damaged.
        """
        path = _path(source)
        start, nbytes = span_of(source, path)
        with opened(source, path, start, nbytes) as file:
            building = _Building(source, path, start, nbytes)
            building.add_attributes(file)
            names: list[str] = []
            file.visit(names.append)
            if len(names) > _MAX_DATASETS:
                raise FormatError(f"{counted(len(names), 'group')} and datasets", where=path)
            for name in names:
                building.add(name, file[name])
        tensors, chunks, files = building.columns.tables()
        return Manifest(
            self.name,
            source.listing.url,
            tensors,
            chunks,
            files,
            blobs=tuple(building.blobs),
            info={"attributes": building.attributes} if building.attributes else {},
            notes=tuple(building.notes),
            items=_items(source, path, files),
        )

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """Of a ``.keras`` file those of its members; HDF5 itself records none that are looked at."""
        del manifest
        path = _path(source)
        if source.head(path, 8) != MAGIC:
            yield from member_sums(source, path, zip_of(source, path), lambda member: None)  # noqa: ARG005


READER = Hdf5Reader()


def _items(source: Source, path: str, files: FileTable) -> ItemTable | None:
    """The whole of the file, as far as it says that it goes; None where it does not say."""
    end = end_of_file(source, path)
    return None if end is None else ItemTable.of_full(len(files)).with_ranges([FileRange(path, 0, end)], files)


def _path(source: Source) -> str:
    """The file that was named, or the only one of the folder.

    Raises:
        NotFound: none, or several.
    """
    if source.listing.entry is not None:
        return source.listing.entry
    found = [path for path in source.listing.paths if "/" not in path and path.endswith(_SUFFIXES)]
    if len(found) != 1:
        raise NotFound(f"{counted(len(found), 'file')} {' '.join(_SUFFIXES)} at the top, expected one: name one")
    return found[0]


@dataclass(slots=True)
class _Building:
    """Columns and objects, dataset by dataset."""

    source: Source
    path: str
    start: int
    nbytes: int
    columns: Columns = field(default_factory=Columns)
    blobs: list[Blob] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_attributes(self, file: Any) -> None:
        """Text and numbers of the root; configurations are JSON."""
        for key in file.attrs:
            value = file.attrs[key]
            text = value.decode(errors="replace") if isinstance(value, bytes) else value
            if isinstance(text, str) and text.startswith("{") and len(text) <= _MAX_ATTRIBUTE_NBYTES:
                try:
                    self.blobs.append(Blob(key, "value", None, json.loads(text), (key,), is_loaded=True))
                except (ValueError, RecursionError):
                    self.attributes[key] = text[:1000]
            elif isinstance(text, (str, int, float)):
                self.attributes[key] = text

    def add(self, name: str, found: Any) -> None:
        """A dataset; groups and named types are nothing by themselves.

        Raises:
            Unsupported: its bytes lie elsewhere, or its filters are not known.
        """
        if not hasattr(found, "chunks"):
            return
        where = f"{self.path}: {name}"
        if found.external or found.is_virtual:
            raise Unsupported("a dataset whose bytes lie in other files", where=where)
        shape = found.shape
        if shape is None:
            self.blobs.append(Blob(name, "value", None, None, (name,), is_loaded=True))
            return
        if found.dtype.hasobject or found.dtype.kind in "SU":
            self._add_text(name, found)
            return
        kind, is_big = dtype_of_numpy(found.dtype)
        keys = tuple(name.split("/"))
        fqn = ".".join(keys)
        if fqn in self.columns:
            raise FormatError(f"{fqn!r} is the name of two datasets", where=where)
        section = "optimizer" if keys[0].startswith("optimizer") else "model"
        tensor = self.columns.add_tensor(fqn, kind, shape, path=keys, section=section)
        flags = int(ChunkFlag.BIG_ENDIAN) if is_big and kind.component_bytes > 1 else 0
        if not prod(shape):
            return
        if found.chunks is not None:
            self._add_chunked(tensor, name, found, flags)
            return
        offset = found.id.get_offset()
        if offset is not None:
            self._check(offset, kind.nbytes(prod(shape)), where)
            self.columns.add_whole(tensor, self._file(), self.start + offset, flags=flags)
        elif found.id.get_storage_size():
            value = np.ascontiguousarray(found[()])  # compact: at most 64 KiB, inside of the dataset's own header
            self._add_compact(tensor, name, value.tobytes(), flags)
        else:
            self._add_zeros(tensor, name, found)

    def _add_text(self, name: str, found: Any) -> None:
        if found.size > _MAX_TEXTS or (found.dtype.kind == "O" and found.dtype.metadata is None):
            self.notes.append(f"{name!r} was left out: {counted(found.size, 'element')} that are no numbers")
            return
        value = found[()]
        value = value.tolist() if isinstance(value, np.ndarray) else value
        self.blobs.append(Blob(name, "value", None, _decoded(value), (name,), is_loaded=True))

    def _add_compact(self, tensor: int, name: str, content: bytes, flags: int) -> None:
        """A dataset inside of a header: its bytes are found there, for it is short."""
        head = self.source.store.read(self.path, self.start, min(self.nbytes, 64 << 20))
        at = head.find(content)
        if at < 0 or head.find(content, at + 1) >= 0:
            raise Unsupported("a compact dataset whose bytes cannot be told apart", where=f"{self.path}: {name}")
        self.columns.add_whole(tensor, self._file(), self.start + at, flags=flags)

    def _add_zeros(self, tensor: int, name: str, found: Any) -> None:
        """A dataset that nothing was written to."""
        meta = self.columns.metas[tensor]
        self._refuse_fill(name, found)
        self.notes.append(f"{name!r} was never written: zeros")
        self.columns.add_whole(tensor, self._zeros(name, meta.nbytes), 0)

    def _add_chunked(self, tensor: int, name: str, found: Any, flags: int) -> None:
        """Every chunk that is stored, and zeros for those that are not."""
        meta = self.columns.metas[tensor]
        where = f"{self.path}: {name}"
        n_chunks = prod(-(-n // c) for n, c in zip(meta.shape, found.chunks, strict=True))
        if n_chunks > _MAX_CHUNKS:
            raise FormatError(f"{counted(n_chunks, 'chunk')}", where=where)
        chunk_nbytes = meta.dtype.nbytes(prod(found.chunks))
        steps = list(_filters(found, where))
        starts: list[tuple[int, ...]] = []
        files: list[int] = []
        offsets: list[int] = []
        for stored in _stored_chunks(found):
            at = self.start + int(stored.byte_offset)
            self._check(int(stored.byte_offset), int(stored.size), where)
            used = [step for number, step in enumerate(steps) if not int(stored.filter_mask) >> number & 1]
            length = int(stored.size) - _FLETCHER32_NBYTES * used.count("fletcher32")
            codec = "|".join(step for step in reversed(used) if step != "fletcher32")
            starts.append(tuple(map(int, stored.chunk_offset)))
            if codec:
                label = ".".join(map(str, starts[-1]))
                entry = FileEntry(f"{self.path}!{name}/{label}", chunk_nbytes, codec, FileRange(self.path, at, length))
                files.append(self.columns.add_file(entry))
                offsets.append(0)
            elif length != chunk_nbytes:
                raise FormatError(f"a chunk of {counted(length, 'byte')}, expected {chunk_nbytes:,}", where=where)
            else:
                files.append(self._file())
                offsets.append(at)
        missing = _missing(meta.shape, found.chunks, starts) if len(starts) < n_chunks else []
        if missing:
            self._refuse_fill(name, found)
            self.notes.append(f"{name!r}: {counted_of(len(missing), n_chunks, 'chunk', 'were')} never written: zeros")
            starts += missing
            files += [self._zeros(f"{name}/{'.'.join(map(str, corner))}", chunk_nbytes) for corner in missing]
            offsets += [0] * len(missing)
        corners = np.array(starts, dtype=np.int64).reshape(len(starts), len(meta.shape))
        whole = np.tile(np.array(found.chunks, dtype=np.int64), (len(starts), 1))
        sizes = np.minimum(whole, np.array(meta.shape, dtype=np.int64) - corners)
        strides = contiguous_strides_columns(whole)
        self.columns.add_chunks(
            tensor,
            offsets=corners,
            sizes=sizes,
            file=files,
            offset=offsets,
            length=(((sizes - 1) * strides).sum(axis=1) + 1) * meta.dtype.itemsize,
            flags=flags,
            strides=strides if bool((sizes != whole).any()) else None,
        )

    def _refuse_fill(self, name: str, found: Any) -> None:
        if np.any(found.fillvalue):
            raise Unsupported(f"chunks that hold {found.fillvalue!r} and are not stored", where=f"{self.path}: {name}")

    def _check(self, offset: int, length: int, where: str) -> None:
        if offset < 0 or length < 0 or offset + length > self.nbytes:
            raise FormatError(f"bytes {offset:,} to {offset + length:,} of {self.nbytes:,}", where=where)

    def _file(self) -> int:
        return self.columns.add_file(FileEntry(self.path, self.source.listing.nbytes(self.path)))

    def _zeros(self, label: str, nbytes: int) -> int:
        entry = FileEntry(f"{self.path}!{label}", nbytes, f"zeros:{nbytes}", FileRange(self.path, 0, 0))
        return self.columns.add_file(entry)


def _filters(found: Any, where: str) -> Iterator[str]:
    """Filters in the order in which writing applied them, as steps of a codec."""
    properties = found.id.get_create_plist()
    for number in range(properties.get_nfilters()):
        code, _, values, name = properties.get_filter(number)
        if code == _DEFLATE:
            yield "zlib"
        elif code == _SHUFFLE:
            yield f"shuffle:{values[0] if values else found.dtype.itemsize}"
        elif code == _FLETCHER32:
            yield "fletcher32"
        elif code == _ZSTD:
            yield "zstd"
        else:
            raise Unsupported(
                f"a dataset that went through the filter {code} ({bytes(name).decode(errors='replace')})", where=where
            )


def _stored_chunks(found: Any) -> list[Any]:
    """What the library says of each chunk that is stored."""
    chunks: list[Any] = []
    if hasattr(found.id, "chunk_iter"):
        found.id.chunk_iter(chunks.append)
        return chunks
    return [found.id.get_chunk_info(number) for number in range(found.id.get_num_chunks())]


def _missing(shape: Sequence[int], chunks: Sequence[int], starts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Corners of chunks that are not stored."""
    known = set(starts)
    grid = np.stack(
        np.meshgrid(*(np.arange(0, n, c) for n, c in zip(shape, chunks, strict=True)), indexing="ij"), axis=-1
    ).reshape(-1, len(shape))
    return [corner for row in grid.tolist() if (corner := tuple(row)) not in known]


def _decoded(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    return value
