"""The reader of ByteCheckpoint: FSDP, FSDP2, HSDP and DDP, sharded or decomposed, each rank's extra state apart.

Tensors of ``extra_state`` are called ``extra_state.<key>@rank<r>``; its other values are objects with a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._collector import collector_paused
from ckpt_tool.formats._dcp import checks, objects
from ckpt_tool.formats._dcp.metadata import METADATA_NAME
from ckpt_tool.formats._dcp.table import rank_of
from ckpt_tool.formats._torch_file import headers
from ckpt_tool.formats._torch_file.archive import open_torch_files
from ckpt_tool.formats._torch_file.assemble import assemble
from ckpt_tool.formats._torch_file.described import manifest_of, part_of
from ckpt_tool.formats._torch_file.entries import entries_of
from ckpt_tool.formats._torch_file.findings import archive_findings
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.formats.bytecheckpoint.location import SECTIONS, Location, foreign_step, locate, within
from ckpt_tool.formats.bytecheckpoint.section import read_section, section_manifest
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.merge import merge_manifests
from ckpt_tool.manifest.missing import missing_facts
from ckpt_tool.manifest.model import Blob, FileRange, Manifest
from ckpt_tool.manifest.subset import only_files
from ckpt_tool.manifest.tables import ChunkTable, IntArray
from ckpt_tool.numerals import numeral
from ckpt_tool.sizes import counted
from ckpt_tool.storage.virtual.subfolder import places_below

__all__ = ["READER", "ByteCheckpointReader"]

EXTRA_STATE = "extra_state"
_EXTRA_FILE = re.compile(rf"extra_state_rank_({numeral()})\.pt")
_SHOWN = 8


class ByteCheckpointReader:
    """``bytecheckpoint`` 0.0.2: the run's folder with its tracker, or one step's.

    Requests: ``read`` makes one for the tracker where there is one, one per section, and three per file of extra state;
    ``resolve`` none for the sections, and for extra state as for any file of torch.save.
    """

    name = "bytecheckpoint"

    def probe(self, source: Source) -> Probe:
        """By file names and the first bytes of a section's metadata; one request, two with a tracker."""
        try:
            location = locate(source)
        except (FormatError, NotFound) as error:
            return Probe(0.95, str(error))
        if location is None:
            return Probe(0.0, "neither model/.metadata nor a tracker beside global_step_<N>")
        foreign = foreign_step(source, location.folder)
        where = _below(location, "" if location.is_section else location.sections[0], METADATA_NAME)
        if foreign is not None:
            return Probe(0.0, f"{where} is {foreign}")
        return Probe(0.98, f"{where} is metadata of ByteCheckpoint")

    def read(self, source: Source) -> Manifest:
        """See the class for its cost.

        Raises:
            NotFound: nothing of this format here.
            FormatError: metadata is damaged or contradicts itself.
        """
        location = locate(source)
        if location is None:
            raise NotFound("no model/.metadata and no global_step_<N>", where=source.listing.url)
        with places_below(location.folder):
            return self._read(source, location)

    def _read(self, source: Source, location: Location) -> Manifest:
        step = within(source, location.folder)
        folders = [""] if location.is_section else list(location.sections)
        paths = [f"{folder}/{METADATA_NAME}".lstrip("/") for folder in folders]
        ranges = [FileRange(path, 0, step.listing.nbytes(path)) for path in paths]
        with collector_paused():
            sections = [
                read_section(data, name, path)
                for data, name, path in zip(step.store.fetch(ranges), location.sections, paths, strict=True)
            ]
            flat = {key: one for section in sections for key, one in section.flat.items()}
            parts = [
                (folder, section_manifest(within(step, folder), section, flat, self.name))
                for folder, section in zip(folders, sections, strict=True)
            ]
        extra = _extra_state(step, self.name)
        if extra is not None:
            parts.append((EXTRA_STATE, extra))
        merged = parts[0][1]
        if not location.is_section:
            named = [(_below(location, folder), part) for folder, part in parts]
            merged = merge_manifests(named, format_name=self.name, root=source.listing.url)
        lost = _lost_sections(step, location)
        known: dict[str, Any] = {
            "step": location.step,
            "world_size": _world_size(step),
            "folder": location.folder or None,
            "version": next((s.version for s in sections if s.version), None),
            "decomposed": sorted(flat) or None,
            **missing_facts(list(lost), sections=lost),
            "n_empty_chunks": sum(part.info.get("n_empty_chunks", 0) for _, part in parts) or None,
        }
        return merged.replace(
            info={key: value for key, value in known.items() if value is not None},
            notes=tuple(_notes(step, location, parts)),
        )

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """See the class for its cost."""
        return headers.resolve(source, manifest, rows)

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """All objects, those of ``rows`` loaded; one request per object at most, neighbours share one."""
        return objects.load_blobs(source, manifest, rows)

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """Of objects and of extra state; the raw bytes of tensors have none."""
        yield from checks.checksums(source, manifest.replace(chunks=manifest.chunks.take([]), items=None))
        yield from headers.checksums(source, only_files(manifest, _is_extra(manifest)))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Files that are missing, cut or unknown, ranks without extra state, and findings about its files."""
        yield from checks.file_findings(source, manifest)
        yield from self.check_metadata(source, manifest)
        yield from archive_findings(source, only_files(manifest, _is_extra(manifest)))

    def check_metadata(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Ranks without extra state where others have theirs: an error for those whose tensors are here.

        Others may be ranks of an earlier save, of which a file was left.
        """
        ranks = set(_extra_files(within(source, manifest.info.get("folder", ""))))
        missing = absent_numbers(ranks, manifest.info.get("world_size") or 0) if ranks else []
        known = max((rank_of(entry.path.rpartition("/")[2]) for entry in manifest.files), default=-1) if missing else -1
        for rank in missing:
            path = "/".join(filter(None, (manifest.info.get("folder"), EXTRA_STATE, f"extra_state_rank_{rank}.pt")))
            severity = Severity.ERROR if rank <= known else Severity.WARNING
            said = f"rank {rank} has no file of extra state, which other ranks have: {path} is missing"
            yield Finding("missing-file", severity, said, where=FileRange(path, 0, 0))


