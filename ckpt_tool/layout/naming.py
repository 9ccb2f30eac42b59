"""To apply a naming is to list, for tensors of one family, the views that are the same bytes under another's names.

Every tensor is renamed, dropped for a reason that the naming gives, or refused: none is lost on the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product
from math import prod

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.layout.naming_match import Matched
from ckpt_tool.layout.naming_rules import NamedPart, Naming, NamingRule
from ckpt_tool.layout.naming_sizes import FACT_HINT, Fact, check_counted, pieces_of, size_of, stated
from ckpt_tool.layout.views import Part, View
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Renaming", "natural", "rename"]

_N_LISTED = 10
_MAX_STACKED = 1_000_000  # layers times experts of one stacked tensor; a damaged shape says any number
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Renaming:
    """What tensors become."""

    views: tuple[View, ...]
    """In natural order of their names, whatever order the sources had."""
    dropped: tuple[tuple[str, str], ...]
    """Tensors, or parts of them, without a counterpart, and why."""
    notes: tuple[str, ...]


def rename(
    naming: Naming,
    matches: Sequence[Matched],
    shapes: Mapping[str, tuple[int, ...]],
    facts: Mapping[str, Fact],
    *,
    is_whole: bool,
) -> Renaming:
    """The views that ``naming`` makes of matched tensors.

    Args:
        naming: the naming that they matched.
        matches: all tensors that are to be renamed.
        shapes: global shapes of these, and of all others that may be witnesses.
        facts: numbers that the checkpoint or the user gives; those of the naming itself count where these do not.
        is_whole: the tensors should be a whole model, so layers and experts are counted.

    Raises:
        LayoutError: a fact is missing or contradicts a shape, a layer or an expert is not there, two tensors would get
            one name.
    """
    known = {name: Fact(value, naming.name) for name, value in naming.facts} | dict(facts)
    for name, because in naming.refused:
        if name in known and known[name].value:
            raise LayoutError(f"{because} ({known[name].evidence})", hint="export with --family none")
    _require({name for matched in matches for name in matched.rule.facts} - set(known), naming)
    parameters = {matched.parameter: matched.fqn for matched in matches}
    applied = _Applied(shapes, parameters, known)
    applied.n_layers = known["layers"].value if "layers" in known else _n_layers(matches, shapes)
    for matched in matches:
        applied.add(matched)
    if is_whole:
        applied.check_counts()
    views = tuple(sorted(applied.views.values(), key=lambda view: natural(view.fqn)))
    used = {name for matched in matches for name in (*matched.rule.facts, matched.rule.rows)} & set(known)
    notes = tuple(f"{name} is {known[name].value:,}: {known[name].evidence}" for name in sorted(used))
    return Renaming(views, tuple(applied.dropped), notes)


def _require(missing: set[str], naming: Naming) -> None:
    if missing:
        named = sorted(missing)
        raise LayoutError(
            f"{naming.name} needs {', '.join(named)}, which the checkpoint does not tell",
            hint=f"give {' '.join(f'--fact {name}=N' for name in named)}, or keep all names with --family none",
        )


def _n_layers(matches: Sequence[Matched], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many layers there are, by names and by leading dimensions that count them."""
    found = 0
    for matched in matches:
        if "layer" in matched.groups:
            stated, shape = matched.groups["layer"], shapes[matched.fqn]
            found = max(found, int(stated) + 1 if stated is not None else shape[0] if shape else 0)
    return found


