"""safetensors files of ranks that say nothing of the mesh: each holds its rank's parts, under the same names.

vLLM's ``save_sharded_state`` writes ``model-rank-0-part-0.safetensors``, TensorRT-LLM ``rank0.safetensors``. As of
torch.save files of ranks, a tensor of one shape in all files is taken for a replica, which is noted as an assumption;
where shapes differ, each rank's tensor has its own name, ``name@rank3``. Rules can put parts together (``--unequal``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats._companions import read_companions
from ckpt_tool.formats._replicas import replica_findings
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats._safetensors.header import Header
from ckpt_tool.formats._safetensors.stored import (
    StoredBox,
    header_findings,
    header_notes,
    read_headers,
    tables,
    whole_box,
)
from ckpt_tool.formats._torch_file.rank_names import RankFileSet, find_sets
from ckpt_tool.formats.base import Probe, Source
from ckpt_tool.formats.safetensors.names import plain_paths
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.sizes import counted, some_of

__all__ = ["READER", "PlainRanksReader"]

_ASSUMED = "replicated_by_assumption"
_APART = "kept_apart"


class PlainRanksReader(ResolvedReader):
    """Reads a folder: one request per file, two for a long header, one for each companion."""

    name = "safetensors-ranks"

    def probe(self, source: Source) -> Probe:
        """By names."""
        if source.listing.entry is not None:
            return Probe(0.0, "a single file; files of ranks are read together, from their folder")
        found = _set(source)
        if found is None or len({file.rank for file in found.files}) < 2:
            return Probe(0.0, "no safetensors files whose names differ in a rank number")
        n_ranks = len({file.rank for file in found.files})
        return Probe(0.93, f"{counted(len(found.files), 'safetensors file')} of {counted(n_ranks, 'rank')}")

    def read(self, source: Source) -> Manifest:
        """The manifest; ``info`` lists what is taken for replicas, what is kept apart, and files of missing ranks.

        Raises:
            NotFound: no such files.
            FormatError: two files of one rank have the same tensor.
        """
        found = _set(source)
        if found is None:
            raise NotFound("no safetensors files that differ in a rank number", where=source.listing.url)
        paths = [file.path for file in found.files]
        headers = read_headers(source, paths)
        held = _held(found, headers)
        apart = [fqn for fqn, boxes in held.items() if len({(box.dtype, box.shape) for box in boxes.values()}) > 1]
        boxes = [
            box._replace(fqn=f"{fqn}@rank{rank}") if fqn in apart else box
            for fqn, of_ranks in held.items()
            for rank, box in of_ranks.items()
        ]
        tensors, chunks, files = tables(boxes, paths, source.listing)
        info, notes = read_companions(source)
        world_size = max(found.world_size, _recorded_world_size(info))
        missing = _missing(found, world_size)
        replicated = [fqn for fqn, of_ranks in held.items() if len(of_ranks) > 1 and fqn not in apart]
        lists = {_ASSUMED: replicated, _APART: apart, "missing_files": missing}
        info = {**info, "world_size": world_size, **{key: names for key, names in lists.items() if names}}
        said = [*header_notes(paths, headers), *notes, *_assumptions(replicated, apart)]
        if missing:
            said.append(f"{counted(len(missing), 'rank file', 'are')} missing: {some_of(missing, 8)}")
        return Manifest(self.name, source.listing.url, tensors, chunks, files, info=info, notes=tuple(said))

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Missing ranks, faults of headers, and replicas that are none: their bytes are read."""
        for path in manifest.info.get("missing_files", ()):
            said = f"{path} is missing: its rank's parts and replicas are not here"
            yield Finding("missing-file", Severity.ERROR, said, where=FileRange(path, 0, 0))
        paths = list(manifest.files.paths)
        yield from header_findings(paths, read_headers(source, paths))
        for fqn in manifest.info.get(_APART, ()):
            said = f"{fqn!r}: same key, different shapes or types, no placement; each rank's tensor has its own name"
            yield Finding("different-shapes", Severity.ERROR, said, fqn=fqn)
        rows = [manifest.tensors.index[fqn] for fqn in manifest.info.get(_ASSUMED, ()) if fqn in manifest.tensors.index]
        assumed = only_tensors(manifest, rows)
        yield from replica_findings(source, assumed, assumed.chunks)


def _set(source: Source) -> RankFileSet | None:
    """The files of ranks, all of them; None where the names of some tell no rank."""
    paths = plain_paths(source.listing)
    sets = find_sets(paths, is_safetensors=True)
    return sets[0] if sets and len(sets[0].files) + len(sets[0].strays) == len(paths) else None


def _held(found: RankFileSet, headers: Sequence[Header]) -> dict[str, dict[int, StoredBox]]:
    """What each rank has of each tensor, as a whole one of its own."""
    held: dict[str, dict[int, StoredBox]] = {}
    for number, (file, header) in enumerate(zip(found.files, headers, strict=True)):
        for entry in header.entries:
            box = whole_box(entry, header, number)._replace(rank=file.rank)
            before = held.setdefault(entry.name, {}).setdefault(file.rank, box)
            if before is not box:
                other = found.files[before.file].path
                raise FormatError(f"{entry.name!r} is in {other} too, of the same rank", where=file.path)
    return held


def _recorded_world_size(info: Mapping[str, Any]) -> int:
    """Ranks that TensorRT-LLM's config names; 0 where there is none."""
    config = info.get("config")
    mapping = config.get("mapping") if isinstance(config, Mapping) else None
    size = mapping.get("world_size") if isinstance(mapping, Mapping) else None
    return size if type(size) is int and 0 < size < 1 << 20 else 0


def _missing(found: RankFileSet, world_size: int) -> list[str]:
    """A file of each rank that has none; how many a rank has is its own affair."""
    first = found.files[0]
    absent = absent_numbers(sorted({file.rank for file in found.files}), world_size)
    return [first.family.replace("*", str(rank).zfill(len(first.digits)), 1) for rank in absent]


def _assumptions(replicated: Sequence[str], apart: Sequence[str]) -> Iterator[str]:
    if replicated:
        yield (
            f"{counted(len(replicated), 'tensor', 'record')} no placement, with one shape in all files: taken for "
            "replicas until their bytes are compared, which conversions do"
        )
    if apart:
        yield (
            f"{counted(len(apart), 'tensor', 'record')} no placement, in several shapes or types: each rank's is "
            f"called name@rankN ({some_of(apart, 8)})"
        )


READER = PlainRanksReader()
