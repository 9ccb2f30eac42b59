"""The reader of rank files: one torch.save file per rank, their tensors joined to global ones.

Names: model files give their keys as they are; optimizer files (``optim_...``, ``optimizer_...``) are put under
``optim``, everything else of a rank's own (``extra_state_...``, random states) under ``extra_state``. So the state of
parameter 0 is ``optim.state.0.exp_avg``. Which parameter a number means is noted in ``info["optimizer_parameters"]`` as
far as order and shape tell it in one way only.

A tensor without placement is taken for a replica in every rank's file. That is an assumption: ``info`` lists such
tensors, each rank's copy is a chunk with its rank, and ``check`` compares their bytes. Where even shapes differ, each
rank's tensor keeps its own name, ``name@rank3``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._companions import read_config
from ckpt_tool.formats._torch_file.archive import HEAD_NBYTES, TorchFile, is_torch_head, open_torch_files
from ckpt_tool.formats._torch_file.assemble import Assembly, Part, PlacedBy, assemble, by_itself
from ckpt_tool.formats._torch_file.described import manifest_of, part_of, section_by_root
from ckpt_tool.formats._torch_file.entries import Entries, Entry, entries_of
from ckpt_tool.formats._torch_file.findings import archive_findings
from ckpt_tool.formats._torch_file.placed import Placed
from ckpt_tool.formats._torch_file.rank_names import RankFile, RankFileSet, find_sets, of_folder, rank_file
from ckpt_tool.formats._torch_file.reading import TorchFilesReader
from ckpt_tool.formats._torch_file.replicas import replica_findings
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.rank_pt.layout_entry import LAYOUT_KEY, LayoutEntry, parse_layout
from ckpt_tool.formats.rank_pt.shard_metadata import METADATA_KEY, ShardMetadata, parse_shard_metadata
from ckpt_tool.manifest.concatenate import names_of_ranks
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.flat_parameters import Vector
from ckpt_tool.manifest.model import FileRange, KeyPath, Manifest
from ckpt_tool.manifest.optimizer import optimizer_views
from ckpt_tool.sizes import counted

__all__ = ["READER", "RankFilesReader"]

_SHOWN = 8
_HOLDS_TENSORS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_PREFIXES: Mapping[str, KeyPath] = {"model": (), "optim": ("optim",), "extra_state": ("extra_state",)}


class RankFilesReader(TorchFilesReader):
    """Several torch.save files that differ in a rank number.

    Requests: ``read`` makes three per file (head, directory, ``data.pkl``), ``resolve`` one per file and the local
    headers of the rows asked for.
    """

    name = "torch-ranks"

    def probe(self, source: Source) -> Probe:
        """By names, and by the first bytes of the first such file."""
        entry = source.listing.entry
        if entry is not None:
            return Probe(0.0, "a single file; rank files are read together, from their folder")
        sets = find_sets(of_folder(source.listing.paths))
        if not sets:
            return Probe(0.0, "no file names with a rank number")
        best = sets[0]
        first = next((file.path for file in best.files if source.listing.nbytes(file.path)), None)
        if first is None or not is_torch_head(source.head(first, HEAD_NBYTES)):
            return Probe(0.0, f"{best.files[0].path} is named for a rank, but is no torch.save file")
        what = f"{len(best.files):,} torch.save files of {counted(best.world_size, 'rank')}"
        others = _without_rank(source)
        if others and all(file.kind == "extra_state" for file in best.files):
            return Probe(0.4, f"{what}, which hold a rank's own state beside {others[0]}")
        if best.is_stated:
            return Probe(0.95, what)
        return Probe(0.8 if len(best.files) > 1 else 0.6, what)

    def read(self, source: Source) -> Manifest:
        """See the class for its cost.

        Raises:
            NotFound: no rank files here.
        """
        sets = find_sets(of_folder(source.listing.paths))
        if not sets:
            raise NotFound("no files that differ in a rank number", where=source.listing.url)
        chosen = sets[0]
        opened = open_torch_files(source, [file.path for file in chosen.files])
        parts, entries, roots = [], [], []
        layouts: dict[str, LayoutEntry] = {}
        for file, torch_file in zip(chosen.files, opened, strict=True):
            found = _entries(file, torch_file, layouts)
            entries.append(found)
            parts.append(part_of(torch_file, found, file.rank, is_per_rank=file.kind == "extra_state"))
            roots.append(torch_file.root)
        assembly = assemble(parts, section_by_root(roots), _placed_by(layouts))
        recorded = _recorded(roots, chosen)
        chosen = _with_world_size(chosen, assembly, layouts, recorded)
        vectors = {} if recorded is None or chosen.missing else recorded.vectors_among(assembly.rows.metas)
        assembly.flat = [fqn for fqn in assembly.flat if fqn not in vectors]
        _add_notes(assembly, chosen, sets[1:], vectors)
        others = _without_rank(source)
        if others:
            listed = ", ".join(others[:_SHOWN]) + (" ..." if len(others) > _SHOWN else "")
            assembly.notes.append(f"left out, no rank is in the name, to be given by itself: {listed}")
        config, notes = read_config(source)
        assembly.notes.extend(notes)
        info = _info(chosen, assembly) | config
        manifest = manifest_of(self.name, source.listing.url, opened, entries, assembly, info)
        if recorded is not None and vectors:
            manifest = recorded.unflatten(manifest, vectors)
        return _with_parameter_names(_with_assumptions(manifest))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Missing files, flat parameters, and replicas that are none (their bytes are read where no CRC tells)."""
        for path in manifest.info.get("missing_files", ()):
            said = f"{path} is missing: its rank's boxes and replicas are not here"
            yield Finding("missing-file", Severity.ERROR, said, where=FileRange(path, 0, 0))
        for fqn in manifest.info.get("flat_parameters", ()):
            yield Finding("flat-parameter", Severity.WARNING, f"{fqn!r}: {_CANNOT_UNFLATTEN}", fqn=fqn)
        for path in manifest.info.get("stray_files", ()):
            said = f"{path} names a rank that another file has: left out, and left there by hand?"
            yield Finding("unknown-file", Severity.WARNING, said)
        apart = names_of_ranks(manifest.tensors.fqns) if manifest.info.get("kept_apart") else {}
        for fqn in manifest.info.get("kept_apart", ()):
            meta = manifest.tensor(next(iter(apart[fqn].values())))
            severity = Severity.WARNING if meta.section == "other" else Severity.ERROR
            message = f"{fqn!r}: same key, different shapes or types, no placement; each rank's tensor has its own name"
            yield Finding("different-shapes", severity, message, fqn=fqn)
        for mismatch in manifest.info.get("rank_mismatches", ()):
            message = f"{mismatch}, not the one of its name; the pickle's own coordinate is used"
            yield Finding("renamed-file", Severity.WARNING, message)
        yield from replica_findings(source, manifest, manifest.info.get("replicated_by_assumption", ()))
        yield from archive_findings(source, manifest)


