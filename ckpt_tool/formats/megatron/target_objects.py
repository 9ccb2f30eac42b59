"""Objects in pieces of a checkpoint that is being written: extra states of modules, random states of ranks.

An object is an item that holds a list with the object in it, under ``<key>/shard_<offsets>_<shape>``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.checksum import crc32
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._dcp.objects import reader_of
from ckpt_tool.formats._dcp.written_items import object_item
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.formats._pickle.walk import storages
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.written import WrittenFile, blob_entry, fresh_tensor
from ckpt_tool.formats._zip.directory import read_directory, read_member
from ckpt_tool.formats._zip.layout import ZipLayout, torch_members
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.formats.megatron.fresh_rng import fresh_random_states
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.manifest.model import Blob, KeyPath
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass

__all__ = ["RNG", "TargetObject", "emitted_states", "extra_objects", "is_rng", "random_states", "rank_of", "shard_grid"]

RNG = "rng_state"
_SHARD = re.compile(r"rng_state/shard_(\d+)\.(\d+)_(\d+)\.(\d+)")
_RANK = re.compile(r"@rank(\d+)$")


@dataclass(frozen=True, slots=True)
class TargetObject:
    """One item that holds an object: known as a whole, or laid out around tensors of the request."""

    key: str
    data: bytes = b""
    file: WrittenFile | None = None


def is_rng(fqn: str, path: KeyPath) -> bool:
    """Whether a tensor or object is (part of) a random state."""
    return fqn.startswith(f"{RNG}/") or (len(path) > 1 and path[0] == RNG)


def shard_grid(fqn: str) -> tuple[int, int] | None:
    """Stages and tensor-parallel ranks of the run that an object in pieces of random states is of.

    >>> shard_grid("rng_state/shard_0.1_2.4")
    (2, 4)
    """
    match = _SHARD.fullmatch(fqn)
    return None if match is None else (int(match[3]), int(match[4]))


def rank_of(fqn: str) -> int:
    """The rank that a tensor of a rank's file is named for; 0 where there is one rank only."""
    match = _RANK.search(fqn)
    return 0 if match is None else int(match[1])


def extra_objects(request: WriteRequest) -> Iterator[TargetObject]:
    """Extra states, and random states that are objects in pieces already: original bytes where they are at hand."""
    for blob in request.blobs:
        if blob.path[:1] == ("model",):
            yield TargetObject(str(blob.path[1]), _item(blob, request.blob_bytes))
        elif shard_grid(blob.fqn) is not None:
            yield TargetObject(blob.fqn, _item(blob, request.blob_bytes))


def random_states(request: WriteRequest, grid: TargetGrid) -> Iterator[tuple[TargetObject, tuple[int, ...]]]:
    """Random states of per-rank files as objects in pieces, with the tensors of the request that are in them.

    Ranks are numbered as `rank_files.Grid` does; of expert-parallel ranks the first counts, as in Megatron.
    """
    tensors = request.tensors
    paths = [(fqn,) for fqn in tensors.fqns] if tensors.paths is None else tensors.paths
    values: dict[int, list[tuple[KeyPath, Any]]] = {}
    rows: dict[int, list[int]] = {}
    for row, path in enumerate(paths):
        if is_rng(tensors.fqns[row], path):
            rank = rank_of(tensors.fqns[row])
            own = rows.setdefault(rank, [])
            tensor = fresh_tensor(len(own), tensors.dtypes[row], tensors.shape_of(row))
            values.setdefault(rank, []).append(((*path[:-1], _RANK.sub("", str(path[-1]))), tensor))
            own.append(row)
    for blob in request.blobs:
        if is_rng(blob.fqn, blob.path) and shard_grid(blob.fqn) is None:
            values.setdefault(blob.rank or 0, []).append(blob_entry(blob))
    before = request.info.get("args", {}).get("expert_model_parallel_size") or 1
    for stage in range(grid.pp):
        for tensor_rank in range(grid.tp):
            rank = stage * before * grid.tp + tensor_rank
            if rank in values:
                root = [nest(values[rank])[RNG]]
                taken = tuple(rows.get(rank, ()))
                key = f"{RNG}/shard_{stage}.{tensor_rank}_{grid.pp}.{grid.tp}"
                yield written_object(key, root, tensors, taken), taken


def emitted_states(args: Stub, grid: TargetGrid) -> Iterator[TargetObject]:
    """Random states of every stage and tensor-parallel rank, as at the start of a run.

    Raises:
        LayoutError: the arguments do not tell the seed.
    """
    for stage in range(grid.pp):
        for tensor_rank in range(grid.tp):
            states, payloads = fresh_random_states(args, grid, stage, tensor_rank)
            layout = ZipLayout(torch_members(dump_pickle([states]), [len(payload) for payload in payloads]))
            yield TargetObject(f"{RNG}/shard_{stage}.{tensor_rank}_{grid.pp}.{grid.tp}", _filled(layout, payloads))


def written_object(key: str, root: Any, tensors: TensorTable, rows: Sequence[int]) -> TargetObject:
    """An item around tensors of the request, which ``root`` has as `fresh_tensor`, in the order of ``rows``."""
    nbytes = [int(tensors.nbytes[row]) for row in rows]
    payloads = [row if size else -1 for row, size in zip(rows, nbytes, strict=True)]
    return TargetObject(key, file=WrittenFile.of("", root, nbytes, payloads))


def _item(blob: Blob, original: Mapping[str, bytes]) -> bytes:
    """The whole item of an object."""
    data = original.get(blob.fqn)
    if data is None:
        return object_item(replace(blob, value=[blob.value]), None)
    return _wrapped(data, blob)


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
    held = sorted(storages(root), key=lambda storage: int(storage.key))
    found = [directory.record(f"data/{storage.key}") for storage in held]
    payloads = [read_member(read, one, where=blob.fqn) for one in found if one is not None]
    if len(payloads) != len(held) or [int(storage.key) for storage in held] != list(range(len(held))):
        raise FormatError("storages of the object are missing in its file", where=blob.fqn)
    layout = ZipLayout(torch_members(dump_pickle([root]), [len(payload) for payload in payloads]))
    return _filled(layout, payloads)


def _filled(layout: ZipLayout, payloads: Sequence[bytes]) -> bytes:
    """A whole torch file."""
    item = bytearray(layout.nbytes)
    for offset, data in (*layout.heads, *layout.tail([crc32(payload) for payload in payloads])):
        item[offset : offset + len(data)] = data
    for payload, offset in zip(payloads, layout.payload_offsets[4:], strict=False):
        item[offset : offset + len(payload)] = payload
    return bytes(item)
