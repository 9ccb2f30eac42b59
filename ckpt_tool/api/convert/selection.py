"""Which tensors and objects of a source a command takes, and a reason for each that it leaves."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.api.convert.unequal import apply_unequal, parse_unequal, settle_unequal
from ckpt_tool.checks.absent import absent_findings
from ckpt_tool.errors import CoverageError, Unsupported
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.missing import names_of_missing, needed_files, without_missing
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.select import OF_TYPES, matching, select, texts
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, shell_word, some_of
from ckpt_tool.storage.altered_names import under_other_names

__all__ = ["Selection", "no_tensors", "select_tensors", "unflattened"]

_MAX_LOOKED_INTO = 64
_MAX_LOOKED_INTO_NBYTES = 64 << 20
_GATHERED = ".param_state/shard_"
"""In the names of objects that are optimizer state: Megatron's buffers, gathered from the ranks that share them."""


@dataclass(frozen=True)
class Selection:
    """A resolved manifest of the chosen tensors only, and what was left out."""

    manifest: Manifest
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...] = ()
    objects: tuple[int, ...] = ()
    """Rows of the source's objects that are taken."""

    def load_objects(self, checkpoint: Checkpoint) -> tuple[Blob, ...]:
        """The objects that are taken, with their inert values; the others are not read."""
        blobs = checkpoint.load_blobs(self.objects)
        return tuple(blobs[row] for row in self.objects)

    def look_into_objects(self, checkpoint: Checkpoint) -> tuple[Blob, ...]:
        """The objects that are taken; where few are called like weights, those with their values, to see tensors."""
        blobs = checkpoint.manifest.blobs
        rows = [row for row in self.objects if section_of(blobs[row].path, blobs[row].fqn) == SECTIONS[0]]
        nbytes = sum(where.length for row in rows if (where := blobs[row].where) is not None)
        if rows and len(rows) <= _MAX_LOOKED_INTO and nbytes <= _MAX_LOOKED_INTO_NBYTES:
            blobs = checkpoint.load_blobs(rows)
        return tuple(blobs[row] for row in self.objects)


def no_tensors(blobs: Sequence[Blob], taken: Manifest) -> list[Dropped]:
    """A reason for each loaded object that a format of tensors alone leaves out, beside the tensors ``taken``.

    Raises:
        Unsupported: there are no tensors but those inside of objects.
    """
    from ckpt_tool.formats._pickle.walk import storages

    dropped = []
    for blob in blobs:
        held = len(storages(blob.value)) if blob.is_loaded else 0
        if held and not len(taken.tensors):
            raise Unsupported(
                f"the object {blob.fqn!r} holds {counted(held, 'tensor')}, which would be lost; there are no others",
                hint="save it flattened (flatten_state_dict=True of DCP), or choose --to dcp",
            )
        why = f"an object with {counted(held, 'tensor')} inside" if held else _why_no_tensor(blob)
        dropped.append(Dropped(blob.fqn, why))
    return dropped


def _why_no_tensor(blob: Blob) -> str:
    """Why a format of tensors alone leaves an object out; arrays of numpy may be weights that were saved as such."""
    is_array = getattr(blob.value, "ndim", 0) > 0
    return "an array of numpy, which torch.save keeps as an object" if is_array else "not a tensor"


def unflattened(checkpoint: Checkpoint, table: str | os.PathLike[str] | None) -> Checkpoint:
    """The checkpoint with parameters in place of flat ones, as the table at a path says; itself without one.

    Raises:
        CkptError: see ``flat.with_flat_table``.
    """
    if table is None:
        return checkpoint
    from ckpt_tool.api.convert.flat import with_flat_table  # few conversions have a table

    return with_flat_table(checkpoint, table)


