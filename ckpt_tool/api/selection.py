"""Which tensors and objects of a source a command takes, and a reason for each that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.conversion import Dropped
from ckpt_tool.errors import CoverageError
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.select import select
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.manifest.tables import SECTIONS

__all__ = ["Selection", "select_tensors"]


@dataclass(frozen=True)
class Selection:
    """A resolved manifest of the chosen tensors only, and what was left out."""

    manifest: Manifest
    dropped: tuple[Dropped, ...]


def select_tensors(
    checkpoint: Checkpoint, *, include: Sequence[str], exclude: Sequence[str], sections: Sequence[str] | None
) -> Selection:
    """The tensors that fit, with exact payload positions.

    Args:
        checkpoint: the source.
        include: globs or ``re:`` patterns, all when empty.
        exclude: globs or ``re:`` patterns.
        sections: ``model``, ``optimizer``, ``other``; None for all.

    Raises:
        NotFound: nothing fits.
        CoverageError: files of the source are missing, so that tensors would be lost without a word.
    """
    manifest = checkpoint.manifest
    missing = manifest.info.get("missing_files") or ()
    if missing:
        named = ", ".join(str(path) for path in missing[:3])
        raise CoverageError(
            f"{len(missing):,} files are missing, and which tensors they held is not known: {named}",
            where=checkpoint.url,
            hint=f'fetch them; "ckpt verify {checkpoint.url}" lists all',
        )
    rows = select(manifest, include=include, exclude=exclude, sections=sections or ())
    chosen = set(rows.tolist())
    dropped = []
    for row in range(len(manifest.tensors)):
        if row not in chosen:
            section = SECTIONS[manifest.tensors.section[row]]
            why = f"{section} state" if sections is not None and section not in sections else "not selected"
            dropped.append(Dropped(manifest.tensors.fqns[row], why))
    resolved = checkpoint.resolve([manifest.tensors.fqns[row] for row in rows])
    return Selection(only_tensors(resolved, rows.tolist()), tuple(dropped))
