"""Which tensors and objects of a source a command takes, and a reason for each that it leaves."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.api.convert.unequal import apply_unequal, parse_unequal, settle_unequal
from ckpt_tool.errors import CoverageError
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.select import matching, select
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.records import dataclass

__all__ = ["Selection", "select_objects", "select_tensors"]

_GATHERED = ".param_state/shard_"
"""In the names of objects that are optimizer state: Megatron's buffers, gathered from the ranks that share them."""


@dataclass(frozen=True)
class Selection:
    """A resolved manifest of the chosen tensors only, and what was left out."""

    manifest: Manifest
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...] = ()


def select_tensors(
    checkpoint: Checkpoint,
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    sections: Sequence[str] | None,
    unequal: str | Sequence[str] | None,
) -> Selection:
    """The tensors that fit, with exact payload positions.

    Args:
        checkpoint: the source.
        include: globs or ``re:`` patterns, all when empty.
        exclude: globs or ``re:`` patterns.
        sections: ``model``, ``optimizer``, ``other``; None for all.
        unequal: rules for tensors of which ranks hold different values, and nothing says what each is a part of:
            ``first`` takes the first rank's, ``concat:0`` puts them one behind another along a dimension, both also
            for some names only (``GLOB=concat:0``); None to stop.

    Raises:
        NotFound: nothing fits.
        CoverageError: files of the source are missing, so that tensors would be lost without a word.
        IntegrityError: copies of a tensor differ, and no rule says what to do.
        UsageError: a rule that cannot be read, or does not fit what ranks hold.
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
    fqns = [manifest.tensors.fqns[row] for row in rows]
    dims = settle_unequal(checkpoint, fqns, parse_unequal(unequal))
    dropped = []
    for row in range(len(manifest.tensors)):
        if row not in chosen:
            section = SECTIONS[manifest.tensors.section[row]]
            why = f"{section} state" if sections is not None and section not in sections else "not selected"
            dropped.append(Dropped(manifest.tensors.fqns[row], why))
    taken, notes = apply_unequal(only_tensors(checkpoint.resolve(fqns), rows.tolist()), dims)
    return Selection(taken, tuple(dropped), notes)


def select_objects(
    blobs: Sequence[Blob], *, include: Sequence[str], exclude: Sequence[str]
) -> tuple[tuple[Blob, ...], tuple[Dropped, ...]]:
    """Objects that go along with the tensors that fit: all but those that are state themselves, and do not fit."""
    names = [blob.fqn for blob in blobs if _GATHERED in blob.fqn]
    fitting = {names[at] for pattern in include for at in matching(pattern, names)} if include else set(names)
    fitting -= {names[at] for pattern in exclude for at in matching(pattern, names)}
    left = [name for name in names if name not in fitting]
    return (
        tuple(blob for blob in blobs if blob.fqn not in left),
        tuple(Dropped(name, "not selected") for name in left),
    )
