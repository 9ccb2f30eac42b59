"""Several safetensors files that together hold whole tensors, with the index that Hugging Face writes or without one.

The headers decide: the index says which files belong together and, where a tensor is in two of them, which one counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._companions import config_findings, read_companions, tied_note
from ckpt_tool.formats._hf_index import Index, contradictions, homes_of, remembered_index, variant_notes
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats._safetensors.header import Header
from ckpt_tool.formats._safetensors.stored import (
    header_findings,
    header_notes,
    read_headers,
    tables,
    whole_box,
)
from ckpt_tool.formats._split_names import index_beside, missing_names, split_name, unlike, variants
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.safetensors.joined import scalar_findings, shards_beside
from ckpt_tool.formats.safetensors.names import SHARD_FILE, index_paths, plain_paths
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.missing import held_by_missing, missing_facts
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing

__all__ = ["READER", "SafetensorsIndexReader"]

_FINDINGS = "safetensors-index findings"
_HEADERS = "safetensors-index headers"


@dataclass(frozen=True, slots=True)
class _Contents:
    """What was found in a folder: the index, the files that belong together, and those that do not."""

    index: Index | None
    paths: tuple[str, ...]
    headers: tuple[Header, ...]
    strays: tuple[str, ...]
    variants: tuple[str, ...] = ()
    """Files left out because they hold the same tensors in another type, or of another average of the weights."""

    @property
    def held(self) -> dict[str, dict[str, int]]:
        """By file: bytes of each tensor in it."""
        return {p: {e.name: e.nbytes for e in h.entries} for p, h in zip(self.paths, self.headers, strict=True)}


class SafetensorsIndexReader(ResolvedReader):
    """Reads a folder: one request for the index, one per file, two for a long header, one for each companion."""

    name = "safetensors-index"

    def probe(self, source: Source) -> Probe:
        """By name."""
        indexes, paths = index_paths(source.listing), plain_paths(source.listing)
        if indexes:
            return Probe(0.95, f"{indexes[0]} is an index of safetensors files")
        if source.listing.entry is None and len(paths) > 1:
            return Probe(0.7, f"{counted(len(paths), 'safetensors file')} at the top, without an index")
        if source.listing.entry is None and missing_names(paths):
            return Probe(0.92, f"{paths[0]} is one of several, by its name, and the only one here")
        return Probe(0.0, f"no *.safetensors.index.json, and {counted(len(paths), 'safetensors file')} at the top")

    def read(self, source: Source) -> Manifest:
        """The manifest of what the headers hold.

        ``info`` has ``index`` (its path or None), ``metadata`` (of the first file), ``missing_files`` where the index
        names files that are not here, with tensors that no other file has, and the companions. Notes say where index
        and headers differ.

        Raises:
            FormatError: without an index, one tensor is in two files.
        """
        return self._manifest(source, _contents(source))

    def read_part(self, source: Source, fqns: Collection[str]) -> Manifest | None:
        """The manifest of ``fqns`` by the index and the headers of their files, neither of them read twice.

        Where the index is right, it is what ``read`` finds of them; companions are not read.
        """
        index = _read_index(source)
        homes = None if index is None else index.homes(fqns, source.listing.sizes)
        if homes is None:
            return None
        known: dict[str, Header] = source.remembered.setdefault(_HEADERS, {})
        paths = tuple(sorted(set(homes.values())))
        missing = [path for path in paths if path not in known]
        known |= zip(missing, read_headers(source, missing), strict=True)
        boxes = (
            whole_box(entry, known[path], row)
            for row, path in enumerate(paths)
            for entry in known[path].entries
            if homes.get(entry.name) == path
        )
        tensors, chunks, files = tables(boxes, paths, source.listing)
        if len(tensors) != len(homes):
            return None
        return Manifest(
            self.name,
            source.store.url,
            tensors,
            chunks,
            files,
            notes=tuple(header_notes(paths, [known[p] for p in paths])),
        )

    def read_together(self, source: Source, paths: Iterable[str]) -> Manifest:
        """The manifest of these files as one model, an adapter beside its base among them; no index is asked.

        Raises:
            FormatError: one tensor is in two of them.
        """
        return self._manifest(source, _together(source, tuple(sorted(paths))))

    def _manifest(self, source: Source, found: _Contents) -> Manifest:
        taken_from = homes_of(found.held, found.index.weight_map if found.index else {})
        boxes = (
            whole_box(entry, header, row)
            for row, (path, header) in enumerate(zip(found.paths, found.headers, strict=True))
            for entry in header.entries
            if taken_from[entry.name] == path
        )
        tensors, chunks, files = tables(boxes, found.paths, source.listing)
        info, notes = read_companions(source)
        wanted = found.index.weight_map if found.index else {}
        lost = {fqn: path for fqn, path in wanted.items() if fqn not in taken_from}
        gone = set(lost.values()).difference(source.listing.sizes)
        missing = [path for path in found.index.files if path in gone] if found.index else []
        missing = list(dict.fromkeys([*missing, *missing_names(found.paths)]))
        findings = source.remember(_FINDINGS, _findings(found, source.listing))
        notes = [*_notes(found, findings, source.listing), *notes, *tied_note(info, tensors.index)]
        info = {
            "index": found.index.path if found.index else None,
            "metadata": dict(found.headers[0].metadata) if found.headers else {},
            **missing_facts(missing, names=held_by_missing(lost, missing)),
            **({"left_out": list(found.variants)} if found.variants else {}),
            **info,
        }
        return Manifest(self.name, source.store.url, tensors, chunks, files, info=info, notes=tuple(notes))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Index against headers, gaps in numbered names, and what `SafetensorsReader.check` finds.

        Where torch's shards lie beside or in ``sharded/``, tensors without dimensions are compared with them.
        """
        yield from self.check_metadata(source, manifest)
        yield from config_findings(source, manifest)
        shards = shards_beside(source)
        if shards and not manifest.tensors.ndim.all():
            paths = manifest.files.paths
            joined = zip(paths, read_headers(source, paths), strict=True)
            found = zip(shards, read_headers(source, shards), strict=True)
            yield from scalar_findings(source, dict(joined), dict(found))

    def check_metadata(self, source: Source, manifest: Manifest) -> Iterator[Finding]:  # noqa: ARG002
        """Index against headers, and gaps in numbered names; no request behind `read`, else the same ones."""
        yield from source.recall(_FINDINGS, lambda: _findings(_contents(source), source.listing))


