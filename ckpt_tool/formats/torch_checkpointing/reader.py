"""The reader of torch-checkpointing: items of all ranks joined to global tensors, whatever was recorded of them.

Names are the item, a dot, and the keys: ``model.layers.0.weight``, ``optimizer.state.layers.0.weight.exp_avg``; a value
that is the whole item is called like it (``step``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.errors import CkptError, FormatError, NotFound
from ckpt_tool.formats._collector import collector_paused
from ckpt_tool.formats._torch_file import headers
from ckpt_tool.formats._torch_file.archive import HEAD_NBYTES, is_torch_head
from ckpt_tool.formats._torch_file.assemble import assemble
from ckpt_tool.formats._torch_file.described import manifest_of
from ckpt_tool.formats._torch_file.findings import archive_findings
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.formats.torch_checkpointing.files import (
    JSON,
    RAW,
    FileSet,
    StoredFile,
    find_files,
    ranks_by_item,
    ranks_by_name,
)
from ckpt_tool.formats.torch_checkpointing.metadata import METADATA_NAME, Saved, is_metadata_head, load_metadata
from ckpt_tool.formats.torch_checkpointing.parts import open_files, placed_by
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.subset import only_files
from ckpt_tool.manifest.tables import ChunkTable, IntArray
from ckpt_tool.sizes import counted

__all__ = ["READER", "TorchCheckpointingReader"]

_KINDS = {JSON: "json", RAW: "bytes"}
_SHOWN = 8
_UNCOMMITTED = "tmp_"
_STREAMED = b"archive/"
"""torch.save into a stream cannot name the zip's top folder after the file."""


