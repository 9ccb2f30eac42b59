"""A metadata file of DCP: the pickle that says which boxes of which tensors, and which objects, a checkpoint holds.

``.metadata`` lists everything; with ``use_collectives=False`` there is one ``__<rank>.metadata`` per rank that lists
what that rank wrote. The records are checked for type here; whether they fit together is checked where they become
columns.
Source of the layout: torch/distributed/checkpoint/metadata.py and filesystem.py of torch 2.1.2 and 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType, dtype
from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._collector import collector_paused
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.nodes import Fields, Global, Stub
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.numerals import numeral
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = [
    "METADATA_NAME",
    "MetadataFile",
    "Storage",
    "StorageInfo",
    "TensorItem",
    "foreign_root",
    "load_metadata",
    "rank_metadata",
]

METADATA_NAME = ".metadata"
_RANK_METADATA = re.compile(rf"__({numeral()})\.metadata")
_MODULE = "torch.distributed.checkpoint.metadata"
_OLD_MODULE = "torch.distributed._shard.checkpoint.metadata"
"""Of torch 1.13."""
_ROOT = re.compile(rb"\A\x80[\x02-\x05](?:\x95.{8})?(?:c|\x8c.|X.{4})([\w.]+)(?:\n|[^\w]{1,8})(\w+)", re.DOTALL)

# Of these a file holds one per chunk or tensor, so they are kept as bare dicts.
_PLAIN: dict[str, type] = dict.fromkeys(
    ("ChunkStorageMetadata", "MetadataIndex", "TensorStorageMetadata", "_StorageInfo"), Fields
)

StorageInfo = tuple[str, int, int, tuple[object, ...]]
"""Path relative to the metadata file, byte offset, length in bytes, transforms that the bytes went through."""
Chunks = list[tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class TensorItem:
    """One tensor: element type, global shape, and offsets and sizes of its chunks, in elements."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: Chunks


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Where items lie, as columns in the order of the file's records."""

    row: Mapping[tuple[str, tuple[int, ...] | None], int]
    """By fqn and chunk offsets; offsets are None for objects."""
    paths: Sequence[str]
    """Relative to the metadata file."""
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    transforms: Mapping[int, tuple[object, ...]]
    """Rows whose bytes went through transforms."""

    def records(self) -> dict[tuple[str, tuple[int, ...] | None], StorageInfo]:
        """Each item by itself."""
        rows = zip(self.paths, self.offset.tolist(), self.length.tolist(), strict=True)
        return {
            key: (*place, self.transforms.get(row, ()))
            for (key, row), place in zip(self.row.items(), rows, strict=True)
        }


@dataclass(frozen=True, slots=True)
class MetadataFile:
    """What one metadata file says."""

    path: str
    tensors: Mapping[str, TensorItem]
    blobs: tuple[str, ...]
    """fqns of the objects that are not tensors."""
    storage: Storage
    paths: Mapping[str, KeyPath]
    """Nested keys by fqn (``planner_data``); empty when the state dict was not flattened."""
    is_flattened: bool
    version: str | None
    save_id: str | None
    extra: Mapping[str, Any]
    """Attributes of the root that torch does not define (Megatron adds ``mcore_data``), inert."""


def rank_metadata(path: str) -> int | None:
    """Rank of a per-rank metadata file, None for other names.

    >>> rank_metadata("__3.metadata"), rank_metadata(".metadata")
    (3, None)
    """
    match = _RANK_METADATA.fullmatch(path)
    return int(match[1]) if match else None


def foreign_root(head: bytes, module: str = _MODULE) -> str | None:
    r"""None when a file that starts with ``head`` is the ``Metadata`` of ``module``, else what it is instead.

    >>> foreign_root(b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n")
    >>> foreign_root(b"<html>")
    'no pickle'
    """
    match = _ROOT.match(head)
    if match is None:
        return "an empty file" if not head else "no pickle" if head[:1] != b"\x80" else "a pickle of something else"
    found, name = match[1].decode(), match[2].decode()
    if found == _OLD_MODULE:
        found = _MODULE
    return None if (found, name) == (module, "Metadata") else f"a pickle of {found}.{name}"


def load_metadata(data: bytes, path: str) -> MetadataFile:
    """The content of one metadata file; nothing in it is imported or called.

    Raises:
        FormatError: not a pickle of DCP metadata, or a field of the wrong type; the message names the fqn.
        UnsafePickle: it asks for a callable that can do harm.
        Unsupported: a tensor has an element type that is not known.
    """
    with collector_paused():
        root = load_pickle(data, where=path, classes=_PLAIN)
        fields = _attributes(root, "Metadata", path)
        listed = _expect(fields.get("state_dict_metadata"), dict, "state_dict_metadata", path)
        tensors: dict[str, TensorItem] = {}
        blobs: list[str] = []
        for fqn, entry in listed.items():
            _expect(fqn, str, "a name in state_dict_metadata", path)
            if isinstance(entry, Fields):
                tensors[fqn] = _tensor_item(entry, fqn, path)
            elif isinstance(entry, Stub) and entry.cls.last == "BytesStorageMetadata":
                blobs.append(fqn)
            else:
                raise FormatError(f"{fqn!r} is a {entry!r}, expected the metadata of a tensor or of bytes", where=path)
        _check_boxes(tensors, path)
        storage = _storage(_expect(fields.get("storage_data"), dict, "storage_data", path), path)
    planner_data = fields.get("planner_data")
    meta = fields.get("storage_meta")
    known = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
    return MetadataFile(
        path=path,
        tensors=tensors,
        blobs=tuple(blobs),
        storage=storage,
        paths=_key_paths(planner_data) if isinstance(planner_data, dict) else {},
        is_flattened=isinstance(planner_data, dict),
        version=_text(fields.get("version")),
        save_id=_text(meta.attribute("save_id")) if isinstance(meta, Stub) else None,
        extra={name: value for name, value in fields.items() if name not in known},
    )