def _without_rank(source: Source) -> list[str]:
    """Files at the top that may hold tensors and whose names tell no rank."""
    top = (path for path in source.listing.paths if "/" not in path and path.endswith(_HOLDS_TENSORS))
    return [path for path in top if rank_file(path) is None]


_CANNOT_UNFLATTEN = (
    "cannot unflatten: need the names and shapes of the parameters in it, in order, which FSDP1 does not save with "
    "LOCAL_STATE_DICT; export and reshard take them from a file (--flat)"
)


def _entries(file: RankFile, opened: TorchFile, layouts: dict[str, LayoutEntry]) -> Entries:
    """Entries of one file, under the prefix of its kind; a layout entry is taken out."""
    root = opened.root
    is_own = isinstance(root, dict) and LAYOUT_KEY in root
    if is_own:
        layouts[file.path] = parse_layout(root[LAYOUT_KEY], f"{file.path}: {LAYOUT_KEY}")
        root = {key: value for key, value in root.items() if key != LAYOUT_KEY}
    if is_own or (file.kind == "optim" and not (isinstance(root, Mapping) and "state" in root)):
        return entries_of(root)
    return entries_of(root, prefix=_PREFIXES[file.kind])


def _recorded(roots: Sequence[Any], chosen: RankFileSet) -> ShardMetadata | None:
    """What the first file that says it says of flat parameters."""
    for file, root in zip(chosen.files, roots, strict=True):
        if isinstance(root, Mapping) and METADATA_KEY in root:
            return parse_shard_metadata(root[METADATA_KEY], f"{file.path}: {METADATA_KEY}")
    return None