class TorchCheckpointingReader:
    """``torch_checkpointing`` 0.1: with resharders or without, in torch, safetensors, JSON and raw files.

    Requests: ``read`` makes one for ``metadata.pkl``, three per torch file, one or two per safetensors file;
    ``resolve`` one per torch file and the local headers of the rows asked for.
    """

    name = "torch-checkpointing"

    def probe(self, source: Source) -> Probe:
        """By the first bytes of ``metadata.pkl``, or by names and the first bytes of the first file: one request."""
        if source.listing.entry is not None:
            return Probe(0.0, "a single file")
        if METADATA_NAME in source.listing:
            if is_metadata_head(source.head(METADATA_NAME, 64)):
                return Probe(0.95, f"{METADATA_NAME} is a pickle of placements")
            return Probe(0.0, f"{METADATA_NAME} is a pickle of something else")
        ranks = ranks_by_item(source.listing.sizes)
        found = list(ranks.values())
        if len(ranks) < 2 or any(one != found[0] for one in found) or found[0] != set(range(len(found[0]))):
            return Probe(0.0, f"no {METADATA_NAME}, and no <item>_<rank>.pt of several items with the same ranks")
        first = f"{next(iter(ranks))}_0.pt"
        head = source.head(first, HEAD_NBYTES)
        what = f"{counted(len(ranks), 'item')} of {counted(len(found[0]), 'rank')}, as {first}"
        if not is_torch_head(head) or _STREAMED not in head:
            return Probe(0.0, f"{what} is no file that torch.save wrote into a stream")
        return Probe(0.85, what)

    def read(self, source: Source) -> Manifest:
        """See the class for its cost.

        Raises:
            NotFound: nothing of this format here.
            FormatError: metadata is damaged, or a file is not what it says.
        """
        saved = load_metadata(source.read_whole(METADATA_NAME)) if METADATA_NAME in source.listing else None
        found = find_files(source.listing, saved)
        if saved is None and not found.files:
            raise NotFound(f"no {METADATA_NAME} and no <item>_<rank>.pt", where=source.listing.url)
        with collector_paused():
            opened = open_files(source, found.files, saved)
            assembly = assemble(opened.parts, section_of, placed_by(opened, saved))
        for path in opened.safetensors:
            assembly.rows.add_file(FileEntry(path, source.listing.nbytes(path)))
        assembly.blobs += [_blob(file, source) for file in found.files if file.serialization in _KINDS]
        absent = _absent(saved, assembly.rows.index)
        assembly.notes += _notes(source, saved, found, absent, assembly.replicated)
        ranks = [file.rank for file in found.files if file.rank is not None]
        known: dict[str, Any] = {
            "world_size": saved.world_size if saved else max(ranks, default=-1) + 1 or None,
            "version": saved.version if saved else None,
            "safetensors_files": list(opened.safetensors) or None,
            "missing_files": found.missing or None,
            "stray_files": found.strays or None,
            "absent_tensors": absent or None,
        }
        info = {key: value for key, value in known.items() if value is not None}
        return manifest_of(self.name, source.listing.url, opened.torch_files, opened.entries, assembly, info)

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """See the class for its cost."""
        return headers.resolve(source, manifest, rows)

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """All objects, those of ``rows`` that are files of their own loaded: a request each."""
        blobs = list(manifest.blobs)
        wanted = [row for row in sorted(set(rows)) if not blobs[row].is_loaded]
        places = [where for row in wanted if (where := blobs[row].where) is not None]
        for row, data in zip(wanted, source.store.fetch(places), strict=True):
            blobs[row] = replace(blobs[row], value=_value(blobs[row], data), is_loaded=True)
        return tuple(blobs)

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """The CRC-32 of each storage of each torch file, and of the pickles; safetensors files have none."""
        return headers.checksums(source, only_files(manifest, _is_torch(manifest)))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Files and tensors that metadata lists and that are not here, files of other attempts, cut objects."""
        for path in manifest.info.get("missing_files", ()):
            said = f"{path} is missing: its rank's boxes are not here"
            yield Finding("missing-file", Severity.ERROR, said, where=FileRange(path, 0, 0))
        yield from _rank_findings(source, manifest.info)
        for fqn in manifest.info.get("absent_tensors", ()):
            message = f"{fqn!r} is in {METADATA_NAME}, but no file holds it"
            yield Finding("missing-tensor", Severity.ERROR, message, fqn=fqn)
        for path in manifest.info.get("stray_files", ()):
            message = f"{path} is of no rank of this save: left by an earlier attempt, or copied under another name"
            yield Finding("unknown-file", Severity.WARNING, message)
        for row, blob in enumerate(manifest.blobs):
            if blob.where is not None and blob.kind == "json":
                try:
                    self.load_blobs(source, manifest, [row])
                except CkptError as error:
                    yield Finding("damaged-object", Severity.ERROR, error.message, blob.fqn, blob.where)
        yield from archive_findings(source, only_files(manifest, _is_torch(manifest)))


READER = TorchCheckpointingReader()


def _is_torch(manifest: Manifest) -> list[bool]:
    """Of each file, whether torch.save wrote it."""
    others = set(manifest.info.get("safetensors_files", ()))
    return [entry.path not in others for entry in manifest.files]


def _blob(file: StoredFile, source: Source) -> Blob:
    where = FileRange(file.path, 0, source.listing.nbytes(file.path))
    return Blob(file.item, _KINDS[file.serialization], where, path=(file.item,), rank=file.rank)


def _value(blob: Blob, data: bytes) -> Any:
    if blob.kind == "bytes":
        return data
    try:
        return json.loads(data)
    except (RecursionError, ValueError) as error:
        where = blob.where.path if blob.where else blob.fqn
        raise FormatError(f"expected JSON: {error}", where=where, hint="the copy was cut: fetch it again") from None


def _rank_findings(source: Source, info: Mapping[str, Any]) -> Iterator[Finding]:
    """Items that several ranks saved and others did not; files with tensors are known to be missing without this."""
    world_size, told = info.get("world_size") or 0, set(info.get("missing_files", ()))
    for (item, suffix), ranks in ranks_by_name(source.listing.sizes).items():
        lacking = [rank for rank in absent_numbers(ranks, world_size) if f"{item}_{rank}.{suffix}" not in told]
        if len(ranks) > 1 and lacking:
            shown = ", ".join(map(str, lacking[:_SHOWN])) + (" ..." if len(lacking) > _SHOWN else "")
            path = f"{item}_{lacking[0]}.{suffix}"
            said = f"{path} is not here: {len(ranks):,} of {world_size:,} ranks have a file of {item!r}, not {shown}"
            yield Finding("missing-rank-file", Severity.WARNING, said, where=FileRange(path, 0, 0))


def _absent(saved: Saved | None, index: Mapping[str, int]) -> list[str]:
    """Tensors that metadata lists and no file holds."""
    if saved is None:
        return []
    names = (".".join(map(str, (item, *path))) for item, recorded in saved.items.items() for path in recorded.groups)
    return sorted(name for name in names if name not in index)


def _notes(
    source: Source, saved: Saved | None, found: FileSet, absent: Sequence[str], replicated: Sequence[str]
) -> Iterator[str]:
    """What a person should know."""
    if source.listing.url.rstrip("/").rpartition("/")[2].startswith(_UNCOMMITTED):
        yield f"the folder's name begins with {_UNCOMMITTED!r}: its save was not committed, files may be missing"
    if saved is None:
        yield f"no {METADATA_NAME}: placements are those that the files' own DTensors record"
    for noun, what, paths in (
        ("recorded file", "missing", found.missing),
        ("file of no rank of this save", "left out", found.strays),
        ("raw file", "too large for an object and left out", found.left_out),
        ("tensor", f"in {METADATA_NAME}, but in no file", absent),
    ):
        if paths:
            shown = ", ".join(paths[:_SHOWN]) + (" ..." if len(paths) > _SHOWN else "")
            yield f"{counted(len(paths), noun, 'are')} {what}: {shown}"
    if replicated:
        yield (
            f"{counted(len(replicated), 'tensor', 'record')} no placement and have equal checksums in all files: "
            "replicas"
        )
