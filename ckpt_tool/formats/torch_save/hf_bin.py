"""The reader of ``pytorch_model.bin.index.json``: several torch.save files that together hold one model's tensors.

The files decide: the index says which belong together and, where a tensor is in two of them, which one counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._companions import config_findings, read_companions, tied_note
from ckpt_tool.formats._hf_index import Index, contradictions, homes_of, remembered_index, variant_notes
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._split_names import index_beside, index_names, missing_names, split_name, unlike
from ckpt_tool.formats._torch_file.archive import TorchFile, open_torch_files
from ckpt_tool.formats._torch_file.assemble import Part, assemble
from ckpt_tool.formats._torch_file.described import manifest_of
from ckpt_tool.formats._torch_file.entries import Entries, entries_of
from ckpt_tool.formats._torch_file.findings import archive_findings, shared_bytes_findings
from ckpt_tool.formats._torch_file.reading import TorchFilesReader
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.missing import held_by_missing, missing_facts
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing

__all__ = ["READER", "HfBinReader"]

_FINDINGS = "hf-bin findings"
_FILES = "hf-bin files"
_KIND = "bin"


@dataclass(frozen=True, slots=True)
class _Contents:
    """Index and files as they were found."""

    index: Index
    files: tuple[TorchFile, ...]
    entries: tuple[Entries, ...]
    strays: tuple[str, ...]
    variants: tuple[str, ...] = ()
    """Files left out because they hold the same tensors in another type, or of another average of the weights."""

    def held(self) -> dict[str, dict[str, int]]:
        """By file: bytes of each tensor in it; 0 for a tensor whose storage an earlier one has already (tied)."""
        found: dict[str, dict[str, int]] = {}
        for file, entries in zip(self.files, self.entries, strict=True):
            seen: set[tuple[str, int]] = set()
            sizes: dict[str, int] = {}
            for entry in entries.items:
                if not isinstance(entry.value, TensorRef):
                    continue
                tensor = entry.value
                key = (tensor.storage.key, tensor.offset)
                sizes[entry.fqn] = 0 if key in seen else tensor.dtype.nbytes(tensor.numel)
                seen.add(key)
            found[file.path] = sizes
        return found


class HfBinReader(TorchFilesReader):
    """An index of ``.bin`` files.

    Requests: ``read`` makes one for the index, one for each companion, and three per file; ``resolve`` one per file and
    the local headers of the rows asked for.
    """

    name = "hf-bin"

    def probe(self, source: Source) -> Probe:
        """By name."""
        indexes = index_names(source.listing.paths, _KIND)
        if len(indexes) == 1:
            return Probe(0.95, f"{indexes[0]} is an index of torch.save files")
        numbered = _numbered(source.listing) if not indexes else ()
        if numbered:
            return Probe(0.7, f"{len(numbered):,} numbered .bin files, without an index")
        return Probe(0.0, f"{counted(len(indexes), 'file')} *.bin.index.json")

    def read(self, source: Source) -> Manifest:
        """The manifest of what the files hold; notes say where the index differs.

        Raises:
            NotFound: the index names no file that is here.
        """
        found = _contents(source)
        homes = homes_of(found.held(), found.index.weight_map)
        parts = [
            Part(
                file.path,
                None,
                [
                    entry
                    for entry in entries.items
                    if not entry.is_tensor or homes.get(entry.fqn, file.path) == file.path
                ],
                file.storages,
                file.big_endian,
            )
            for file, entries in zip(found.files, found.entries, strict=True)
        ]
        assembly = assemble(parts, section_of)
        findings = source.remember(_FINDINGS, _index_findings(found, source))
        faults = [f for f in findings if f.kind not in {"total-size", "stray-file", "no-index"}]
        assembly.notes += [finding.message for finding in faults]
        lost = {fqn: path for fqn, path in found.index.weight_map.items() if fqn not in homes}
        gone = set(lost.values()).difference(source.listing.sizes)
        missing = [path for path in found.index.files if path in gone]
        if not found.index.path:
            missing = _missing(found)
            assembly.notes.append(f"no index: the {counted(len(found.files), 'numbered file', 'were')} taken together")
        companions, notes = read_companions(source)
        assembly.notes += [*variant_notes(found.variants), *notes]
        info = {
            "index": found.index.path or None,
            **missing_facts(missing, names=held_by_missing(lost, missing)),
            **({"left_out": list(found.variants)} if found.variants else {}),
            **companions,
        }
        manifest = manifest_of(self.name, source.listing.url, found.files, found.entries, assembly, info)
        return manifest.replace(notes=(*manifest.notes, *tied_note(info, manifest.tensors.index)))

    def read_part(self, source: Source, fqns: Collection[str]) -> Manifest | None:
        """The manifest of ``fqns`` by the index and the pickles of their files, neither of them read twice."""
        indexes = index_names(source.listing.paths, _KIND)
        homes = remembered_index(source, indexes[0]).homes(fqns, source.listing.sizes) if len(indexes) == 1 else None
        if homes is None:
            return None
        known: dict[str, TorchFile] = source.remembered.setdefault(_FILES, {})
        paths = sorted(set(homes.values()))
        missing = [path for path in paths if path not in known]
        known |= zip(missing, open_torch_files(source, missing), strict=True)
        files = [known[path] for path in paths]
        entries = [entries_of(file.root) for file in files]
        taken = [
            [entry for entry in of_file.items if entry.is_tensor and homes.get(entry.fqn) == file.path]
            for file, of_file in zip(files, entries, strict=True)
        ]
        if sum(map(len, taken)) != len(homes):
            return None
        parts = [Part(f.path, None, t, f.storages, f.big_endian) for f, t in zip(files, taken, strict=True)]
        return manifest_of(self.name, source.listing.url, files, entries, assemble(parts, section_of), {})

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Everything in which index and files differ, and what single files have wrong."""
        yield from self.check_metadata(source, manifest)
        yield from archive_findings(source, manifest)
        yield from shared_bytes_findings(manifest)
        yield from config_findings(source, manifest)

    def check_metadata(self, source: Source, manifest: Manifest) -> Iterator[Finding]:  # noqa: ARG002
        """Everything in which index and files differ; no request behind `read`, else the same ones."""
        yield from source.recall(_FINDINGS, lambda: _index_findings(_contents(source), source))


