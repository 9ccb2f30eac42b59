"""The reader of DCP checkpoints: ``.metadata`` becomes a manifest whose chunks name items, until they are resolved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ckpt_tool.errors import NotFound
from ckpt_tool.formats._collector import collector_paused
from ckpt_tool.formats._companions import read_config
from ckpt_tool.formats._dcp.metadata import METADATA_NAME, load_metadata, rank_metadata
from ckpt_tool.formats._dcp.table import Tables, rank_of, tabulate
from ckpt_tool.formats._replicas import COPIES
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.formats.dcp import probe, resolve
from ckpt_tool.formats.dcp.sidecar import SIDECAR_NAME, Facts, Sidecar, read_sidecar
from ckpt_tool.geometry.absent import absent_places
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.tables import ChunkTable, IntArray
from ckpt_tool.sizes import counted

__all__ = ["READER", "DcpReader"]

# Where training loops keep the step, first match first.
_STEP_FQNS = ("train_state.step", "trainer.global_step", "state.step", "global_step", "step", "iteration")


class DcpReader:
    """``torch.distributed.checkpoint``, as torch 2.1 and later write it."""

    name = "dcp"

    def probe(self, source: Source) -> Probe:
        """At most one request; see ``probe.probe``."""
        return probe.probe(source)

    def read(self, source: Source) -> Manifest:
        """The manifest, every chunk unresolved: one request per metadata file.

        Raises:
            NotFound: no metadata file at the top.
            FormatError: it is damaged or contradicts itself.
        """
        paths = probe.metadata_paths(source)
        if not paths:
            raise NotFound(f"no {METADATA_NAME}", where=source.listing.url, hint="the save may not have finished")
        sidecar = read_sidecar(source)
        if isinstance(sidecar, Sidecar):
            source.remembered[SIDECAR_NAME] = sidecar
            return self._manifest(source, paths, sidecar.tables, sidecar.facts, ())
        with collector_paused():
            tables, facts = _parsed(source, paths)
        return self._manifest(source, paths, tables, facts, () if sidecar is None else (sidecar,))

    def _manifest(
        self, source: Source, paths: Sequence[str], tables: Tables, facts: Facts, notes: Sequence[str]
    ) -> Manifest:
        config, config_notes = read_config(source)
        return Manifest(
            format=self.name,
            root=source.listing.url,
            tensors=tables.tensors,
            chunks=tables.chunks,
            files=tables.files,
            blobs=tables.blobs,
            info=_info(source, paths, tables, facts) | config,
            notes=(*_notes(paths, tables), *notes, *config_notes),
            items=tables.items,
        )

    def resolve(self, source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
        """Exact places of the chunks ``rows``; one request per row at most, see ``resolve.resolve``.

        None at all where a sidecar knows them.
        """
        sidecar = source.remembered.get(SIDECAR_NAME)
        if isinstance(sidecar, Sidecar):
            chunks = resolve.resolve_by_sidecar(sidecar, manifest, rows)
            if chunks is not None:
                return chunks
        return resolve.resolve(source, manifest, rows)

    def load_blobs(self, source: Source, manifest: Manifest, rows: Sequence[int]) -> tuple[Blob, ...]:
        """All objects, those of ``rows`` loaded; one request per object at most, neighbours share one."""
        from ckpt_tool.formats._dcp import objects  # many checkpoints have none

        return objects.load_blobs(source, manifest, rows)

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
        """CRC-32 of each tensor's storage and of each member of an object, as the zips record them."""
        from ckpt_tool.formats._dcp.checks import checksums  # for verify alone

        return checksums(source, manifest)

    def check(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Files that are missing, cut or unknown, and items that are not what the metadata says; reads every head."""
        from ckpt_tool.formats.dcp import checks  # for verify alone

        return checks.check(source, manifest)

    def check_metadata(self, source: Source, manifest: Manifest) -> Iterator[Finding]:
        """Metadata files that are not here; no request."""
        from ckpt_tool.formats.dcp import checks  # for verify alone

        return checks.metadata_findings(source, manifest)


READER = DcpReader()


def _parsed(source: Source, paths: Sequence[str]) -> tuple[Tables, Facts]:
    """By itself, so that the pickle's records are gone before the collector could look at them."""
    parts = [load_metadata(content, path) for content, path in zip(source.read_wholes(paths), paths, strict=True)]
    facts = Facts(parts[0].version, parts[0].save_id, parts[0].is_flattened)
    return tabulate(parts, source.listing.sizes), facts


def _info(source: Source, paths: Sequence[str], tables: Tables, facts: Facts) -> dict[str, Any]:
    """What the metadata says beyond tensors."""
    ranks = [rank_of(path) for path in source.listing.sizes]
    ranks += [rank for path in source.listing.sizes if (rank := rank_metadata(path)) is not None]
    names = {blob.fqn for blob in tables.blobs} | set(tables.tensors.fqns)
    known = {
        "version": facts.version,
        "save_id": facts.save_id,
        "world_size": max(ranks, default=-1) + 1 or None,
        "is_flattened": facts.is_flattened,
        "step_fqn": next((fqn for fqn in _STEP_FQNS if fqn in names), None),
        "n_empty_chunks": sum(tables.empty.values()) or None,
        "n_metadata_files": len(paths) if paths[0] != METADATA_NAME else None,
        COPIES: _copies(tables) if paths[0] != METADATA_NAME else None,
    }
    return {key: value for key, value in known.items() if value is not None}


def _copies(tables: Tables) -> list[str] | None:
    """Tensors of which several ranks stored one box, which nobody compared when they were saved."""
    chunks = tables.chunks
    first = exact_duplicates(chunks.offsets, chunks.sizes, chunks.tensor.astype(np.int64))
    rows = distinct(chunks.tensor[first != np.arange(len(first))].astype(np.int64))
    return [tables.tensors.fqns[row] for row in rows] or None


def _notes(paths: Sequence[str], tables: Tables) -> Iterator[str]:
    """What a person should know."""
    if tables.empty:
        by_rank = ", ".join(f"rank {rank}: {n:,}" if rank >= 0 else f"{n:,}" for rank, n in tables.empty.items())
        n_empty = sum(tables.empty.values())
        what = (
            "1 chunk holds no element and is"
            if n_empty == 1
            else f"{counted(n_empty, 'chunk', 'hold')} no element and are"
        )
        yield f"{what} left out ({by_rank})"
    if paths[0] != METADATA_NAME:
        ranks = [rank_metadata(path) or 0 for path in paths]
        absent = absent_places([(rank,) for rank in ranks], (max(ranks) + 1,), at_most=10)
        yield (
            f"saved without collectives: the union of {counted(len(paths), 'metadata file')}, ranks 0 to "
            f"{max(ranks):,}; the absence of higher ranks cannot be noticed"
        )
        if absent.n:
            shown = ", ".join(str(rank) for (rank,) in absent.first)
            yield f"metadata of {counted(absent.n, 'rank')} is missing: {shown}"
    transformed = sum(entry.codec is not None for entry in tables.files)
    if transformed:
        yield f"{counted(transformed, 'chunk', 'are')} compressed: each is decoded whole"