def natural(fqn: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts numbers in names as numbers."""
    return tuple((0, int(word), "") if word.isdecimal() else (1, 0, word) for word in _NUMBER.split(fqn) if word)


class _Applied:
    """Views so far, and what they show of the model."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, str], facts: Mapping[str, Fact]
    ) -> None:
        self.views: dict[str, View] = {}
        self.dropped: list[tuple[str, str]] = []
        self._shapes = shapes
        self._parameters = parameters
        self._facts = facts
        self._sources: dict[str, str] = {}
        self._units = {name: (fact.value, fact.evidence) for name, fact in facts.items()}
        self._layers: set[int] = set()
        self.n_layers = 0
        self._experts: dict[tuple[NamingRule, int], set[int]] = {}

    def add(self, matched: Matched) -> None:
        """The views that one tensor becomes."""
        rule, fqn, shape = matched.rule, matched.fqn, self._shapes[matched.fqn]
        if rule.drop:
            self.dropped.append((fqn, rule.drop))
            return
        axes = rule.missing_counts(matched.groups)
        if len(axes) > len(shape):
            raise LayoutError(f"shape {list(shape)} does not count {' and '.join(axes)}", where=fqn)
        lead, inner = shape[: len(axes)], shape[len(axes) :]
        if prod(lead) > _MAX_STACKED:
            raise LayoutError(f"counts {prod(lead):,} {' x '.join(axes)}, more than a model has", where=fqn)
        check_counted(rule.counts, inner, self._facts, fqn)
        pieces = [_laid(rule, piece) for piece in self._pieces(matched, inner)]
        volume = 0
        for index in product(*(range(size) for size in lead)):
            groups = {**matched.groups, **{name: str(at) for name, at in zip(axes, index, strict=True)}}
            self._count(rule, groups)
            if rule.is_behind:
                groups["layer"] = str(self.n_layers + int(groups["behind"] or 0))
            for name, piece_shape, boxes in pieces:
                view = View(
                    rule.to.format_map({**groups, "part": name}),
                    piece_shape,
                    tuple(_below(part, fqn, index) for part in boxes),
                )
                self._put(view, fqn)
                volume += prod(piece_shape)
        n_padding = 0
        if rule.rows and inner:
            kept = self._n_rows(rule, inner)
            n_padding = prod(lead) * (inner[0] - kept) * prod(inner[1:])
            if n_padding:
                self.dropped.append((f"{fqn}[{kept}:{inner[0]}]", f"padding: {self._facts[rule.rows].evidence}"))
        if volume + n_padding != prod(shape):
            raise LayoutError(f"{volume + n_padding:,} of {counted(prod(shape), 'element')} would be kept", where=fqn)

    def check_counts(self) -> None:
        """Whether layers and experts are all there.

        Raises:
            LayoutError: one is not.
        """
        self._check("layers", self._layers, "the checkpoint")
        for (rule, layer), experts in self._experts.items():
            self._check("experts", experts, f"{rule.to.format_map(_Blank(layer=layer))}")

    def _check(self, what: str, found: set[int], where: str) -> None:
        stated = self._facts.get(what)
        n = max(found, default=-1) + 1 if stated is None else stated.value
        if found and found != set(range(n)):
            absent, extra = sorted(set(range(n)) - found), sorted(found - set(range(n)))
            said = "" if stated is None else f" ({stated.evidence} says {n:,})"
            wrong = f"missing: {_some(absent)}" if absent else f"too many: {_some(extra)}"
            raise LayoutError(
                f"{counted(len(absent or extra), what.removesuffix('s'), 'are')} {wrong}{said}",
                where=where,
                hint='"ckpt verify" tells what is there; --include exports a part',
            )

    def _count(self, rule: NamingRule, groups: Mapping[str, str | None]) -> None:
        layer, expert = groups.get("layer"), groups.get("expert")
        if layer is not None:
            self._layers.add(int(layer))
        if expert is not None:
            self._experts.setdefault((rule, int(layer or 0)), set()).add(int(expert))

    def _put(self, view: View, fqn: str) -> None:
        if view.fqn in self.views:
            raise LayoutError(
                f"{self._sources[view.fqn]!r} and {fqn!r} would both be called {view.fqn!r}",
                hint="leave one out with --exclude, or keep all names with --family none",
            )
        self.views[view.fqn] = view
        self._sources[view.fqn] = fqn

    def _n_rows(self, rule: NamingRule, inner: tuple[int, ...]) -> int:
        return self._facts[rule.rows].value if rule.rows in self._facts else inner[0]

    def _pieces(self, matched: Matched, inner: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], list[Part]]]:
        """Name, shape and parts (in coordinates behind the counted dimensions) of each tensor in one."""
        rule, fqn = matched.rule, matched.fqn
        if not inner:
            yield "", (), [Part(fqn, Box((), ()), (), ())]
            return
        n_rows = self._n_rows(rule, inner)
        if n_rows > inner[0]:
            raise LayoutError(
                f"has {counted(inner[0], 'row')}, fewer than {rule.rows} = {n_rows:,} "
                f"({self._facts[rule.rows].evidence})",
                where=fqn,
            )
        axes, rest = tuple(range(len(inner))), inner[1:]
        zeros = (0,) * len(rest)
        if not rule.parts and not rule.halves:
            self._check_times(matched, inner)
            yield "", (n_rows, *rest), [Part(fqn, Box((0, *zeros), (n_rows, *rest)), (0, *zeros), axes)]
            return
        parts = rule.parts or (NamedPart(""),)
        n_groups = size_of(rule.groups, self._facts, fqn)
        weights = [size_of(part.weight, self._facts, fqn) for part in parts]
        unit = self._unit(matched, inner, n_groups, weights)
        steps = (2, *(1,) * len(rest)) if rule.halves else None
        n_cuts = 2 if rule.halves else 1
        boxes: list[list[Part]] = [[] for _ in parts]
        for piece in pieces_of(weights, unit, n_groups):
            rows = piece.rows // n_cuts
            if piece.rows % n_cuts:
                raise LayoutError(f"{counted(piece.rows, 'row of a group', 'are')} no pairs", where=fqn)
            boxes[piece.part] += [
                Part(
                    fqn,
                    Box((piece.fused_row + cut, *zeros), (rows, *rest)),
                    (piece.part_row + cut * rows, *zeros),
                    axes,
                    steps,
                )
                for cut in range(n_cuts)
            ]
        if rule.joined:
            starts = accumulate((n_groups * weight * unit for weight in weights), initial=0)
            moved = [
                replace(box, target_offsets=(start + box.target_offsets[0], *zeros))
                for start, own in zip(starts, boxes, strict=False)
                for box in own
            ]
            yield "", (n_groups * sum(weights) * unit, *rest), moved
            return
        for part, weight, own in zip(parts, weights, boxes, strict=True):
            yield part.name, (n_groups * weight * unit, *rest), own

    def _unit(self, matched: Matched, inner: tuple[int, ...], n_groups: int, weights: Sequence[int]) -> int:
        """Rows of weight 1, checked against all that is known of them."""
        rule, fqn = matched.rule, matched.fqn
        unit, rest = divmod(inner[0], n_groups * sum(weights))
        if rest or not unit:
            raise LayoutError(
                f"{counted(inner[0], 'row', 'are')} not {counted(n_groups, 'group')} of "
                f"{counted(sum(weights), 'equal piece')} {weights}{self._said(rule)}",
                where=fqn,
                hint=FACT_HINT,
            )
        if rule.unit:
            value, evidence = self._units.setdefault(rule.unit, (unit, f"rows of {fqn}"))
            if value != unit:
                raise LayoutError(
                    f"{counted(inner[0], 'row')} make {rule.unit} {unit:,}{self._said(rule)}, expected {value:,} "
                    f"({evidence})",
                    where=fqn,
                    hint=FACT_HINT,
                )
        other = self._witness(matched)
        if rule.witness is not None and other is not None:
            length = self._shapes[other][rule.witness.dim]
            size = n_groups * weights[rule.witness.part] * unit
            if size != length:
                raise LayoutError(
                    f"part {rule.parts[rule.witness.part].name!r} has {counted(size, 'row')}{self._said(rule)}, "
                    f"but {other} {list(self._shapes[other])} says {length:,}",
                    where=fqn,
                    hint=FACT_HINT,
                )
        return unit

    def _check_times(self, matched: Matched, inner: tuple[int, ...]) -> None:
        """Raise LayoutError unless a tensor that stays whole has as many rows as its witness says."""
        witness, other = matched.rule.witness, self._witness(matched)
        if witness is None or other is None:
            return
        expected = witness.times * self._shapes[other][witness.dim]
        if inner[0] != expected:
            because = f": {witness.because}" if witness.because else ""
            raise LayoutError(
                f"has {counted(inner[0], 'row')}, but {other} {list(self._shapes[other])} says {expected:,}{because}",
                where=matched.fqn,
                hint="say whose names they are with --family NAME, or keep all with --family none",
            )

    def _witness(self, matched: Matched) -> str | None:
        """The tensor where a size of this one is written a second time; None where there is none."""
        if matched.rule.witness is None:
            return None
        name, n_found = matched.rule.witness.pattern.subn(matched.rule.witness.replacement, matched.parameter)
        other = matched.fqn.removesuffix(matched.parameter) + name
        return other if n_found and self._shapes.get(other) else None

    def _said(self, rule: NamingRule) -> str:
        return f" with {stated(rule.facts, self._facts)}" if rule.facts else ""