READER = ByteCheckpointReader()


def _below(location: Location, *names: str) -> str:
    """A path below the step's folder, from the source's root."""
    return "/".join(filter(None, (location.folder, *names)))


def _lost_sections(step: Source, location: Location) -> dict[str, str]:
    """Metadata that sections lack although their items are there; what all tensors of each are."""
    lost = [] if location.is_section else [name for name in SECTIONS if name not in location.sections]
    return {_below(location, name, METADATA_NAME): name for name in lost if step.listing.match(f"{name}/*.distcp")}


def _extra_files(step: Source) -> dict[int, str]:
    """Files of extra state by rank, relative to the step's folder."""
    found = {
        int(match[1]): path
        for path in step.listing.match(f"{EXTRA_STATE}/*.pt")
        if (match := _EXTRA_FILE.fullmatch(path.rpartition("/")[2]))
    }
    return dict(sorted(found.items()))


def _extra_state(step: Source, name: str) -> Manifest | None:
    """What each rank saved for itself, relative to its folder; three requests per file. None without files."""
    ranks = _extra_files(step)
    if not ranks:
        return None
    inner = within(step, EXTRA_STATE)
    with places_below(EXTRA_STATE):
        opened = open_torch_files(inner, [path.rpartition("/")[2] for path in ranks.values()])
    entries = [entries_of(file.root, prefix=(EXTRA_STATE,)) for file in opened]
    parts = [
        part_of(file, found, rank, is_per_rank=True) for file, found, rank in zip(opened, entries, ranks, strict=True)
    ]
    return manifest_of(name, inner.listing.url, opened, entries, assemble(parts, lambda path, fqn: "other"), {})  # noqa: ARG005


def _is_extra(manifest: Manifest) -> list[bool]:
    """Of each file, whether it holds extra state."""
    return [_EXTRA_FILE.fullmatch(entry.path.rpartition("/")[2]) is not None for entry in manifest.files]


def _world_size(step: Source) -> int | None:
    """Ranks that left a file; a rank that had nothing to write leaves an empty one."""
    names = [path.rpartition("/")[2] for path in step.listing.sizes]
    return max([*(rank_of(name) for name in names), *_extra_files(step), -1]) + 1 or None


def _notes(step: Source, location: Location, parts: Sequence[tuple[str, Manifest]]) -> Iterator[str]:
    """What a person should know."""
    yield from location.notes
    for folder, part in parts:
        if part.info.get("n_empty_chunks"):
            yield f"{folder}: {counted(part.info['n_empty_chunks'], 'chunk', 'hold')} no element and are left out"
        yield from (f"{folder}: {note}" for note in part.notes)
    known = {*location.sections, EXTRA_STATE}
    others = {path.partition("/")[0] for path in step.listing.sizes if "/" in path} - known
    if others and not location.folder:
        yield f"left out, as no part of the format that is known: {', '.join(sorted(others)[:_SHOWN])}"