def select_tensors(
    checkpoint: Checkpoint,
    *,
    include: str | Sequence[str],
    exclude: str | Sequence[str],
    sections: str | Sequence[str] | None,
    unequal: str | Sequence[str] | None,
) -> Selection:
    """The tensors that fit, with exact payload positions, and the objects that go along.

    Those are all that ``exclude`` does not name, but for objects that are state of tensors themselves, which must fit.

    Args:
        checkpoint: the source.
        include: globs or ``re:`` patterns of tensors, all when empty.
        exclude: globs or ``re:`` patterns of tensors and objects.
        sections: ``model``, ``optimizer``, ``other``; None for all.
        unequal: rules for tensors of which ranks hold different values, and nothing says what each is a part of:
            ``first`` takes the first rank's, ``concat:0`` puts them one behind another along a dimension, ``rules``
            as the rules of the model's family cut them, ``rules:FILE`` as those of a file, each also for some names
            only (``GLOB=concat:0``); None to stop.

    Raises:
        NotFound: nothing matches.
        CoverageError: files of the source are missing, so that tensors would be lost without a word.
        IntegrityError: copies of a tensor differ, and no rule says what to do.
        UsageError: a rule that cannot be read, or does not fit what ranks hold.
    """
    include, exclude = texts(include), texts(exclude)
    sections = None if sections is None else texts(sections)
    manifest = checkpoint.manifest
    missing = needed_files(manifest, include=include, exclude=exclude, sections=sections)
    if missing:
        lost = [fqn for names in missing.values() for fqn in names]
        is_known = all(missing.values())
        others = under_other_names(missing, checkpoint.source.listing.sizes, manifest.files.paths)
        fetch = f"{next(iter(others.values())).said}; else fetch them" if others else "fetch them"
        raise CoverageError(
            f"tensors of {counted(len(missing), 'missing file')} would be lost: {some_of(list(missing))}"
            + (f"; {'' if is_known else 'among them '}{some_of(lost)}" if lost else ""),
            where=checkpoint.url,
            hint=(
                f'{fetch}; "ckpt verify {shell_word(checkpoint.url)}" lists all, and with --salvage OUT it keeps '
                f"what is left{'; what is left out with --exclude is not missed' if is_known else ''}"
            ),
        )
    left_out = {pattern: _objects_that_fit(manifest, pattern) for pattern in exclude}
    absent = names_of_missing(manifest)
    of_tensors = [
        pattern
        for pattern in exclude
        if _fits_a_tensor(manifest, pattern) or not (left_out[pattern] or matching(pattern, absent))
    ]
    rows = select(manifest, include=include, exclude=of_tensors, sections=sections or ())
    chosen = set(rows.tolist())
    fqns = [manifest.tensors.fqns[row] for row in rows]
    settled = settle_unequal(checkpoint, fqns, parse_unequal(unequal))
    dropped = []
    for row in range(len(manifest.tensors)):
        if row not in chosen:
            section = SECTIONS[manifest.tensors.section[row]]
            why = f"{section} state" if sections is not None and section not in sections else "not selected"
            dropped.append(Dropped(manifest.tensors.fqns[row], why))
    gone = set().union(*left_out.values())
    if include:
        gone |= _unfit_state(manifest, include)
    dropped += [Dropped(fqn, "not selected") for fqn in dict.fromkeys(manifest.blobs[row].fqn for row in sorted(gone))]
    objects = tuple(row for row in range(len(manifest.blobs)) if row not in gone)
    taken, notes = apply_unequal(only_tensors(checkpoint.resolve(fqns), rows.tolist()), settled)
    notes += _absent(taken, checkpoint.url)
    if unneeded := manifest.info.get("missing_files"):
        said = f"{counted(len(unneeded), 'missing file')} held nothing of what was asked for"
        notes += (f"{said}: {some_of(unneeded)}",)
        taken = without_missing(taken)
    return Selection(taken, tuple(dropped), notes, objects)


def _absent(taken: Manifest, url: str) -> tuple[str, ...]:
    """Notes on weights that have a name and no elements.

    Raises:
        CoverageError: all that were taken are such, so that a copy of them would be a model without weights.
    """
    notes = []
    for finding in absent_findings(taken):
        if finding.severity is Severity.ERROR:
            hint = "gather them when they are saved: stage3_gather_16bit_weights_on_model_save"
            raise CoverageError(finding.message, where=url, hint=hint)
        notes.append(finding.message)
    return tuple(notes)


def _objects_that_fit(manifest: Manifest, pattern: str) -> set[int]:
    if pattern.startswith(OF_TYPES):
        return set()
    return set(matching(pattern, [blob.fqn for blob in manifest.blobs]))


def _fits_a_tensor(manifest: Manifest, pattern: str) -> bool:
    return bool(matching(pattern, manifest.tensors.fqns))


def _unfit_state(manifest: Manifest, include: Sequence[str]) -> set[int]:
    """Objects that are state themselves and that no pattern fits."""
    state = {row for row, blob in enumerate(manifest.blobs) if _GATHERED in blob.fqn}
    return state.difference(*(_objects_that_fit(manifest, pattern) for pattern in include))
