"""A checkpoint of a family that is known, shown under the names of transformers, so that it meets what has these.

The same views that an export writes: fused tensors apart, stacks as layers, rows of padding left out. What has no name
there keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.hf_names import HfNames, apply_naming, facts_of, naming_of, of_model
from ckpt_tool.api.convert.names import module_names
from ckpt_tool.api.convert.names_options import NamesOptions, check_used
from ckpt_tool.api.convert.published import is_in_one, published_names
from ckpt_tool.api.convert.weight_states import check_is_decoded, state_views, states_of, torch_state
from ckpt_tool.api.trust.template import is_template
from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.layout.naming_match import NamingMatch, matches_of
from ckpt_tool.layout.views import apply_views
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.sizes import counted

__all__ = ["under_hf_names"]

_LABELS = "AB"


def under_hf_names(
    sides: Sequence[Checkpoint | None], options: NamesOptions, *, with_optimizer: bool
) -> tuple[dict[int, Checkpoint], tuple[str, ...]]:
    """The sides (0 and 1) that have names of transformers now, and what was done for it.

    A side that a naming fits is shown through views, the other one stays as it is. Numbers that names need and a side
    does not record are taken from what the other one records of the same model.
    Cost: headers of the tensors, and rows of the vocabulary that may be padding.

    Args:
        sides: A and B; None for one of which only digests are known.
        options: what the user says.
        with_optimizer: the state of each weight goes through the views of the weight.

    Raises:
        UsageError: no naming fits either side, or none is called as the user says.
        LayoutError: see ``layout.naming``; a fact that is missing or contradicts a shape.
    """
    live = [side is not None and not is_template(side) for side in sides]
    namings = [
        naming_of(side.manifest, options, must_fit=False) if side is not None and is_live else None
        for side, is_live in zip(sides, live, strict=True)
    ]
    shown: dict[int, Checkpoint] = {}
    notes: list[str] = []
    for number, (side, naming) in enumerate(zip(sides, namings, strict=True)):
        if side is None or not live[number]:
            continue
        if naming is None:
            found = _published(side, options, sides[1 - number], with_optimizer=with_optimizer)
        else:
            other = sides[1 - number]
            found = _named(side, naming, options, other, _LABELS[1 - number], with_optimizer=with_optimizer)
        if found is None:
            continue
        shown[number] = side.shown_as(found.manifest)
        notes += [f"{_LABELS[number]}: {note}" for note in (*found.notes, *_dropped(found))]
    if not shown:
        check_used(options)
        fits = "no family's names are known for" if options.family == "auto" else f"no names of {options.family} fit"
        raise UsageError(
            f"{fits} the tensors of A or B",
            hint="leave out --names hf, or give rules with --naming FILE",
        )
    return shown, tuple(notes)


def _named(
    side: Checkpoint,
    naming: NamingMatch,
    options: NamesOptions,
    other: Checkpoint | None,
    label: str,
    *,
    with_optimizer: bool,
) -> HfNames | None:
    """One side under other names; None where rules of the user's fit none of its tensors."""
    matches, unnamed = matches_of(naming.naming, of_model(side.manifest))
    if not matches:
        return None
    recorded = {} if other is None else facts_of(other.manifest, {}, whose=label)
    facts = {**recorded, **facts_of(side.manifest, options.facts or {})}
    manifest = side.resolve()
    found = apply_naming(
        side, manifest, naming, matches, facts, true_vocab=options.true_vocab, is_whole=False, has_config=False
    )  # fmt: skip
    notes = list(found.notes)
    if unnamed:
        notes.append(
            f"{counted(len(unnamed), 'tensor', 'stay')} as stored, without a name there: {', '.join(unnamed[:4])}"
        )
    shown = found.manifest
    if with_optimizer:
        shown, state_notes = _with_states(side, found)
        notes += state_notes
    return HfNames(shown, found.dropped, tuple(notes), found.views, found.config)


def _published(
    side: Checkpoint, options: NamesOptions, other: Checkpoint | None, *, with_optimizer: bool
) -> HfNames | None:
    """One side under the names that its model is published with; None where nothing is known to differ.

    Which model it is may be in the config of the other side alone.
    """
    model = of_model(side.manifest)
    if options.naming is not None or not is_in_one(model):
        return None
    tensors = side.manifest.tensors
    paths = tensors.paths or tuple((fqn,) for fqn in tensors.fqns)
    names = dict(zip(tensors.fqns, module_names(paths), strict=True))
    of_side = set(model)
    others = [fqn for fqn in tensors.fqns if fqn not in of_side]
    pairs = [(fqn, names[fqn] or fqn) for fqn in model]
    info = {**({} if other is None else other.manifest.info), **side.manifest.info}
    found = published_names(side.resolve(), pairs, info, options, keep=others)
    if found is None or not with_optimizer:
        return found
    shown, notes = _with_states(side, found)
    return replace(found, manifest=shown, notes=(*found.notes, *notes))


def _with_states(side: Checkpoint, found: HfNames) -> tuple[Manifest, list[str]]:
    """The state of each weight through the weight's views, under the names that torch gives it; the rest as it is."""
    manifest = side.manifest
    if not (manifest.tensors.section == SECTIONS.index("optimizer")).any():
        return found.manifest, []
    try:
        check_is_decoded(manifest, side.url)
    except LayoutError as error:
        return found.manifest, [error.message]
    states = states_of(manifest, side.load_blobs()).tensors
    weights = [
        replace(view, path=(view.fqn,)) for view in found.views if any(part.source_fqn in states for part in view.parts)
    ]
    slots = sorted({slot for own in states.values() for slot in own})
    moved = [view for slot in slots for view in state_views(weights, states, (slot,), torch_state)[0]]
    if not moved:
        return found.manifest, []
    used = {part.source_fqn for view in moved for part in view.parts}
    others = [view for view in found.views if not any(part.source_fqn in states for part in view.parts)]
    left = [view for view in others if not any(part.source_fqn in used for part in view.parts)]
    note = f"{counted(len(used), 'tensor', 'become')} {len(moved):,}: the optimizer's, as the weights do"
    return apply_views(manifest, [*weights, *left, *moved]), [note]


def _dropped(found: HfNames) -> list[str]:
    """What has no counterpart, by reason."""
    reasons: dict[str, list[str]] = {}
    for dropped in found.dropped:
        reasons.setdefault(dropped.why, []).append(dropped.fqn)
    return [f"{counted(len(fqns), 'tensor')} not compared, {fqns[0]}: {why}" for why, fqns in reasons.items()]
