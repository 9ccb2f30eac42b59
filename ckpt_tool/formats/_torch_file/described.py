"""The parts of a manifest that every reader of torch files fills in the same way: sections, info, notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ckpt_tool.formats._torch_file.archive import TorchFile
from ckpt_tool.formats._torch_file.assemble import Assembly, Part
from ckpt_tool.formats._torch_file.entries import Entries
from ckpt_tool.manifest.model import Blob, FileEntry, KeyPath, Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.sizes import counted

__all__ = ["manifest_of", "part_of", "section_by_root"]

_COUNTERS = ("step", "global_step", "iteration", "epoch")
_MAX_NOTES = 20


def part_of(file: TorchFile, entries: Entries, rank: int | None, *, is_per_rank: bool = False) -> Part:
    """One opened file as a part of an assembly."""
    return Part(file.path, rank, entries.items, file.storages, file.big_endian, is_per_rank)


def section_by_root(roots: Iterable[Any]) -> Callable[[KeyPath, str], str]:
    """How to tell sections: by names, but all of an object that is nothing but an optimizer's state dict is that."""
    if all(isinstance(root, Mapping) and {"state", "param_groups"} <= set(root) for root in roots):
        return lambda path, fqn: "optimizer"  # noqa: ARG005 - one signature for both
    return section_of


def manifest_of(
    name: str,
    source_url: str,
    files: Sequence[TorchFile],
    entries: Sequence[Entries],
    found: Assembly,
    info: Mapping[str, Any],
) -> Manifest:
    """The manifest of an assembly; every opened file is in its file table, whether a tensor lies in it or not."""
    for file in files:
        if file.kind == "legacy" or all(place.file.path == file.path for place in file.storages.values()):
            found.rows.add_file(next((p.file for p in file.storages.values()), FileEntry(file.path, -1)))
    tensors, chunks, table = found.rows.tables()
    notes = list(dict.fromkeys([*(note for one in entries for note in one.notes), *found.notes]))
    if len(notes) > _MAX_NOTES:
        notes = [*notes[:_MAX_NOTES], f"and {counted(len(notes) - _MAX_NOTES, 'more note')} of this kind"]
    described: dict[str, Any] = {**_counters(found.blobs), **info}
    int_keyed = list(dict.fromkeys(name for one in entries for name in one.int_keyed))
    if int_keyed:
        described["int_keyed_dicts"] = int_keyed
    without_data = list(dict.fromkeys(name for one in entries for name in one.without_data))
    if without_data:
        described["without_data"] = without_data
    legacy = [file.path for file in files if file.kind == "legacy"]
    if legacy:
        described["legacy_files"] = legacy
    if any(file.big_endian for file in files):
        described["byteorder"] = "big"
    return Manifest(
        format=name,
        root=source_url,
        tensors=tensors,
        chunks=chunks,
        files=table,
        blobs=tuple(found.blobs),
        mesh=found.mesh,
        info=described,
        notes=tuple(notes),
    )


def _counters(blobs: Sequence[Blob]) -> dict[str, int]:
    """Training counters at the top of the state dict."""
    return {
        blob.fqn: blob.value
        for blob in blobs
        if blob.fqn in _COUNTERS and type(blob.value) is int and blob.value.bit_length() < 64
    }
