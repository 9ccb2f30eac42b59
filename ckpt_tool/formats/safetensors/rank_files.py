"""Reader of rank files (``rank_schema`` describes the format)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats._safetensors.stored import (
    StoredBox,
    header_findings,
    header_notes,
    read_headers,
    tables,
)
from ckpt_tool.formats._zip.directory import read_directory, read_member
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.safetensors.names import RANK_FILE, rank_file
from ckpt_tool.formats.safetensors.rank_schema import LAYOUT_FILE, OBJECTS_FILE, Layout, parse_boxes, parse_layout
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest, MeshInfo
from ckpt_tool.manifest.plain import from_plain
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.manifest.tables import FileTable
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing

__all__ = ["READER", "RankFilesReader"]


class RankFilesReader(ResolvedReader):
    """Reads a folder: one request for the layout, one per rank, two for a long header; objects when asked for."""

    name = "rank-files"

    def probe(self, source: Source) -> Probe:
        """By name; without the layout file the save did not finish, and is no checkpoint."""
        paths = _paths(source.listing)
        if source.listing.entry == LAYOUT_FILE:
            return Probe(0.95, f"{LAYOUT_FILE} is the layout of rank files")
        if source.listing.entry is not None:
            return Probe(0.4 if paths else 0.0, f"{source.listing.entry} is not the layout of rank files")
        if not paths:
            return Probe(0.0, "no rank_NNNNN.safetensors")
        if LAYOUT_FILE not in source.listing:
            return Probe(0.2, f"{paths[0]} without {LAYOUT_FILE}: the save did not finish, or the file was left behind")
        return Probe(0.95, f"{counted(len(paths), 'rank file')} and {LAYOUT_FILE}")

    def read(self, source: Source) -> Manifest:
        """The manifest; ``info`` is what was saved with it, plus ``world_size`` and ``missing_files`` if any are.

        Raises:
            NotFound: no layout file, or no rank file at all.
            FormatError: headers contradict the layout or each other.
        """
        layout = _read_layout(source)
        listing = source.listing
        # A named layout file still speaks of its siblings.
        paths = tuple(p for p in _paths(replace(listing, entry=None)) if p in layout.files)
        if not paths:
            raise NotFound(f"none of the {counted(layout.world_size, 'rank file')} is here", where=listing.url)
        headers = read_headers(source, paths)
        boxes = (
            StoredBox(
                box.fqn, box.dtype, box.shape, box.offsets, box.sizes, row,
                header.data_start + entry.start, entry.nbytes, _rank(paths[row]), box.path, box.section,
            )
            for row, header in enumerate(headers)
            for entry, box in zip(header.entries, parse_boxes(header, paths[row]), strict=True)
        )  # fmt: skip
        tensors, chunks, files = tables(boxes, paths, listing)
        blobs, files = _blobs(layout, listing, files)
        missing = [p for p in layout.files if p not in listing]
        notes = [*header_notes(paths, headers), *(f"{p} is not here" for p in missing[:3])]
        info = {**layout.info, "world_size": layout.world_size, **({"missing_files": missing} if missing else {})}
        mesh = MeshInfo(layout.axes, layout.mesh_sizes, LAYOUT_FILE) if layout.axes else None
        manifest = Manifest(self.name, source.store.url, tensors, chunks, files, blobs, mesh, info, tuple(notes))
        place = {fqn: row for row, fqn in enumerate(layout.order)}
        return only_tensors(
            manifest, sorted(range(len(tensors)), key=lambda row: place.get(tensors.fqns[row], len(place)))
        )

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """All blobs, those named by ``rows`` loaded: one request each."""
        blobs = list(manifest.blobs)
        for row in rows:
            blobs[row] = _load(source, blobs[row])
        return tuple(blobs)

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Files that the layout lists and that are missing, of another size or of another rank; ranks it does not know.

        One request per file.
        """
        layout = _read_layout(source)
        for path, nbytes in layout.files.items():
            here = source.listing.sizes.get(path)
            if here != nbytes:
                found = "is not here" if here is None else f"has {counted(here, 'byte')}"
                kind = "missing-file" if here is None else "file-size"
                said = f"{path} {found}; {LAYOUT_FILE} lists it with {counted(nbytes, 'byte')}"
                yield Finding(kind, Severity.ERROR, said, where=FileRange(path, 0, here or 0))
        for path in source.listing.match("rank_*.safetensors"):
            if path not in layout.files:
                said = f"{path} is not listed in {LAYOUT_FILE} and was left out"
                yield Finding("stray-file", Severity.WARNING, said, where=FileRange(path, 0, 0))
        if OBJECTS_FILE in source.listing:
            yield from _objects_findings(source)
        paths = [p for p in manifest.files.paths if RANK_FILE.fullmatch(p)]
        headers = read_headers(source, paths)
        yield from header_findings(paths, headers)
        for path, header in zip(paths, headers, strict=True):
            stated = (header.metadata.get("ckpt.rank"), header.metadata.get("ckpt.world_size"))
            expected = (str(_rank(path)), str(layout.world_size))
            if stated != expected:
                said = f"{path} says it is rank {stated[0]} of {stated[1]}, expected {expected[0]} of {expected[1]}"
                yield Finding("wrong-rank", Severity.ERROR, said, where=FileRange(path, 0, header.data_start))


