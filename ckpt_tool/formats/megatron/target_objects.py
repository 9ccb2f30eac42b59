"""Objects in pieces of a checkpoint that is being written: extra states of modules, and how any is put into an item.

An object is an item that holds a list with the object in it, under ``<key>/shard_<offsets>_<shape>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.checksum import crc32
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._dcp.objects import reader_of
from ckpt_tool.formats._dcp.written_items import object_item
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.walk import storages
from ckpt_tool.formats._torch_file.written import WrittenFile, fresh_tensor
from ckpt_tool.formats._zip.directory import read_directory, read_member
from ckpt_tool.formats._zip.layout import ZipLayout, torch_members
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.formats.megatron.target_boxes import EXTRA_STATE
from ckpt_tool.manifest.model import Blob
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass

__all__ = ["TargetObject", "extra_objects", "filled", "kept_item", "object_payloads", "written_object"]


@dataclass(frozen=True, slots=True)
class TargetObject:
    """One item that holds an object: known as a whole, or laid out around tensors of the request."""

    key: str
    data: bytes = b""
    file: WrittenFile | None = None


def extra_objects(request: WriteRequest) -> Iterator[tuple[TargetObject, tuple[int, ...]]]:
    """Extra states, original bytes where they are at hand, and the tensors of the request that are in them."""
    for blob in request.blobs:
        if blob.path[:1] == ("model",):
            yield TargetObject(str(blob.path[1]), kept_item(blob, request.blob_bytes)), ()
    tensors = request.tensors
    for row, path in enumerate(tensors.paths or ()):
        if path[0] == "model" and EXTRA_STATE in str(path[1]):
            value = fresh_tensor(0, tensors.dtypes[row], tensors.shape_of(row))
            yield written_object(str(path[1]), [value], tensors, (row,)), (row,)


def written_object(key: str, root: Any, tensors: TensorTable, rows: Sequence[int]) -> TargetObject:
    """An item around tensors of the request, which ``root`` has as `fresh_tensor`, in the order of ``rows``."""
    nbytes = [int(tensors.nbytes[row]) for row in rows]
    payloads = [row if size else -1 for row, size in zip(rows, nbytes, strict=True)]
    return TargetObject(key, file=WrittenFile.of("", root, nbytes, payloads))


def kept_item(blob: Blob, original: Mapping[str, bytes]) -> bytes:
    """The whole item of an object: its own bytes where these are in ``original``, by fqn."""
    data = original.get(blob.fqn)
    if data is None:
        return object_item(replace(blob, value=[blob.value]), None)
    return _wrapped(data, blob)


def object_payloads(data: bytes, value: Any, where: str) -> list[tuple[str, bytes]]:
    """Key and bytes of each storage of ``value``, which is in the torch file ``data``, by key.

    Raises:
        FormatError: a storage is missing there.
    """
    read = reader_of(data)
    directory = read_directory(read, len(data), where=where)
    held = sorted(storages(value), key=lambda storage: int(storage.key))
    found = [(storage.key, directory.record(f"data/{storage.key}")) for storage in held]
    absent = [key for key, member in found if member is None]
    if absent:
        raise FormatError(f"the zip has no data/{absent[0]}, which the object refers to", where=where)
    return [(key, read_member(read, member, where=where)) for key, member in found if member is not None]


def _wrapped(data: bytes, blob: Blob) -> bytes:
    """The item's bytes as they are; those of an object that is in no list (zarr) around a list with it.

    Raises:
        FormatError: the item is no torch file.
    """
    read = reader_of(data)
    directory = read_directory(read, len(data), where=blob.fqn)
    member = directory.record("data.pkl")
    if member is None:
        raise FormatError("the zip has no data.pkl, expected what torch.save writes", where=blob.fqn)
    root = load_pickle(read_member(read, member, where=blob.fqn), where=blob.fqn)
    if isinstance(root, list) and len(root) == 1 and type(root[0]) is type(blob.value):
        return data
    held = object_payloads(data, root, blob.fqn)
    if [int(key) for key, _ in held] != list(range(len(held))):
        raise FormatError("storages of the object are not numbered from 0 on", where=blob.fqn)
    layout = ZipLayout(torch_members(dump_pickle([root]), [len(payload) for _, payload in held]))
    return filled(layout, [payload for _, payload in held])


def filled(layout: ZipLayout, payloads: Sequence[bytes]) -> bytes:
    """A whole torch file."""
    item = bytearray(layout.nbytes)
    for offset, data in (*layout.heads, *layout.tail([crc32(payload) for payload in payloads])):
        item[offset : offset + len(data)] = data
    for payload, offset in zip(payloads, layout.payload_offsets[4:], strict=False):
        item[offset : offset + len(payload)] = payload
    return bytes(item)
