"""Parts are opened files, with the place of each of their tensors: by metadata, or by what it says itself.

A plain tensor of an item without metadata is the same on all ranks (a replica) or each rank's own, and nothing says
which. The checksums that the zips record do: equal in every file, it is one tensor; else, or without checksums, each
rank's is kept, as ``name@rank<r>``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats._safetensors.header import Header
from ckpt_tool.formats._safetensors.stored import read_headers
from ckpt_tool.formats._torch_file.archive import TorchFile, open_torch_files
from ckpt_tool.formats._torch_file.assemble import Part, PlacedBy, apart, by_itself
from ckpt_tool.formats._torch_file.described import part_of
from ckpt_tool.formats._torch_file.entries import Entries, Entry, entries_of
from ckpt_tool.formats._torch_file.placed import Placed
from ckpt_tool.formats._torch_file.rows import StoragePlace
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.torch_checkpointing.files import SAFETENSORS, TORCH, StoredFile
from ckpt_tool.formats.torch_checkpointing.metadata import Group, Saved
from ckpt_tool.formats.torch_checkpointing.sharding import TensorPlacements
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.model import FileEntry, KeyPath
from ckpt_tool.records import dataclass

__all__ = ["Opened", "open_files", "placed_by"]


@dataclass(frozen=True, slots=True)
class Opened:
    """Files with tensors, opened."""

    files: tuple[StoredFile, ...]
    """Aligned with ``parts``."""
    parts: tuple[Part, ...]
    torch_files: tuple[TorchFile, ...]
    entries: tuple[Entries, ...]
    """Of the torch files."""
    safetensors: tuple[str, ...]
    """Paths of the safetensors files."""


def open_files(source: Source, files: Sequence[StoredFile], saved: Saved | None) -> Opened:
    """Every torch and safetensors file opened, in the order of ``files``.

    Requests: three per torch file, one per safetensors file (two where its header is long).

    Raises:
        FormatError: a file is damaged, or not what it should be.
    """
    torch_files = [file for file in files if file.serialization == TORCH]
    others = [file for file in files if file.serialization == SAFETENSORS]
    opened = open_torch_files(source, [file.path for file in torch_files])
    entries = [entries_of(one.root, prefix=(file.item,)) for one, file in zip(opened, torch_files, strict=True)]
    parts = {
        file.path: part_of(one, found, file.rank) for file, one, found in zip(torch_files, opened, entries, strict=True)
    }
    headers = read_headers(source, [file.path for file in others]) if others else []
    for file, header in zip(others, headers, strict=True):
        paths = _paths(saved, file) if file.is_recorded else {}
        parts[file.path] = _safetensors_part(file, header, source.listing.nbytes(file.path), paths)
    kept = [file for file in files if file.path in parts]
    return Opened(
        files=tuple(kept),
        parts=tuple(parts[file.path] for file in kept),
        torch_files=tuple(opened),
        entries=tuple(entries),
        safetensors=tuple(file.path for file in others),
    )


def _paths(saved: Saved | None, file: StoredFile) -> dict[str, KeyPath]:
    """Paths of an item by their dotted form, which is all that a safetensors file keeps."""
    groups = saved.items[file.item].groups if saved else {}
    return {".".join(map(str, path)): path for path in groups}


def _safetensors_part(file: StoredFile, header: Header, nbytes: int, paths: Mapping[str, KeyPath]) -> Part:
    """The tensors of a safetensors file, each a storage of its own."""
    home = FileEntry(file.path, nbytes)
    entries, storages = [], {}
    for number, stored in enumerate(header.entries):
        key = str(number)
        is_typed = stored.dtype.storage is not None
        numel = stored.nbytes * 8 // stored.dtype.bits if is_typed else stored.nbytes
        storage = StorageRef(stored.dtype if is_typed else None, key, "cpu", numel)
        tensor = TensorRef(storage, 0, stored.shape, contiguous_strides(stored.shape), stored.dtype)
        path = (file.item, *paths.get(stored.name, (stored.name,)))
        entries.append(Entry(".".join(map(str, path)), path, tensor))
        storages[key] = StoragePlace(key, home, header.data_start + stored.start, stored.nbytes)
    return Part(file.path, file.rank, entries, storages, big_endian=False)


def placed_by(opened: Opened, saved: Saved | None) -> PlacedBy:
    """How to place the entries of ``opened``: see the module."""
    items = {part.where: file for part, file in zip(opened.parts, opened.files, strict=True)}
    own = _kept_apart(opened, saved)
    read: dict[int, TensorPlacements] = {}

    def placed(part: Part, entry: Entry) -> list[tuple[str, KeyPath, Placed]] | None:
        groups = _groups(saved, items[part.where], entry)
        if groups is not None and part.rank is not None:
            placements = read.get(id(groups))
            if placements is None:
                placements = read[id(groups)] = TensorPlacements(groups)
            return [(entry.fqn, entry.path, placements.place(entry.value, part.rank))]
        found = by_itself(part, entry)
        if found is None or part.rank is None or entry.fqn not in own:
            return found
        return [(*apart(fqn, path, part.rank), one) for fqn, path, one in found]

    return placed


def _groups(saved: Saved | None, file: StoredFile, entry: Entry) -> tuple[Group, ...] | None:
    """What metadata says of the placement of one entry, None where it is silent."""
    if saved is None or not file.is_recorded:
        return None
    return saved.items[file.item].groups.get(entry.path[1:])


def _kept_apart(opened: Opened, saved: Saved | None) -> set[str]:
    """Names of plain tensors that several ranks hold, and not surely with the same bytes."""
    values: dict[str, list[tuple[Any, ...] | None]] = {}
    for part, file in zip(opened.parts, opened.files, strict=True):
        for entry in part.entries:
            tensor = entry.value
            if isinstance(tensor, TensorRef) and _groups(saved, file, entry) is None:
                values.setdefault(entry.fqn, []).append(_signature(tensor, part.storages.get(tensor.storage.key)))
    return {fqn for fqn, found in values.items() if len(found) > 1 and (None in found or len(set(found)) > 1)}


def _signature(tensor: TensorRef, place: StoragePlace | None) -> tuple[Any, ...] | None:
    """Equal for tensors with the same elements; None where no checksum tells."""
    layout = (tensor.dtype.name, tensor.shape, tensor.strides, tensor.offset, tensor.conj, tensor.neg)
    if not tensor.numel:
        return layout
    return None if place is None or place.crc32 is None else (*layout, place.nbytes, place.crc32)