def _placed_by(layouts: Mapping[str, LayoutEntry]) -> PlacedBy:
    """Files with a layout entry are placed by it, others by what their tensors record."""

    def placed(part: Part, entry: Entry) -> list[tuple[str, KeyPath, Placed]] | None:
        layout = layouts.get(part.where)
        return by_itself(part, entry) if layout is None else layout.place(part, entry)

    return placed


def _with_world_size(
    chosen: RankFileSet, found: Assembly, layouts: Mapping[str, LayoutEntry], recorded: ShardMetadata | None
) -> RankFileSet:
    """The set with the world size that its contents tell, where its names tell none."""
    world_sizes = {layout.world_size for layout in layouts.values()}
    if len(world_sizes) > 1 or (chosen.is_stated and world_sizes - {chosen.world_size}):
        raise FormatError(
            f"files of {', '.join(map(str, sorted(world_sizes)))} ranks are mixed, the names say {chosen.world_size:,}",
            where=next(iter(layouts)),
        )
    if chosen.is_stated:
        return chosen
    mesh = prod(found.mesh.sizes) if found.mesh is not None else 0
    sharing = 0 if recorded is None else recorded.n_ranks(found.rows.metas)
    return replace(chosen, world_size=max(chosen.world_size, mesh, found.n_claiming_ranks, sharing, *world_sizes, 0))


def _add_notes(
    found: Assembly, chosen: RankFileSet, others: Sequence[RankFileSet], vectors: Mapping[str, Vector]
) -> None:
    """What a person should know about the set as a whole."""
    missing = chosen.missing
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (" ..." if len(missing) > _SHOWN else "")
        found.notes.append(f"{counted(len(missing), 'rank file', 'are')} missing: {shown}")
    if vectors:
        n_parameters = sum(len(vector.flat.segments) for vector in vectors.values())
        found.notes.append(
            f"{counted(len(vectors), 'flat parameter', 'are')} {counted(n_parameters, 'parameter')}, as "
            f"{METADATA_KEY!r} records"
        )
    if found.flat:
        found.notes.append(f"{counted(len(found.flat), 'flat parameter')} of FSDP1: {_CANNOT_UNFLATTEN}")
    if chosen.strays:
        listed = ", ".join(chosen.strays[:_SHOWN]) + (" ..." if len(chosen.strays) > _SHOWN else "")
        found.notes.append(f"left out, another file has their rank: {listed}")
    for other in others:
        found.notes.append(
            f"left out: {counted(len(other.files), 'file')} of {counted(other.world_size, 'rank')} "
            f"({other.files[0].path})"
        )
    found.notes += [f"{mismatch}, not the one of its name" for mismatch in found.rank_mismatches]


def _info(chosen: RankFileSet, found: Assembly) -> dict[str, Any]:
    lists = {
        "missing_files": list(chosen.missing),
        "stray_files": list(chosen.strays),
        "replicated_by_assumption": found.replicated,
        "kept_apart": found.kept_apart,
        "flat_parameters": found.flat,
        "rank_mismatches": found.rank_mismatches,
    }
    return {"world_size": chosen.world_size, **{key: names for key, names in lists.items() if names}}


def _with_assumptions(manifest: Manifest) -> Manifest:
    """Notes about tensors that record no placement, which are replicas or parts for all that the files tell."""
    notes = [*manifest.notes]
    replicated, apart = (manifest.info.get(key, ()) for key in ("replicated_by_assumption", "kept_apart"))
    if replicated:
        notes.append(
            f"{counted(len(replicated), 'tensor', 'record')} no placement, with one shape in all files: taken "
            'for replicas ("ckpt verify --full" compares their bytes)'
        )
    if apart:
        notes.append(
            f"{counted(len(apart), 'tensor', 'record')} no placement, in several shapes or types: "
            f"each rank's is called name@rankN ({', '.join(apart[:_SHOWN])})"
        )
    return manifest.replace(notes=tuple(notes))


def _with_parameter_names(manifest: Manifest) -> Manifest:
    """Records which model parameter each number of an optimizer file means, where that can be told."""
    for view in optimizer_views(manifest):
        if view.prefix == "optim" and view.spelling == "ids":
            note = f"optim: {view.evidence[-1]}"
            info = dict(manifest.info)
            if view.names:
                info["optimizer_parameters"] = {str(number): fqn for number, fqn in view.names.items()}
            return manifest.replace(info=info, notes=(*manifest.notes, note))
    return manifest


READER = RankFilesReader()