def _contents(source: Source) -> _Contents:
    listing = source.listing
    indexes = index_names(listing.paths, _KIND)
    numbered = _numbered(listing) if not indexes else ()
    if numbered:
        return _without_index(source, numbered)
    if len(indexes) != 1:
        raise FormatError(f"{counted(len(indexes), 'file')} *.bin.index.json, expected one", where=listing.url)
    index = remembered_index(source, indexes[0])
    stem = index.path.partition(".bin.index.")[0]
    top = [path for path in sorted(listing.sizes) if "/" not in path]
    strays = tuple(path for path in top if path.startswith(stem) and path.endswith(".bin") and path not in index.files)
    named = [path for path in index.files if path in listing]
    families = {_family(path) for path in named} - {None}
    paths = sorted({*named, *(path for path in strays if _family(path) in families)}) or list(strays)
    if not paths:
        raise NotFound(
            f"none of the {counted(len(index.files), 'file')} that {index.path} names is here",
            where=listing.url,
            hint="fetch them: only the index was copied",
        )
    files = tuple(open_torch_files(source, paths))
    left_out = unlike(paths, (path for path in strays if path not in paths))
    strays = tuple(path for path in strays if path not in left_out)
    return _Contents(index, files, tuple(entries_of(file.root) for file in files), strays, left_out)


def _numbered(listing: Listing) -> tuple[str, ...]:
    """Numbered files of one set, at the top; none where there are several sets."""
    paths = tuple(path for path in listing.match("*.bin") if _family(path))
    return paths if len({_family(path) for path in paths}) == 1 and listing.entry is None else ()


def _without_index(source: Source, paths: tuple[str, ...]) -> _Contents:
    """What numbered files hold; one tensor may be in one file only, as nothing says which counts."""
    files = tuple(open_torch_files(source, paths))
    found = _Contents(Index("", {}, None, ()), files, tuple(entries_of(file.root) for file in files), ())
    first: dict[str, str] = {}
    for path, names in found.held().items():
        for fqn in names:
            if fqn in first:
                raise FormatError(
                    f"{fqn!r} is in {first[fqn]} and in {path}, and no index says which one counts",
                    where=source.listing.url,
                )
            first[fqn] = path
    return found


def _missing(found: _Contents) -> list[str]:
    """Files that the names of the others say were there."""
    return missing_names(file.path for file in found.files)


def _family(path: str) -> tuple[str, int, str] | None:
    """What numbered files (``-00001-of-00003``) of one set have in common."""
    name = split_name(path)
    return None if name is None else name.family


def _index_findings(found: _Contents, source: Source) -> Iterator[Finding]:
    if not found.index.path:
        for path in _missing(found):
            said = f"{path} is not here, by the numbers in its siblings' names"
            yield Finding("missing-file", Severity.ERROR, said, where=FileRange(path, 0, 0))
        index = index_beside(file.path for file in found.files)
        said = f"no {index}, by which programs find the {counted(len(found.files), 'numbered file')}"
        yield Finding("no-index", Severity.WARNING, said, where=FileRange(index, 0, 0))
        return
    sizes: Mapping[str, int] = source.listing.sizes
    yield from contradictions(found.index, found.held(), sizes, found.strays)


READER = HfBinReader()
