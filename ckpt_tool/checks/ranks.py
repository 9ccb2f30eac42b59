"""Ranks keep copies of the same settings and counters: where these differ, files of two saves or two runs are mixed."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.formats._disagreeing import DISAGREEING, differing, disagreement_findings, is_told
from ckpt_tool.formats.base import Reader, Source
from ckpt_tool.manifest.finding import Finding
from ckpt_tool.manifest.model import Blob, Manifest

__all__ = ["disagreeing_ranks"]

_MAX_READ = 4096


def disagreeing_ranks(manifest: Manifest, reader: Reader, source: Source) -> Iterator[Finding]:
    """``mixed-steps`` where a counter differs between ranks, ``ranks-disagree`` where a hyperparameter does.

    Cost: that of ``load_blobs`` for such objects as several ranks have and that are not loaded yet.
    """
    known = manifest.info.get(DISAGREEING, {})
    rows_of: dict[str, list[int]] = {}
    for row, blob in enumerate(manifest.blobs):
        if blob.rank is not None and blob.fqn not in known and is_told(blob.fqn):
            rows_of.setdefault(blob.fqn, []).append(row)
    rows = [row for own in rows_of.values() if len({manifest.blobs[r].rank for r in own}) > 1 for row in own]
    wanted = [row for row in rows if not manifest.blobs[row].is_loaded]
    blobs = _loaded(manifest, wanted[:_MAX_READ], reader, source)
    several = [blobs[row] for row in rows]
    held = [(one.fqn, one.rank, one.value) for one in several if one.is_loaded and one.rank is not None]
    yield from disagreement_findings({**known, **differing(held)})


def _loaded(manifest: Manifest, rows: list[int], reader: Reader, source: Source) -> tuple[Blob, ...]:
    """The objects, those of ``rows`` with their values as far as they can be read."""
    try:
        return reader.load_blobs(source, manifest, rows) if rows else manifest.blobs
    except StorageError:
        raise
    except CkptError:  # an object that cannot be read is the reader's own finding
        return manifest.blobs
