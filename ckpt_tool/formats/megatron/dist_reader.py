"""The reader of mcore's ``torch_dist`` checkpoints, 0.8 to 0.19: DCP with keys of its own, and objects in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_tool.errors import FormatError, LayoutError, NotFound
from ckpt_tool.formats._dcp import checks, objects
from ckpt_tool.formats._dcp.metadata import METADATA_NAME, load_metadata
from ckpt_tool.formats._dcp.table import tabulate
from ckpt_tool.formats._torch_file import headers
from ckpt_tool.formats._torch_file.rows import Rows
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.formats.megatron import resolve
from ckpt_tool.formats.megatron.common_state import (
    COMMON_FILE,
    COMMON_OBJECT,
    Common,
    common_checksums,
    common_findings,
    read_common,
)
from ckpt_tool.formats.megatron.config import CONFIG_NAME, sharded_config
from ckpt_tool.formats.megatron.dist_tables import Named, named_tables
from ckpt_tool.formats.megatron.facts import Facts
from ckpt_tool.formats.megatron.flattened import shapes_before
from ckpt_tool.formats.megatron.gathered import add_gathered, gathered_group
from ckpt_tool.formats.megatron.joined import joined, with_folder
from ckpt_tool.formats.megatron.keys import named
from ckpt_tool.formats.megatron.location import TRACKER, Location, locate, within
from ckpt_tool.formats.megatron.run_config import facts_beside
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Blob, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, IntArray
from ckpt_tool.sizes import counted, counted_of
from ckpt_tool.storage.virtual.subfolder import places_below

__all__ = ["READER", "MegatronDistReader"]

_LIST = (0,)
"""Where an object is in the list that mcore wraps around it."""


class MegatronDistReader:
    """``torch_dist``; the run's folder with its tracker, or one iteration's."""

    name = "megatron-dist"

    def probe(self, source: Source) -> Probe:
        """By file names and the first bytes of ``metadata.json``; one request for it, one for a tracker."""
        if source.listing.entry == TRACKER:
            return Probe(0.3, f"{TRACKER} names the iteration to read of a run: name the run's folder instead")
        try:
            location = locate(source, _is_complete, _is_ours)
        except (FormatError, NotFound) as error:
            return Probe(0.95, str(error))
        if location is None:
            return Probe(0.0, f"no {CONFIG_NAME} beside {METADATA_NAME}, here or in an iteration's folder")
        backend = sharded_config(within(source, location.folder)).get("sharded_backend")
        if backend != "torch_dist":
            return Probe(0.0, f"{CONFIG_NAME} says sharded_backend {backend!r}, not 'torch_dist'")
        return Probe(0.98, f"{CONFIG_NAME} says sharded_backend 'torch_dist'")

    def read(self, source: Source) -> Manifest:
        """The manifest; chunks of ``.distcp`` files are unresolved.

        Requests: the tracker where there is one, ``metadata.json``, ``.metadata``, and the common state (one for the
        object, three for ``common.pt``).

        Raises:
            NotFound: nothing complete here; the message lists what is.
            FormatError: a file is damaged or contradicts itself.
        """
        location = locate(source, _is_complete, _is_ours)
        if location is None:
            raise NotFound(f"no {CONFIG_NAME} beside {METADATA_NAME}", where=source.listing.url)
        with places_below(location.folder):
            return self._read(source, location)

    def _read(self, source: Source, location: Location) -> Manifest:
        inner = within(source, location.folder)
        metadata = load_metadata(inner.read_whole(METADATA_NAME), METADATA_NAME)
        tables = tabulate([metadata], inner.listing.sizes)
        common = read_common(inner, tables.blobs)
        beside = facts_beside(source, location.folder)
        has_settings = beside is not None and common.root.get("args") is None
        facts = beside[0] if beside is not None and has_settings else common.facts
        ranks = int(tables.chunks.rank.max(initial=-1)) + 1
        world_size = facts.world_size or _world_size(facts, ranks)
        shapes = shapes_before(metadata.extra.get("mcore_data"))
        found = named_tables(tables.tensors, tables.chunks, shapes, facts, world_size)
        gathered, objects_left = _gathered(inner, found, tables.blobs)
        bulk = joined((found.tensors, found.chunks, tables.files), gathered.tables())
        tensors, chunks, files = joined(bulk, common.assembly.rows.tables())
        kept = [blob for blob in objects_left if blob.fqn != COMMON_OBJECT]
        blobs = [_renamed(blob, found.prefix, location.folder) for blob in kept] + common.assembly.blobs
        return Manifest(
            format=self.name,
            root=source.listing.url,
            tensors=tensors,
            chunks=chunks,
            files=with_folder(files, location.folder),
            blobs=tuple(blobs),
            mesh=facts.mesh(beside[1]) if beside is not None and has_settings else facts.mesh(),
            info=_info(location, common, facts, found, world_size, sharded_config(inner)),
            notes=tuple(_notes(source, location, common, found, None if beside is None else beside[1])),
            items=tables.items.with_chunks(tables.chunks).with_ranges(
                [blob.where for blob in tables.blobs if blob.where is not None], tables.files
            ),
        )

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """Exact places of the chunks ``rows``; one request per item at most, see ``resolve.resolve``."""
        rows = np.asarray(rows, dtype=np.int64)
        is_common = _is_in(manifest, COMMON_FILE)[manifest.chunks.file[rows]]
        chunks = headers.resolve(source, manifest, rows[is_common])
        return resolve.resolve(source, manifest.replace(chunks=chunks), rows[~is_common])

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """All objects, those of ``rows`` loaded, out of the list that mcore wraps around each."""
        before = manifest.blobs
        loaded = objects.load_blobs(source, manifest, rows)
        return tuple(
            _taken_out(new) if new.is_loaded and not old.is_loaded else new
            for old, new in zip(before, loaded, strict=True)
        )

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """CRC-32 of each tensor's storage and of each object's members, as the zips record them."""
        yield from checks.checksums(source, _distcp_only(manifest))
        yield from common_checksums(source, manifest)

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Files that are missing, cut or unknown, items unlike the metadata, and what Megatron would miss."""
        distcp = _distcp_only(manifest)
        yield from checks.file_findings(source, manifest)
        items = resolve.located_items(source, distcp, np.arange(len(distcp.chunks), dtype=np.int64))
        for located in items:
            nbytes = source.listing.sizes.get(located.item.path)
            if located.error is not None and nbytes is not None and located.item.end <= nbytes:
                fqn = distcp.tensors.fqns[distcp.chunks.tensor[located.rows[0]]]
                yield Finding("item-mismatch", Severity.ERROR, str(located.error), fqn, located.item)
        yield from self.check_metadata(source, manifest)

    def check_metadata(self, source: Source, manifest: Manifest) -> Iterator[Finding]:  # noqa: ARG002 - as others have it
        """What Megatron would miss."""
        yield from common_findings(manifest)
        yield from _megatron_findings(manifest)


