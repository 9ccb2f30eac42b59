"""Ranks keep copies of the same settings and counters: where these differ, files of two saves or two runs are mixed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckpt_tool.checks.extents import some_names
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.formats.base import Reader, Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Blob, Manifest

__all__ = ["disagreeing_ranks"]

_MAX_READ = 4096
_SETTING = re.compile(r"(?:.*\.)?param_groups?\.(?!.*params$).*")
_COUNTER = re.compile(r"(?:.*\.)?(?:step|global_steps?|iteration|epoch|_step_count|num_update_steps)")
_PLAIN = (bool, int, float, str, type(None))


def disagreeing_ranks(manifest: Manifest, reader: Reader, source: Source) -> Iterator[Finding]:
    """``mixed-steps`` where a counter differs between ranks, ``ranks-disagree`` where a hyperparameter does.

    Cost: that of ``load_blobs`` for such objects as several ranks have and that are not loaded yet.
    """
    rows_of: dict[str, list[int]] = {}
    for row, blob in enumerate(manifest.blobs):
        if blob.rank is not None and (_COUNTER.fullmatch(blob.fqn) or _SETTING.fullmatch(blob.fqn)):
            rows_of.setdefault(blob.fqn, []).append(row)
    rows_of = {fqn: rows for fqn, rows in rows_of.items() if len({manifest.blobs[r].rank for r in rows}) > 1}
    wanted = [row for rows in rows_of.values() for row in rows if not manifest.blobs[row].is_loaded]
    blobs = _loaded(manifest, wanted[:_MAX_READ], reader, source)
    disagreeing: dict[str, str] = {}
    for fqn, rows in rows_of.items():
        ranks: dict[str, list[int]] = {}
        for row in rows:
            blob = blobs[row]
            if blob.is_loaded and blob.rank is not None and _is_plain(blob.value):
                ranks.setdefault(repr(blob.value), []).append(blob.rank)
        if len(ranks) < 2:
            continue
        parts = [f"{value} on ranks {_listed(held)}" for value, held in sorted(ranks.items(), key=lambda i: i[1])]
        if _COUNTER.fullmatch(fqn):
            said = f"{fqn} is {'; '.join(parts)}: files of several saves are mixed"
            yield Finding("mixed-steps", Severity.WARNING, said, fqn)
        else:
            disagreeing[fqn] = "; ".join(parts)
    if disagreeing:
        first = next(iter(disagreeing))
        more = f"; so do {some_names(list(disagreeing)[1:])}" if len(disagreeing) > 1 else ""
        said = f"hyperparameters differ between ranks: {first} is {disagreeing[first]}{more}"
        yield Finding("ranks-disagree", Severity.WARNING, said, first)


def _loaded(manifest: Manifest, rows: list[int], reader: Reader, source: Source) -> tuple[Blob, ...]:
    """The objects, those of ``rows`` with their values as far as they can be read."""
    try:
        return reader.load_blobs(source, manifest, rows) if rows else manifest.blobs
    except StorageError:
        raise
    except CkptError:  # an object that cannot be read is the reader's own finding
        return manifest.blobs


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN)


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return f"{shown} and {len(ranks) - 8:,} more" if len(ranks) > 8 else shown
