"""Which tensors and objects of a source a command takes, and a reason for each that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.conversion import Dropped
from ckpt_tool.errors import CoverageError, IntegrityError
from ckpt_tool.manifest.finding import Severity
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
    checkpoint: Checkpoint,
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    sections: Sequence[str] | None,
    unequal: Literal["first"] | None,
) -> Selection:
    """The tensors that fit, with exact payload positions.

    Args:
        checkpoint: the source.
        include: globs or ``re:`` patterns, all when empty.
        exclude: globs or ``re:`` patterns.
        sections: ``model``, ``optimizer``, ``other``; None for all.
        unequal: what to do with a tensor of which ranks hold different values, and nothing says what each is a part of:
            take the first rank's, or None to stop.

    Raises:
        NotFound: nothing fits.
        CoverageError: files of the source are missing, so that tensors would be lost without a word.
        IntegrityError: copies of a tensor differ.
    """
    manifest = checkpoint.manifest
    missing = manifest.info.get("missing_files") or ()
    if missing:
        named = ", ".join(str(path) for path in missing[:3])
        raise CoverageError(
            f"tensors of {len(missing):,} missing files would be lost: {named}",
            where=checkpoint.url,
            hint=f'fetch them; "ckpt verify {checkpoint.url}" lists all',
        )
    rows = select(manifest, include=include, exclude=exclude, sections=sections or ())
    chosen = set(rows.tolist())
    if unequal is None:
        _refuse_unequal(checkpoint, manifest, {manifest.tensors.fqns[row] for row in chosen})
    dropped = []
    for row in range(len(manifest.tensors)):
        if row not in chosen:
            section = SECTIONS[manifest.tensors.section[row]]
            why = f"{section} state" if sections is not None and section not in sections else "not selected"
            dropped.append(Dropped(manifest.tensors.fqns[row], why))
    resolved = checkpoint.resolve([manifest.tensors.fqns[row] for row in rows])
    return Selection(only_tensors(resolved, rows.tolist()), tuple(dropped))


def _refuse_unequal(checkpoint: Checkpoint, manifest: Manifest, fqns: set[str]) -> None:
    """Compares what is only taken for a replica; costs the files' checksums, or the bytes where none are recorded."""
    assumed = [fqn for fqn in manifest.info.get("replicated_by_assumption", ()) if fqn in fqns]
    if not assumed:
        return
    only = manifest.replace(info={"replicated_by_assumption": assumed})
    found = [
        finding
        for finding in checkpoint.reader.check(checkpoint.source, only)
        if finding.kind == "different-replicas" and finding.severity is Severity.ERROR
    ]
    if found:
        names = ", ".join(str(finding.fqn) for finding in found[:4]) + (" ..." if len(found) > 4 else "")
        raise IntegrityError(
            f"{len(found):,} tensors differ between ranks and nothing says how they join ({names}); {found[0].message}",
            where=checkpoint.url,
            hint=_hint(str(found[0].fqn), manifest),
        )


def _hint(fqn: str, manifest: Manifest) -> str:
    if fqn in manifest.info.get("flat_parameters", ()):
        return f"a flat parameter is another part of the model on each rank; leave it out with --exclude '{fqn}'"
    return f"take the first rank's with --unequal first, or leave it out with --exclude '{fqn}'"
