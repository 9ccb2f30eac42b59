"""What can be wrong between the files of a DCP checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckpt_tool.formats._dcp.checks import file_findings, item_of
from ckpt_tool.formats._dcp.metadata import rank_metadata
from ckpt_tool.formats._dcp.table import rank_of
from ckpt_tool.formats._replicas import COPIES
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.dcp.copies import copy_findings
from ckpt_tool.formats.dcp.probe import metadata_paths
from ckpt_tool.formats.dcp.resolve import located_items
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest

__all__ = ["check", "metadata_findings"]

_NAMES_SHOWN = 20
_MEGATRON_COMMON, _MEGATRON_CONFIG = "common.pt", "metadata.json"
_MEGATRON_STATE = "common_state/shard_"
"""What newer ones have in place of ``common.pt``."""


def check(source: Source, manifest: Manifest) -> Iterator[Finding]:
    """Findings, the cheap ones first.

    Without a request: ``missing-file`` (with the tensors in it), ``cut-file``, ``unknown-file``, ``missing-metadata``.
    With the head of every item (requests as for ``resolve``): ``item-mismatch``. Where all items are sound, with what
    `copy_findings` costs: ``different-replicas``.
    """
    yield from file_findings(source, manifest)
    yield from metadata_findings(source, manifest)
    is_sound = True
    for located in located_items(source, manifest, np.arange(len(manifest.chunks), dtype=np.int64)):
        where = item_of(manifest, located.row)
        nbytes = source.listing.sizes.get(where.path)
        is_sound &= located.error is None and nbytes is not None
        if located.error is not None and nbytes is not None and where.end <= nbytes:
            fqn = manifest.tensors.fqns[manifest.chunks.tensor[located.row]]
            yield Finding("item-mismatch", Severity.ERROR, str(located.error), fqn, where)
    if is_sound:
        yield from copy_findings(source, manifest, manifest.info.get(COPIES, ()))


def metadata_findings(source: Source, manifest: Manifest) -> Iterator[Finding]:
    """Holes in the ranks of a checkpoint that has one metadata file per rank; what Megatron's lacks."""
    common = _MEGATRON_COMMON if _MEGATRON_COMMON in source.listing else None
    common = common or next((b.fqn for b in manifest.blobs if b.fqn.startswith(_MEGATRON_STATE)), None)
    if common is not None and _MEGATRON_CONFIG not in source.listing:
        said = f"{_MEGATRON_CONFIG} is missing beside {common}: Megatron writes it last and needs it to load"
        yield Finding("missing-metadata", Severity.ERROR, said, where=FileRange(_MEGATRON_CONFIG, 0, 0))
    ranks = {rank for path in metadata_paths(source) if (rank := rank_metadata(path)) is not None}
    writers = {rank_of(path) for path in source.listing.paths if source.listing.nbytes(path)} if ranks else set()
    for rank in absent_numbers(ranks, max(ranks | writers, default=-1) + 1, at_most=_NAMES_SHOWN):
        yield Finding(
            "missing-metadata",
            Severity.ERROR,
            f"__{rank}.metadata is missing: what rank {rank} wrote is unknown",
            where=FileRange(f"__{rank}.metadata", 0, 0),
        )