def _laid(rule: NamingRule, piece: tuple[str, tuple[int, ...], list[Part]]) -> tuple[str, tuple[int, ...], list[Part]]:
    """A tensor (name of the part, shape, parts) as the rule's target has it: rows are columns where it says so."""
    name, shape, parts = piece
    if not rule.transposed or len(shape) < 2:
        return piece
    turned = [replace(part, target_offsets=_turned(part.target_offsets), axes=_turned(part.axes)) for part in parts]
    return name, _turned(shape), turned


def _turned(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """A number for each dimension, the last two changed over.

    >>> _turned((2, 3)), _turned((8, 2, 3))
    ((3, 2), (8, 3, 2))
    """
    return (*numbers[:-2], numbers[-1], numbers[-2])


class _Blank(dict[str, object]):
    """For messages: a template's other names stay as they are."""

    def __missing__(self, key: str) -> str:
        return f"{{{key}}}"


def _below(part: Part, fqn: str, index: tuple[int, ...]) -> Part:
    """A part of a tensor that is stacked: the same box at ``index`` of the leading dimensions."""
    ones = (1,) * len(index)
    return replace(
        part,
        source_fqn=fqn,
        source=Box((*index, *part.source.offsets), (*ones, *part.source.sizes)),
        axes=tuple(axis + len(index) for axis in part.axes),
        steps=None if part.steps is None else (*ones, *part.steps),
    )


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_N_LISTED])) + (" ..." if len(numbers) > _N_LISTED else "")
