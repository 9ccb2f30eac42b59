"""Faults and oddities that files of torch.save can have, told from a manifest and the directories of its zips."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckpt_tool.formats._torch_file.archive import storage_members, zip_directory
from ckpt_tool.formats._torch_file.headers import plain_zips
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.sizes import counted, counted_of

__all__ = ["archive_findings", "shared_bytes_findings"]

_SHOWN = 3


def archive_findings(source: Source, manifest: Manifest) -> Iterator[Finding]:
    """Tensors without data, and storages without a checksum; one request per file for its directory."""
    for name in manifest.info.get("without_data", ()):
        said = f"{name!r}: weight data absent: a meta tensor was saved, which has a shape and no elements"
        yield Finding("absent-weight", Severity.WARNING, said, fqn=name)
    for entry in plain_zips(manifest):
        directory, _ = zip_directory(source, entry.path)
        members = storage_members(directory)
        without = [m for m in members.values() if m.nbytes and not m.crc32]
        if without:
            yield Finding(
                "crc-not-recorded",
                Severity.INFO,
                f"{entry.path}: {counted_of(len(without), len(members), 'storage', 'have')} no checksum and cannot be "
                "verified: "
                "saved with set_crc32_options(False), or with skip_data, which leaves zeros in place of the data",
                where=FileRange(entry.path, without[0].header_offset, without[0].nbytes),
            )


def shared_bytes_findings(manifest: Manifest) -> Iterator[Finding]:
    """Tensors that share bytes: all of them (tied weights), or some (views of one storage). Reads nothing."""
    chunks = manifest.chunks
    if not len(chunks):
        return
    shape_key = chunks.sizes if chunks.strides is None else np.concatenate([chunks.sizes, chunks.strides], axis=1)
    order = np.lexsort((*shape_key.T, chunks.flags, chunks.length, chunks.offset, chunks.file))
    file, offset = chunks.file[order], chunks.offset[order]
    end = offset + chunks.length[order]
    reach = np.maximum.accumulate(np.where(np.diff(file, prepend=file[0]) != 0, 0, end))
    names = manifest.tensors.fqns
    is_same = (file[1:] == file[:-1]) & (offset[1:] == offset[:-1]) & (end[1:] == end[:-1])
    is_same &= chunks.flags[order][1:] == chunks.flags[order][:-1]
    for column in (chunks.sizes, chunks.strides):
        if column is not None:
            is_same &= (column[order][1:] == column[order][:-1]).all(axis=1)
    is_over = (file[1:] == file[:-1]) & (offset[1:] < reach[:-1]) & ~is_same
    for kind, mask, what in (
        ("tied-tensors", is_same, "have the same bytes in the file"),
        ("overlapping-views", is_over, "are views of one storage that overlap in part"),
    ):
        pairs = [
            (names[chunks.tensor[order[i]]], names[chunks.tensor[order[i + 1]]])
            for i in np.flatnonzero(mask).tolist()
            if chunks.tensor[order[i]] != chunks.tensor[order[i + 1]]
        ]
        if pairs:
            shown = ", ".join(f"{a!r} and {b!r}" for a, b in pairs[:_SHOWN])
            more = f" and {counted(len(pairs) - _SHOWN, 'more pair')}" if len(pairs) > _SHOWN else ""
            yield Finding(kind, Severity.INFO, f"{shown}{more} {what}", fqn=pairs[0][1])