def _tensor_item(entry: Fields, fqn: str, path: str) -> TensorItem:
    try:
        fields = entry[0]
        shape = fields["size"]
        chunks = [((chunk := record[0])["offsets"], chunk["sizes"]) for record in fields["chunks"]]
        properties = fields["properties"].state
        element = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise FormatError(
            f"the record of {fqn!r} lacks a field or has one of the wrong type: {error}", where=path
        ) from None
    is_sound = isinstance(shape, tuple) and all(type(n) is int and 0 <= n < 2**62 for n in shape) and len(shape) <= 64
    if not is_sound or not all(isinstance(o, tuple) and isinstance(s, tuple) for o, s in chunks):
        raise FormatError(f"shape {shape!r} or chunks of {fqn!r} are not tuples of sizes", where=path)
    return TensorItem(_element_type(element, fqn, path), tuple(shape), chunks)


def _check_boxes(tensors: Mapping[str, TensorItem], path: str) -> None:
    """Nothing, when offsets and sizes of all chunks are whole numbers: only then may they be hashed."""
    if _are_integers(box for item in tensors.values() for chunk in item.chunks for box in chunk):
        return
    for fqn, item in tensors.items():
        if not _are_integers(box for chunk in item.chunks for box in chunk):
            raise FormatError(f"offsets or sizes of a chunk of {fqn!r} are no whole numbers", where=path)


def _are_integers(boxes: Iterable[tuple[int, ...]]) -> bool:
    return set(map(type, chain.from_iterable(boxes))) <= {int}


def _element_type(element: object, fqn: str, path: str) -> DType:
    if isinstance(element, DType):
        return element
    if not isinstance(element, Global):
        raise FormatError(f"element type of {fqn!r} is {element!r}, expected a torch.dtype", where=path)
    try:
        return dtype(element.qualified)
    except Unsupported as error:
        raise Unsupported(f"{fqn!r}: {error.message}", where=path, hint=error.hint) from None


def _storage(records: dict[Any, Any], path: str) -> Storage:
    try:
        keys = [index[0] for index in records]
        # ByteCheckpoint has a class of its own for the places.
        places = [info[0] if isinstance(info, Fields) else info.state for info in records.values()]
        fqns, offsets = [key["fqn"] for key in keys], [key.get("offset") for key in keys]
        paths = [place["relative_path"] for place in places]
        numbers = [[place[name] for place in places] for name in ("offset", "length")]
        transforms = {
            row: tuple(found)
            for row, place in enumerate(places)
            if (found := place.get("transform_descriptors")) is not None and len(found)
        }
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise _unsound_record(records, path) from error
    is_sound = (
        set(map(type, fqns)) | set(map(type, paths)) <= {str}
        and {kind for kind in set(map(type, offsets)) if not issubclass(kind, (tuple, type(None)))} == set()
        and all(set(map(type, column)) <= {int} and min(column, default=0) >= 0 for column in numbers)
        and all(max(column, default=0) < 2**62 for column in numbers)
    )
    if not is_sound:
        raise _unsound_record(records, path)
    if not _are_integers(place or () for place in offsets):
        raise FormatError("the storage of a chunk has offsets that are no whole numbers", where=path)
    row = dict(zip(zip(fqns, offsets, strict=True), range(len(records)), strict=True))
    if len(row) != len(records):
        raise FormatError(f"{counted(len(records) - len(row), 'chunk', 'have')} two storage records", where=path)
    offset, length = (np.array(column, dtype=np.int64) for column in numbers)
    return Storage(row, paths, offset, length, transforms)


def _unsound_record(records: dict[Any, Any], path: str) -> FormatError:
    """What is wrong with the first record that is."""
    for index, info in records.items():
        try:
            key = index[0]
            where = info[0] if isinstance(info, Fields) else info.state
            fqn, offsets = key["fqn"], key.get("offset")
            relative_path, offset, length = where["relative_path"], where["offset"], where["length"]
            tuple(where.get("transform_descriptors") or ())
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            return FormatError(f"storage record {index!r} lacks a field: {error}", where=path)
        if not (type(offset) is int and type(length) is int and 0 <= offset < 2**62 and 0 <= length < 2**62):
            return FormatError(
                f"storage of {fqn!r}: offset {offset!r}, length {length!r} are no byte counts", where=path
            )
        if type(relative_path) is not str or type(fqn) is not str or not isinstance(offsets, (tuple, type(None))):
            return FormatError(f"storage of {fqn!r}: a field is of the wrong type", where=path)
    return FormatError("a storage record has a field of the wrong type", where=path)


def _key_paths(planner_data: dict[Any, Any]) -> dict[str, KeyPath]:
    """Paths of ``planner_data``; one that is not a tuple of keys is left out."""
    return {
        fqn: tuple(keys)
        for fqn, keys in planner_data.items()
        if isinstance(fqn, str) and isinstance(keys, tuple) and keys and all(type(k) in (str, int) for k in keys)
    }


def _attributes(node: object, name: str, path: str) -> Mapping[str, Any]:
    """Attributes of an object of the class ``name``."""
    if isinstance(node, Stub) and node.cls.last == name and isinstance(node.state, dict):
        return node.state
    raise FormatError(f"the pickle holds {node!r}, expected a {_MODULE}.{name}", where=path)


def _expect(value: Any, kind: type, what: str, path: str) -> Any:
    if not isinstance(value, kind):
        raise FormatError(f"{what} is of type {type(value).__name__}, expected {kind.__name__}", where=path)
    return value


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
