"""Rank files: a safetensors file per rank whose header says where in the global tensors its boxes belong.

A folder holds::

    rank_00000.safetensors ...   one per rank of the writing layout, also for ranks that store nothing
    ckpt_objects.json            objects that are plain values: a JSON array, one value per line (``manifest.plain``)
    objects/00000.pt ...         objects kept in the bytes that torch or pickle gave them
    ckpt_layout.json             written last; without it the folder is an unfinished save

``__metadata__`` of each rank file (all strings, those marked * are JSON)::

    format               "pt"
    ckpt.format          "rank-files"
    ckpt.version         "1"
    ckpt.rank            number of this rank
    ckpt.world_size      number of ranks
    ckpt.mesh *          {"axes": [..], "sizes": [..], "coord": [..]}, the rank's place, last axis fastest
    ckpt.boxes *         {stored name: {"shape": global shape, "offsets": [..], ...}}

A box has further keys only where they say something new: ``fqn`` when the stored name is another (a second box of one
tensor is stored as ``NAME@1``, a third as ``NAME@2``), ``path`` when the tensor's keys are not just its name,
``section`` when it is not what the name tells, and ``dtype`` with ``sizes`` for types that safetensors lacks, which are
stored as ``U8`` bytes in one dimension.

``ckpt_layout.json``: ``{"format": "ckpt-rank-files", "version": 1, "world_size": n, "mesh": {"axes", "sizes"},
"files": {path: bytes}, "order": [fqn, ..], "objects": [{"fqn", "kind", "path", "rank", "file", "offset", "length"}],
"info": {..}}``; ``order`` is that of the source, which no single rank file knows and which optimizers count by.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.dtypes import DType
from ckpt_tool.dtypes import dtype as dtype_named
from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._safetensors.header import Entry, Header
from ckpt_tool.manifest.model import Blob, FileRange, KeyPath, TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = [
    "LAYOUT_FILE",
    "OBJECTS_FILE",
    "VERSION",
    "Layout",
    "RankBox",
    "box_fields",
    "parse_boxes",
    "parse_layout",
    "rank_metadata",
    "tensor_fields",
]

LAYOUT_FILE = "ckpt_layout.json"
OBJECTS_FILE = "ckpt_objects.json"
VERSION = 1
_FORMAT = "ckpt-rank-files"


@dataclass(frozen=True, slots=True)
class RankBox:
    """What a header says about one stored entry."""

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: KeyPath
    section: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Content of ``ckpt_layout.json``."""

    world_size: int
    files: Mapping[str, int]
    """Bytes of every other file of the folder."""
    order: tuple[str, ...] = ()
    """All fqns in the order of the source."""
    axes: tuple[str, ...] = ()
    mesh_sizes: tuple[int, ...] = ()
    blobs: tuple[Blob, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The file's bytes."""
        content = {
            "format": _FORMAT,
            "version": VERSION,
            "world_size": self.world_size,
            "mesh": {"axes": list(self.axes), "sizes": list(self.mesh_sizes)},
            "files": dict(self.files),
            "order": list(self.order),
            "objects": [_blob_fields(blob) for blob in self.blobs],
            "info": dict(self.info),
        }
        return (json.dumps(content, indent=1) + "\n").encode()


def _blob_fields(blob: Blob) -> dict[str, Any]:
    where = blob.where or FileRange("", 0, 0)
    return {
        "fqn": blob.fqn,
        "kind": blob.kind,
        "path": list(blob.path),
        "rank": blob.rank,
        "file": where.path,
        "offset": where.offset,
        "length": where.length,
    }


def parse_layout(raw: bytes) -> Layout:
    """The content of ``ckpt_layout.json``.

    Raises:
        FormatError: it is not JSON of this schema.
        Unsupported: a later version wrote it.
    """
    try:
        found = json.loads(raw)
        if found["format"] != _FORMAT:
            raise FormatError(f"expected format {_FORMAT!r}, got {found['format']!r}", where=LAYOUT_FILE)
        if found["version"] != VERSION:
            raise Unsupported(
                f"version {found['version']!r} of the layout, expected {VERSION}",
                where=LAYOUT_FILE,
                hint="a later ckpt wrote it: update ckpt-tool",
            )
        return Layout(
            world_size=_count(found["world_size"]),
            files={_text(path): _count(n) for path, n in found["files"].items()},
            order=tuple(_text(fqn) for fqn in found["order"]),
            axes=tuple(_text(axis) for axis in found["mesh"]["axes"]),
            mesh_sizes=tuple(_count(n) for n in found["mesh"]["sizes"]),
            blobs=tuple(_blob(fields) for fields in found["objects"]),
            info=dict(found["info"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"not a layout of rank files: {type(error).__name__}: {error}", where=LAYOUT_FILE) from error


def _blob(fields: Mapping[str, Any]) -> Blob:
    where = FileRange(_text(fields["file"]), _count(fields["offset"]), _count(fields["length"]))
    rank = None if fields["rank"] is None else _count(fields["rank"])
    return Blob(_text(fields["fqn"]), _text(fields["kind"]), where, path=_key_path(fields["path"]), rank=rank)


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 1 << 62:
        raise ValueError(f"expected a count, got {found!r}")
    return found


def _counts(found: Any) -> tuple[int, ...]:
    return tuple(_count(n) for n in found)


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"expected a string, got {found!r}")
    return found


def _key_path(found: Any) -> KeyPath:
    if not isinstance(found, list) or not all(type(key) in {str, int} for key in found):
        raise TypeError(f"expected a list of keys, got {found!r}")
    return tuple(found)


def rank_metadata(
    *,
    rank: int,
    world_size: int,
    axes: Sequence[str],
    mesh_sizes: Sequence[int],
    boxes: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """``__metadata__`` of one rank's file."""
    coord, rest = [], rank
    for size in reversed(mesh_sizes):
        rest, place = divmod(rest, max(size, 1))
        coord.append(place)
    mesh = {"axes": list(axes), "sizes": list(mesh_sizes), "coord": coord[::-1]}
    return {
        "format": "pt",
        "ckpt.format": "rank-files",
        "ckpt.version": str(VERSION),
        "ckpt.rank": str(rank),
        "ckpt.world_size": str(world_size),
        "ckpt.mesh": json.dumps(mesh, separators=(",", ":")),
        "ckpt.boxes": json.dumps(boxes, separators=(",", ":"), ensure_ascii=False),
    }


def tensor_fields(meta: TensorMeta) -> dict[str, Any]:
    """What ``ckpt.boxes`` says of a tensor with each of its boxes, where its name does not tell."""
    fields: dict[str, Any] = {}
    if meta.path != (meta.fqn,):
        fields["path"] = list(meta.path)
    if meta.section != section_of(meta.path, meta.fqn):
        fields["section"] = meta.section
    return fields


def box_fields(
    stored: str,
    meta: TensorMeta,
    of_tensor: Mapping[str, Any],
    offsets: Sequence[int],
    sizes: Sequence[int],
    *,
    is_bytes: bool,
) -> dict[str, Any]:
    """What ``ckpt.boxes`` says of one box; ``of_tensor`` is what ``tensor_fields`` has."""
    fields: dict[str, Any] = {"shape": list(meta.shape), "offsets": list(offsets)}
    if stored != meta.fqn:
        fields["fqn"] = meta.fqn
    fields |= of_tensor
    if is_bytes:
        fields |= {"dtype": meta.dtype.name, "sizes": list(sizes)}
    return fields


def parse_boxes(header: Header, where: str) -> tuple[RankBox, ...]:
    """The box of each entry of a rank file's header, in their order.

    Raises:
        FormatError: ``ckpt.boxes`` is not of the schema, or does not fit an entry.
        Unsupported: a later version wrote the file.
    """
    version = header.metadata.get("ckpt.version")
    if version is None:
        raise FormatError("no ckpt.version in its __metadata__, so it is no rank file", where=where)
    if version != str(VERSION):
        raise Unsupported(f"rank file of version {version}, expected {VERSION}", where=where)
    try:
        listed = json.loads(header.metadata["ckpt.boxes"])
        return tuple(_box(entry, listed[entry.name]) for entry in header.entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"ckpt.boxes does not fit the entries: {type(error).__name__}: {error}", where=where
        ) from error


def _box(entry: Entry, fields: Mapping[str, Any]) -> RankBox:
    fqn = _text(fields.get("fqn", entry.name))
    shape, offsets = _counts(fields["shape"]), _counts(fields["offsets"])
    dtype, sizes = entry.dtype, entry.shape
    if "dtype" in fields:
        dtype, sizes = dtype_named(_text(fields["dtype"])), _counts(fields["sizes"])
    box = RankBox(fqn, dtype, shape, offsets, sizes, (fqn,), "")
    path = _key_path(fields["path"]) if "path" in fields else box.path
    section = _text(fields["section"]) if "section" in fields else section_of(path, fqn)
    if section not in SECTIONS:
        raise ValueError(f"{section!r} is no section")
    if not len(shape) == len(offsets) == len(sizes):
        raise ValueError(f"{entry.name!r}: box {offsets}+{sizes} and shape {shape} differ in dimensions")
    if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"{entry.name!r}: box {offsets}+{sizes} leaves the tensor of shape {shape}")
    numel = 1
    for size in sizes:
        numel *= size
    if dtype.nbytes(numel) != entry.nbytes:
        raise ValueError(f"{entry.name!r}: box of {counted(dtype.nbytes(numel), 'byte')}, stored are {entry.nbytes:,}")
    return RankBox(fqn, dtype, shape, offsets, sizes, path, section)