def _contents(source: Source) -> _Contents:
    """Index and headers.

    Raises:
        FormatError: two indexes to choose from, or one tensor in two files and no index to choose by.
    """
    listing = source.listing
    # A named index still speaks of its siblings.
    here = plain_paths(replace(listing, entry=None))
    index = _read_index(source)
    paths = here
    if index is not None:
        named = {p for p in index.files if p in listing}
        families = {name.family for p in named if (name := split_name(p))}
        siblings = {p for p in here if (name := split_name(p)) and name.family in families}
        paths = tuple(sorted(named | siblings)) or here
    if not paths:
        if index is None:
            raise NotFound("no safetensors file", where=listing.url)
        raise NotFound(
            f"none of the {counted(len(index.files), 'file')} that {index.path} names is here",
            where=listing.url,
            hint="fetch them: only the index was copied",
        )
    if index is None:
        return _together(source, paths)
    strays = tuple(p for p in here if p not in index.files)
    left_out = unlike(paths, (p for p in strays if p not in paths))
    strays = tuple(p for p in strays if p not in left_out)
    return _Contents(index, paths, tuple(read_headers(source, paths)), strays, left_out)


def _together(source: Source, paths: tuple[str, ...]) -> _Contents:
    """Headers of files that no index speaks of; a variant's are left out where its tensors are in the others, too."""
    headers = dict(zip(paths, read_headers(source, paths), strict=True))
    others = variants(paths)
    plain = {entry.name for path in paths if path not in others for entry in headers[path].entries}
    left_out = tuple(path for path in others if plain.issuperset(entry.name for entry in headers[path].entries))
    kept = {path: header for path, header in headers.items() if path not in left_out}
    found = _Contents(None, tuple(kept), tuple(kept.values()), (), left_out)
    _refuse_duplicates(found.held, source.listing.url)
    return found


def _read_index(source: Source) -> Index | None:
    """The index, read once."""
    indexes = index_paths(source.listing)
    if len(indexes) > 1 and "model.safetensors.index.json" in indexes:
        indexes = ("model.safetensors.index.json",)
    if len(indexes) > 1:
        raise FormatError(
            f"{len(indexes)} indexes: {', '.join(indexes)}", where=source.listing.url, hint="name the one to read"
        )
    return remembered_index(source, indexes[0]) if indexes else None


def _refuse_duplicates(held: Mapping[str, Mapping[str, int]], where: str) -> None:
    first: dict[str, str] = {}
    for path, names in held.items():
        for fqn in names:
            if fqn in first:
                raise FormatError(
                    f"{fqn!r} is in {first[fqn]} and in {path}, and no index says which one counts",
                    where=where,
                    hint="name one of the files, or move the other away",
                )
            first[fqn] = path


def _findings(found: _Contents, listing: Listing) -> Iterator[Finding]:
    yield from header_findings(found.paths, found.headers)
    if found.index is not None:
        yield from contradictions(found.index, found.held, listing.sizes, found.strays)
    named = set(found.index.files) if found.index else set()
    for path in missing_names(found.paths):
        if path not in named and path not in listing:
            yield Finding(
                "missing-file",
                Severity.ERROR,
                f"{path} is not here, by the numbers in its siblings' names",
                where=FileRange(path, 0, 0),
            )
    numbered = sum(split_name(path) is not None for path in found.paths)
    if found.index is None and numbered:
        yield Finding(
            "no-index",
            Severity.WARNING,
            f"no *.safetensors.index.json, by which programs find the {counted(numbered, 'numbered file')}: ckpt edit "
            "--fix-index writes it anew",
            where=FileRange(index_beside(found.paths), 0, 0),
        )


def _notes(found: _Contents, findings: Sequence[Finding], listing: Listing) -> list[str]:
    notes = [*header_notes(found.paths, found.headers), *variant_notes(found.variants)]
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.kind not in {"shared-bytes", "large-header", "total-size", "no-index"}:
            kinds.setdefault(finding.kind, []).append(finding)
    for alike in kinds.values():
        more = f" (and {len(alike) - 1:,} more like this)" if len(alike) > 1 else ""
        notes.append(alike[0].message + more)
    if kinds and found.index is not None:
        notes.append(f"where {found.index.path} and the headers of the files differ, the headers were followed")
    if found.index is None and (len(found.paths) > 1 or not found.variants):
        notes.append(f"no index: all {counted(len(found.paths), 'safetensors file')} at the top were taken together")
    pieces = sum(1 for p in listing.sizes if p.startswith("sharded/") and SHARD_FILE.fullmatch(p))
    if pieces:
        notes.append(f"sharded/ holds the same tensors in {counted(pieces, 'piece')} and was left out")
    return notes


READER = SafetensorsIndexReader()
