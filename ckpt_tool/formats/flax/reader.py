"""The reader of Flax's MessagePack files: ``flax_model.msgpack`` of transformers, ``checkpoint_N`` of flax.training.

Arrays beyond 1 GiB are stored in flat pieces; each piece becomes the boxes that it is of the whole. Files of a model in
several parts have different names each, and are read together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES, DType, opaque
from ckpt_tool.errors import CkptError, FormatError, NotFound, Unsupported
from ckpt_tool.formats._columns import Columns
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.flax.walk import ArrayPlace, BytesPlace, walk
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.geometry.flat import flat_boxes_columns
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, KeyPath, Manifest
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted
from ckpt_tool.storage.fetch import fetch_all

__all__ = ["READER", "FlaxReader"]

_SUFFIX = ".msgpack"
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.msgpack")
_CHECKPOINT = re.compile(r"(?:.*/)?checkpoint(?:_[0-9]+)?")
_MAP_HEADS = frozenset({*range(0x81, 0x90), 0xDE, 0xDF})
_CHUNKED = "__msgpack_chunked_array__"
_NARROW = frozenset({"int2", "int4", "uint2", "uint4", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"})
_MAX_VALUE_NBYTES = 1 << 20


class FlaxReader(ResolvedReader):
    """Requests: windows of 64 KiB through each file, one for each array that lies apart."""

    name = "flax-msgpack"

    def probe(self, source: Source) -> Probe:
        """By name, and by the first byte, which must be that of a map."""
        try:
            paths = _paths(source)
        except NotFound as error:
            has_some = any(path.endswith(_SUFFIX) for path in source.listing.paths)
            return Probe(0.1 if has_some else 0.0, error.message)
        head = source.head(paths[0], 1)
        if not head or head[0] not in _MAP_HEADS:
            return Probe(0.0, f"{paths[0]} does not begin as a map of MessagePack")
        if paths[0].endswith(_SUFFIX):
            return Probe(0.95, f"{paths[0]} is MessagePack by its name and first byte")
        try:
            _walked(source, paths[0])
        except CkptError as error:
            return Probe(0.0, f"{paths[0]}: {error.message}")
        # in a folder, arrays of zarr beside it (old Orbax) are more than this file
        return Probe(0.55 if source.listing.entry is None else 0.8, f"{paths[0]} is one map of MessagePack")

    def read(self, source: Source) -> Manifest:
        """The manifest.

        Raises:
            FormatError: a file is damaged, or two have an array of one name.
            Unsupported: extensions or element types that Flax does not write.
        """
        paths = _paths(source)
        roots = fetch_all(lambda path: _walked(source, path), paths, concurrency=source.store.cost.concurrency)
        building = _Building(source)
        for path, root in zip(paths, roots, strict=True):
            if not isinstance(root, dict):
                raise FormatError("no map of names to arrays", where=path)
            building.add(path, (), root)
        tensors, chunks, files = building.columns.tables()
        missing = [] if source.listing.entry is not None else _missing(paths)
        notes = [f"{counted(len(missing), 'file', 'are')} missing: {', '.join(missing[:3])}"] if missing else []
        info: dict[str, Any] = {"missing_files": missing} if missing else {}
        blobs = tuple(building.loaded())
        return Manifest(
            self.name, source.listing.url, tensors, chunks, files, blobs=blobs, info=info, notes=tuple(notes)
        )


READER = FlaxReader()


def _paths(source: Source) -> list[str]:
    """The file that was named, or those of the folder's only model.

    Raises:
        NotFound: none, or several to choose from.
    """
    if source.listing.entry is not None:
        entry = source.listing.entry
        if entry.endswith(_SUFFIX) or _CHECKPOINT.fullmatch(entry):
            return [entry]
        raise NotFound(f"{entry} is not named as Flax names files")
    found = list(source.listing.match("*" + _SUFFIX))
    stems = {(m["stem"], m["count"]) for path in found if (m := _NUMBERED.fullmatch(path))}
    if len(found) == 1 or (len(stems) == 1 and all(_NUMBERED.fullmatch(path) for path in found)):
        return found
    checkpoints = [path for path in source.listing.match("checkpoint*") if _CHECKPOINT.fullmatch(path)]
    if not found and len(checkpoints) == 1:
        return checkpoints
    raise NotFound(f"{len(found):,} .msgpack files at the top, expected one, or those of one model: name one")


def _missing(paths: Sequence[str]) -> list[str]:
    numbered = _NUMBERED.fullmatch(paths[0])
    if numbered is None:
        return []
    present = [int(found["number"]) for path in paths if (found := _NUMBERED.fullmatch(path)) is not None]
    lacking = absent_numbers(present, int(numbered["count"]), first=1)
    return [f"{numbered['stem']}-{number:05d}-of-{numbered['count']}.msgpack" for number in lacking]


def _walked(source: Source, path: str) -> Any:
    return walk(lambda offset, length: source.store.read(path, offset, length), source.listing.nbytes(path), path)


@dataclass(slots=True)
class _Building:
    """Columns and objects, value by value."""

    source: Source
    columns: Columns = field(default_factory=Columns)
    blobs: list[Blob] = field(default_factory=list)

    def add(self, path: str, keys: KeyPath, value: Any) -> None:
        """Everything below one place of the tree; depth is bounded by the walk."""
        if isinstance(value, dict) and value.get(_CHUNKED) is True:
            self._add_chunked(path, keys, value)
        elif isinstance(value, dict) and value:
            for key, inner in value.items():
                self.add(path, (*keys, key), inner)
        elif isinstance(value, list) and any(isinstance(one, (ArrayPlace, dict, list)) for one in value):
            for position, inner in enumerate(value):
                self.add(path, (*keys, position), inner)
        elif isinstance(value, ArrayPlace):
            tensor, kind = self._tensor(path, keys, value.dtype, value.shape)
            _check_length(value, kind, int(np.prod(value.shape, dtype=np.int64)), path)
            self.columns.add_whole(tensor, self._file(path), value.offset)
        elif isinstance(value, BytesPlace):
            where = FileRange(path, value.offset, value.nbytes)
            self.blobs.append(Blob(_fqn(keys), "bytes", where, path=keys))
        else:
            self.blobs.append(Blob(_fqn(keys), "value", None, value, keys, is_loaded=True))

    def loaded(self) -> Iterator[Blob]:
        """Objects, short byte strings with their values."""
        for blob in self.blobs:
            if blob.where is not None and blob.where.length <= _MAX_VALUE_NBYTES:
                value = self.source.store.read(blob.where.path, blob.where.offset, blob.where.length)
                yield Blob(blob.fqn, blob.kind, blob.where, value, blob.path, is_loaded=True)
            else:
                yield blob

    def _add_chunked(self, path: str, keys: KeyPath, value: dict[Any, Any]) -> None:
        """An array in flat pieces, in order."""
        where = f"{path}: {_fqn(keys)}"
        shape, pieces = _in_order(value.get("shape"), where), _in_order(value.get("chunks"), where)
        if not pieces or not all(isinstance(piece, ArrayPlace) and len(piece.shape) == 1 for piece in pieces):
            raise FormatError("an array in pieces that are no flat arrays", where=where)
        if any(type(n) is not int or not 0 <= n < 1 << 40 for n in shape) or len(shape) > 32:
            raise FormatError(f"an array of shape {str(shape)[:100]}", where=where)
        counts = [piece.shape[0] for piece in pieces]
        if len({piece.dtype for piece in pieces}) > 1 or sum(counts) != int(np.prod(shape, dtype=object)):
            raise FormatError(f"pieces of {counted(sum(counts), 'element')} for a shape of {list(shape)}", where=where)
        tensor, kind = self._tensor(path, keys, pieces[0].dtype, tuple(shape))
        for piece in pieces:
            _check_length(piece, kind, piece.shape[0], where)
        stops = np.cumsum(np.array(counts, dtype=np.int64))
        starts = stops - counts
        shapes = np.tile(np.array(shape, dtype=np.int64), (len(pieces), 1))
        rows, offsets, sizes, flat = flat_boxes_columns(starts, stops, shapes)
        begins = np.array([piece.offset for piece in pieces], dtype=np.int64)
        self.columns.add_chunks(
            tensor,
            offsets=offsets,
            sizes=sizes,
            file=self._file(path),
            offset=begins[rows] + (flat - starts[rows]) * kind.itemsize,
            length=np.prod(sizes, axis=1) * kind.itemsize,
        )

    def _tensor(self, path: str, keys: KeyPath, name: str, shape: tuple[int, ...]) -> tuple[int, DType]:
        fqn = _fqn(keys)
        if fqn in self.columns:
            raise FormatError(f"{fqn!r} is there twice", where=path)
        kind = DTYPES.get(name)
        if kind is None:
            if name not in _NARROW:
                raise Unsupported(f"{fqn!r} has elements of the type {name[:50]!r}", where=path)
            kind = opaque(name, numel=1, nbytes=1)
        return self.columns.add_tensor(fqn, kind, shape, path=keys), kind

    def _file(self, path: str) -> int:
        return self.columns.add_file(FileEntry(path, self.source.listing.nbytes(path)))


def _fqn(keys: KeyPath) -> str:
    return ".".join(map(str, keys)) or "value"


def _in_order(value: Any, where: str) -> list[Any]:
    """What Flax makes of a tuple: a dict with the positions as keys."""
    if not isinstance(value, dict) or set(value) != {str(i) for i in range(len(value))}:
        raise FormatError("an array in pieces without its shape or pieces in order", where=where)
    return [value[str(i)] for i in range(len(value))]


def _check_length(place: ArrayPlace, kind: DType, numel: int, where: str) -> None:
    if kind.nbytes(numel) != place.nbytes:
        raise FormatError(
            f"{kind.name}{list(place.shape)} takes {counted(kind.nbytes(numel), 'byte')}, got {place.nbytes:,}",
            where=f"{where}:{place.offset}",
        )