READER = MegatronDistReader()


def _is_complete(names: Iterable[str]) -> bool:
    """Whether an iteration's folder has both files that are written last."""
    return {CONFIG_NAME, METADATA_NAME} <= set(names)


def _is_ours(path: str) -> bool:
    """Whether a file is one of such a checkpoint, complete or not."""
    return path.endswith(".distcp")


def _world_size(facts: Facts, n_ranks_seen: int) -> int | None:
    """Ranks of a run whose arguments do not say; with one stage as many as wrote files, which then decides nothing."""
    if facts.tp and facts.pp and facts.data_parallel_size:
        return facts.tp * facts.pp * facts.data_parallel_size * (facts.context_parallel_size or 1)
    return n_ranks_seen if facts.pp == 1 and n_ranks_seen else None


def _gathered(source: Source, found: Named, blobs: Sequence[Blob]) -> tuple[Rows, Sequence[Blob]]:
    """State that lies in objects as rows, and the objects that are left; all of them where a fact is missing."""
    rows = Rows()
    if not any(gathered_group(blob.fqn) for blob in blobs):
        return rows, blobs
    found.form = "dp_zero_gather_scatter"
    try:
        found.notes += add_gathered(rows, source, found.shards, blobs)
    except LayoutError as error:
        found.undecoded = error.message
        found.notes.append(f"the optimizer's state is left in its objects: {error.message}")
        return Rows(), blobs
    return rows, [blob for blob in blobs if gathered_group(blob.fqn) is None]