def _objects_findings(source: Source) -> Iterator[Finding]:
    """Whether the file of plain objects is the JSON array that it must be."""
    raw = source.read_whole(OBJECTS_FILE)
    try:
        said = "" if isinstance(json.loads(raw), list) else "it is no array"
    except (ValueError, RecursionError) as error:
        said = str(error)
    if said:
        where = FileRange(OBJECTS_FILE, 0, len(raw))
        yield Finding("damaged-object", Severity.ERROR, f"{OBJECTS_FILE} holds no objects: {said}", where=where)


def _paths(listing: Listing) -> tuple[str, ...]:
    return tuple(p for p in listing.match("rank_*.safetensors") if RANK_FILE.fullmatch(p))


def _rank(path: str) -> int:
    match = RANK_FILE.fullmatch(path)
    return int(match["rank"]) if match else -1


def _read_layout(source: Source) -> Layout:
    if LAYOUT_FILE not in source.listing:
        raise NotFound(
            f"no {LAYOUT_FILE}, which is written last: the save did not finish",
            where=source.listing.url,
            hint="take an earlier checkpoint, or look at one rank's file by its name",
        )
    layout = parse_layout(source.read_whole(LAYOUT_FILE))
    expected = {rank_file(rank) for rank in range(min(layout.world_size, len(layout.files) + 1))}
    if not expected <= layout.files.keys():
        lacking = min(expected - layout.files.keys())
        raise FormatError(f"world_size is {layout.world_size:,}, but {lacking} is not listed", where=LAYOUT_FILE)
    return layout


def _blobs(layout: Layout, listing: Listing, files: FileTable) -> tuple[tuple[Blob, ...], FileTable]:
    """Objects whose file is here, and the file table with their files."""
    blobs = []
    entries = list(files.entries)
    known = set(files.paths)
    for blob in layout.blobs:
        where = blob.where
        if where is None or where.path not in listing:
            continue
        if where.end > listing.nbytes(where.path):
            raise FormatError(
                f"object {blob.fqn!r} ends at byte {where.end:,}, the file has {listing.nbytes(where.path):,}",
                where=where.path,
            )
        blobs.append(blob)
        if where.path not in known:
            known.add(where.path)
            entries.append(FileEntry(where.path, listing.nbytes(where.path)))
    return tuple(blobs), FileTable(tuple(entries))


def _load(source: Source, blob: Blob) -> Blob:
    if blob.where is None or blob.is_loaded:
        return blob
    raw = source.store.read(blob.where.path, blob.where.offset, blob.where.length)
    if blob.where.path != OBJECTS_FILE:
        return replace(blob, value=_unpickled(raw, blob), is_loaded=True)
    try:
        value = from_plain(json.loads(raw))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"object {blob.fqn!r} is not a plain value: {error}", where=str(blob.where)) from error
    return replace(blob, value=value, is_loaded=True)


def _unpickled(raw: bytes, blob: Blob) -> Any:
    """The object in ``raw`` as inert records, tensors in it as descriptions; other encodings as they are."""
    where = blob.where.path if blob.where else blob.fqn
    if blob.kind == "torch_save":

        def read(offset: int, length: int) -> bytes:
            return raw[offset : offset + length]

        member = read_directory(read, len(raw), where=where).record("data.pkl")
        if member is None:
            raise FormatError(f"object {blob.fqn!r} is a zip without data.pkl", where=where)
        return load_pickle(read_member(read, member, where=where), where=where)
    return load_pickle(raw, where=where) if blob.kind == "pickle" else raw


READER = RankFilesReader()