def _renamed(blob: Blob, prefix: str, folder: str) -> Blob:
    """An object under its name here, in its place below the source's root."""
    fqn, path = named(blob.fqn, prefix)
    where = blob.where
    if where is not None and folder:
        where = FileRange(f"{folder}/{where.path}", where.offset, where.length)
    return replace(blob, fqn=fqn, path=path, where=where, within=_LIST)


def _taken_out(blob: Blob) -> Blob:
    """An object out of its list, where it is in one."""
    is_listed = isinstance(blob.value, list) and len(blob.value) == 1
    return replace(blob, value=blob.value[0]) if is_listed else replace(blob, within=())


def _info(
    location: Location,
    common: Common,
    facts: Facts,
    found: Named,
    world_size: int | None,
    config: Mapping[str, Any],
) -> dict[str, Any]:
    """What is known beyond tensors."""
    known = {
        "step": location.number if common.iteration is None else common.iteration,
        "world_size": world_size,
        "folder": location.folder or None,
        "optimizer_form": found.form,
        "sharding_type": common.sharding_type,
        "optimizer_undecoded": found.undecoded,
        "layer_stages": found.stages or None,
        "args": facts.described() or None,
        "common_state": common.where or None,
        "key_prefix": found.prefix or None,
        "int_keyed_dicts": list(common.int_keyed) or None,
        "metadata_json": dict(config) or None,
    }
    return {key: value for key, value in known.items() if value is not None}


def _notes(source: Source, location: Location, common: Common, found: Named, beside: str | None) -> Iterator[str]:
    """What a person should know."""
    yield from location.notes
    if beside is not None:
        says = "tells the sizes of the run" if common.root.get("args") is None else "lies there too"
        yield f"{beside} {says}"
    if found.prefix:
        yield f"keys begin with {found.prefix!r}, which is left out of names"
    yield from found.notes
    yield from common.notes(source.listing.url, location.folder)


def _is_in(manifest: Manifest, name: str) -> Any:
    """bool[n_files]: whether each file is called ``name``."""
    return np.array([path.rpartition("/")[2] == name for path in manifest.files.paths], dtype=np.bool_)


def _distcp_only(manifest: Manifest) -> Manifest:
    """The manifest without chunks that lie elsewhere than in items of their own."""
    kept = (manifest.chunks.flags & ChunkFlag.UNRESOLVED) != 0
    if len(kept):
        kept &= ~_is_in(manifest, COMMON_FILE)[manifest.chunks.file]
    return manifest.replace(chunks=manifest.chunks.take(np.flatnonzero(kept)))


def _megatron_findings(manifest: Manifest) -> Iterator[Finding]:
    """What Megatron would not load, or not resume from."""
    undecoded = manifest.info.get("optimizer_undecoded")
    if undecoded:
        yield Finding(
            "optimizer-undecoded", Severity.WARNING, f"the optimizer's buckets cannot be resharded: {undecoded}"
        )
    objects_of: dict[str, int] = {}
    for blob in manifest.blobs:
        key, separator, _ = blob.fqn.rpartition("/shard_")
        if separator:
            objects_of[key] = objects_of.get(key, 0) + 1
    linear = [
        meta.fqn.removesuffix(".weight")
        for meta in manifest.tensors
        if meta.section == "model" and meta.fqn.startswith("model.decoder.") and _is_linear(meta.fqn)
    ]
    without = [module for module in linear if f"{module}._extra_state" not in objects_of]
    if without:
        yield Finding(
            "missing-extra-state",
            Severity.WARNING,
            f"{counted_of(len(without), len(linear), 'module', 'have')} no _extra_state objects, such as "
            f"{without[0]!r}: "
            'Megatron\'s strict loading stops at them with "Missing key"',
            fqn=f"{without[0]}.weight",
        )
    mesh = manifest.info.get("args", {})
    grid = mesh.get("pipeline_model_parallel_size", 0) * mesh.get("tensor_model_parallel_size", 0)
    n_rng = objects_of.get("rng_state", 0)
    if grid and n_rng != grid and not (mesh.get("no_save_rng") and not n_rng):
        yield Finding(
            "rng-grid",
            Severity.WARNING,
            f"{counted(n_rng, 'random state')}, expected {grid:,} (pipeline times tensor parallel): Megatron resumes "
            "only with --no-load-rng, or on another grid",
        )


def _is_linear(fqn: str) -> bool:
    module = fqn.rsplit(".", 2)
    return module[-1] == "weight" and module[1].startswith("linear_")
