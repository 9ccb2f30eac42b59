"""A naming read the other way: tensors under the names that its rules lead to, as what the rules match.

Parts are joined into fused tensors, layers and experts stacked, rows of padding added: views again, so bytes stay where
they are. Nothing is lost on the way: every tensor is used, ignored for a reason that the naming gives, or refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.layout.names import spellings
from ckpt_tool.layout.naming import Renaming, natural
from ckpt_tool.layout.naming_rules import NamedPart, Naming, NamingRule
from ckpt_tool.layout.naming_sizes import FACT_HINT, Fact, check_counted, pieces_of, size_of, stated
from ckpt_tool.layout.views import Part, View
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, some_below

__all__ = ["rename_back", "reversed_names"]

_N_LISTED = 10
_NUMBERED = ("layer", "expert")
_PLACEHOLDER = re.compile(r"{(\w+)}")


@dataclass(frozen=True, slots=True)
class _Reverse:
    """A rule with a pattern of the names that it leads to."""

    rule: NamingRule
    pattern: re.Pattern[str]
    back: str


@dataclass(frozen=True, slots=True)
class _Use:
    """What one tensor is a part of."""

    layer: int | None
    expert: int | None
    part: str
    fqn: str


def rename_back(
    naming: Naming,
    shapes: Mapping[str, tuple[int, ...]],
    facts: Mapping[str, Fact],
    *,
    n_rows: Mapping[str, int],
    variant: str = "",
) -> Renaming:
    """The views that make of tensors what the naming's rules match.

    Layers are stacked where every tensor of a layer is in all of them, and numbered otherwise; experts are stacked.

    Args:
        naming: whose rules have ``back``.
        shapes: names and global shapes of all tensors.
        facts: numbers that the rules need; those of the naming itself count where these do not.
        n_rows: by the ``rows`` of rules: how many rows the target has, padding included.
        variant: which names of ``back`` are wanted.

    Raises:
        LayoutError: a tensor that no rule leads to, a part, layer or expert that is missing, sizes that do not fit.
    """
    known = {name: Fact(value, naming.name) for name, value in naming.facts} | dict(facts)
    uses: dict[tuple[str, NamingRule], list[_Use]] = defaultdict(list)
    dropped: list[tuple[str, str]] = []
    uncovered: list[str] = []
    reverses = list(_reverses(naming, variant))
    parameters = {spelling.parameter for fqn in shapes for spelling in spellings(fqn, {})}
    n_stated = known["layers"].value if "layers" in known else None
    lacking = "" if any(name.startswith(naming.prefix) for name in parameters) else naming.prefix
    for fqn in shapes:
        found = next(_found(fqn, reverses, parameters, n_stated, lacking), None)
        if found is not None:
            uses[found[0], found[1].rule].append(found[2])
            continue
        because = next((why for pattern, why in naming.ignored if pattern.fullmatch(fqn)), None)
        if because is None:
            uncovered.append(fqn)
        else:
            dropped.append((fqn, because))
    if uncovered:
        raise LayoutError(
            f"{naming.name}, read backwards, has no place for {len(uncovered):,} of {counted(len(shapes), 'tensor')}, "
            f"which would be lost:{some_below(uncovered, _N_LISTED)}",
            hint="leave them out with --exclude",
        )
    missing = sorted({name for _, rule in uses for name in rule.facts} - set(known))
    if missing:
        raise LayoutError(
            f"{naming.name} needs {', '.join(missing)}, which the checkpoint does not tell",
            hint=f"give {' '.join(f'--fact {name}=N' for name in missing)}",
        )
    n_layers = _count("layers", {use.layer for own in uses.values() for use in own}, known)
    is_stacked = all(len({use.layer for use in own}) == n_layers for own in uses.values() if own[0].layer is not None)
    views = [
        view
        for (back, rule), own in uses.items()
        for view in _views(back, rule, own, shapes, known, n_rows, is_stacked=is_stacked)
    ]
    used = {name for _, rule in uses for name in rule.facts}
    notes = tuple(f"{name} is {known[name].value:,}: {known[name].evidence}" for name in sorted(used))
    return Renaming(tuple(sorted(views, key=lambda view: natural(view.fqn))), tuple(dropped), notes)


def reversed_names(naming: Naming, fqns: Iterable[str]) -> set[str]:
    """Those of some names that the naming's rules lead to, as they are."""
    patterns = [reverse.pattern for reverse in _reverses(naming, "")]
    return {fqn for fqn in fqns if any(pattern.fullmatch(fqn) for pattern in patterns)}


def _reverses(naming: Naming, variant: str) -> Iterator[_Reverse]:
    for rule in naming.rules:
        if rule.back:
            named = dict(rule.back)
            yield _Reverse(rule, _pattern_of(rule), named.get(variant, named["default"]))


def _pattern_of(rule: NamingRule) -> re.Pattern[str]:
    """What a rule's ``to`` fits: numbers for layers and experts, the parts' names, and groups as ``match`` has them."""
    words: list[str] = []
    end = 0
    for place in _PLACEHOLDER.finditer(rule.to):
        name = place[1]
        if name in _NUMBERED:
            inner = r"\d+"
        elif name == "part":
            inner = "|".join(re.escape(part.name) for part in rule.parts)
        else:
            inner = _group_text(rule.pattern.pattern, name)
        words += [re.escape(rule.to[end : place.start()]), f"(?P<{name}>{inner})"]
        end = place.end()
    return re.compile("".join(words) + re.escape(rule.to[end:]))


def _group_text(pattern: str, name: str) -> str:
    """What is inside of a named group of a pattern.

    >>> _group_text(r"a(?P<leaf>b(?:c|d))e", "leaf")
    'b(?:c|d)'
    """
    start = pattern.index(f"(?P<{name}>") + len(f"(?P<{name}>")
    depth, at = 1, start
    while depth:
        step = 2 if pattern[at] == "\\" else 1
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        at += step
    return pattern[start : at - 1]


def _found(
    fqn: str, reverses: Sequence[_Reverse], names: set[str], n_layers: int | None, lacking: str
) -> Iterator[tuple[str, _Reverse, _Use]]:
    """Name of the target (without numbers), rule and use of a tensor, by the rules that lead to it.

    ``n_layers`` is the number of layers, where it is known: those behind are of the rules for such layers. ``lacking``
    is what all names should have in front and none has.
    """
    has_behind = any(reverse.rule.is_behind for reverse in reverses)
    for spelling in spellings(fqn, {}):
        if spelling.slot is not None or spelling.adapter is not None:
            continue
        for reverse in reverses:
            match = reverse.pattern.fullmatch(lacking + spelling.parameter)
            if match is None:
                continue
            groups = match.groupdict()
            beside = reverse.rule.beside
            if beside and beside.format_map(groups) not in names:
                continue
            layer, expert = (None if groups.get(name) is None else int(groups[name]) for name in _NUMBERED)
            kept = {"layer": "{layer}", "expert": "{expert}"}
            if has_behind and layer is not None:
                n_before = layer + 1 if n_layers is None else n_layers
                if (layer >= n_before) != reverse.rule.is_behind:
                    continue
                if reverse.rule.is_behind:
                    kept["behind"], layer = str(layer - n_before), None
            yield (
                reverse.back.format_map({**groups, **kept}),
                reverse,
                _Use(layer, expert, groups.get("part") or "", fqn),
            )


def _count(what: str, found: set[int | None], facts: Mapping[str, Fact], where: str = "the checkpoint") -> int:
    """How many there are: 0, 1, 2 ... without a gap, as many as a fact says.

    Raises:
        LayoutError: some are missing, or too many.
    """
    numbers = {number for number in found if number is not None}
    fact = facts.get(what)
    n = max(numbers, default=-1) + 1 if fact is None else fact.value
    if numbers and numbers != set(range(n)):
        absent, extra = sorted(set(range(n)) - numbers), sorted(numbers - set(range(n)))
        said = "" if fact is None else f" ({fact.evidence} says {n:,})"
        some = ", ".join(map(str, (absent or extra)[:_N_LISTED]))
        raise LayoutError(
            f"{counted(len(absent or extra), what.removesuffix('s'), 'are')} {'missing' if absent else 'too many'}: "
            f"{some}{said}",
            where=where,
        )
    return n


def _views(
    back: str,
    rule: NamingRule,
    uses: Sequence[_Use],
    shapes: Mapping[str, tuple[int, ...]],
    facts: Mapping[str, Fact],
    n_rows: Mapping[str, int],
    *,
    is_stacked: bool,
) -> Iterator[View]:
    """The tensors that one rule makes of all its parts: one, or one for each layer."""
    if is_stacked or uses[0].layer is None:
        yield _joined(_name(back, None), rule, uses, shapes, facts, n_rows)
        return
    by_layer: dict[int, list[_Use]] = defaultdict(list)
    for use in uses:
        by_layer[use.layer or 0].append(_Use(None, use.expert, use.part, use.fqn))
    for layer, own in by_layer.items():
        yield _joined(_name(back, layer), rule, own, shapes, facts, n_rows)


def _name(back: str, layer: int | None) -> str:
    """The name with the number of its layer, or of all layers; experts are dimensions.

    >>> _name("decoder.layers.{layer}.mlp.experts.{expert}.weight", None)
    'decoder.layers.mlp.experts.weight'
    """
    numbered = back.replace("{layer}.", "" if layer is None else f"{layer}.")
    return numbered.replace("{expert}.", "")


def _joined(
    name: str,
    rule: NamingRule,
    uses: Sequence[_Use],
    shapes: Mapping[str, tuple[int, ...]],
    facts: Mapping[str, Fact],
    n_rows: Mapping[str, int],
) -> View:
    """One tensor of all its parts, layers and experts."""
    parts = rule.parts or (NamedPart(""),)
    stored = (NamedPart(""),) if rule.joined else parts
    numbers = {name: {getattr(use, name) for use in uses} for name in _NUMBERED}
    lead = tuple(_count(f"{what}s", numbers[what], facts, name) for what in _NUMBERED if numbers[what] != {None})
    by_place: dict[tuple[int, ...], dict[str, str]] = defaultdict(dict)
    for use in uses:
        place = tuple(number for number in (use.layer, use.expert) if number is not None)
        by_place[place][use.part] = use.fqn
    first = by_place[(0,) * len(lead)]
    for place in product(*map(range, lead)):
        _check_parts(name, place, by_place.get(place, {}), stored, first, shapes)
    shapes = {use.fqn: shapes[use.fqn][::-1] if rule.transposed else shapes[use.fqn] for use in uses}
    shape = shapes[first[stored[0].name]]
    check_counted(rule.counts, shape, facts, first[stored[0].name])
    if not shape:
        targets = [Part(own[""], Box((), ()), place, (-1,) * len(lead)) for place, own in by_place.items()]
        return View(name, lead, tuple(targets))
    weights = [size_of(part.weight, facts, name) for part in parts]
    n_groups = size_of(rule.groups, facts, name)
    if rule.joined:
        of_parts = _cut(first[""], shape, weights, n_groups)
    else:
        of_parts = [shapes[first[part.name]] for part in parts]
    starts = list(accumulate((rows for rows, *_ in of_parts), initial=0)) if rule.joined else [0] * len(parts)
    unit = _unit(name, rule, of_parts, weights, n_groups, facts)
    pieces = list(pieces_of(weights, unit, n_groups))
    rest = shape[1:]
    order = -1 if rule.transposed else 1  # of a source's dimensions
    axes = (*(-1,) * len(lead), *range(len(shape))[::order])
    zeros = (0,) * len(rest)
    boxes = tuple(
        Part(
            own["" if rule.joined else parts[piece.part].name],
            Box((starts[piece.part] + piece.part_row, *zeros)[::order], (piece.rows, *rest)[::order]),
            (*place, piece.fused_row, *zeros),
            axes,
        )
        for place, own in by_place.items()
        for piece in pieces
    )
    rows = n_groups * sum(weights) * unit
    padded = n_rows.get(rule.rows, rows)
    if padded < rows:
        raise LayoutError(
            f"has {counted(rows, 'row')}, more than the {padded:,} of the target", where=first[stored[0].name]
        )
    padding = (Box((*(0,) * len(lead), rows, *zeros), (*lead, padded - rows, *rest)),) if padded > rows else ()
    return View(name, (*lead, padded, *rest), boxes, padding)


def _cut(fqn: str, shape: tuple[int, ...], weights: Sequence[int], n_groups: int) -> list[tuple[int, ...]]:
    """Shapes of the parts that lie one behind the other in a tensor of this shape."""
    unit, rest = divmod(shape[0], n_groups * sum(weights))
    if rest or not unit:
        raise LayoutError(
            f"{counted(shape[0], 'row', 'are')} not {counted(n_groups, 'group')} of sizes {list(weights)}",
            where=fqn,
            hint=FACT_HINT,
        )
    return [(unit * weight * n_groups, *shape[1:]) for weight in weights]


def _check_parts(
    name: str,
    place: tuple[int, ...],
    own: Mapping[str, str],
    parts: Sequence[NamedPart],
    first: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise LayoutError unless all parts are there, of the shapes that they have elsewhere."""
    said = f"{name}{list(place)}" if place else name
    for part in parts:
        if part.name not in own:
            raise LayoutError(f"its part {part.name!r} is missing" if part.name else "is missing", where=said)
        if shapes[own[part.name]] != shapes[first[part.name]]:
            raise LayoutError(
                f"has shape {list(shapes[own[part.name]])}, but {first[part.name]} has "
                f"{list(shapes[first[part.name]])}, and they are stacked",
                where=own[part.name],
            )


def _unit(
    name: str,
    rule: NamingRule,
    shapes: Sequence[tuple[int, ...]],
    weights: Sequence[int],
    n_groups: int,
    facts: Mapping[str, Fact],
) -> int:
    """Rows of weight 1, the same in all parts."""
    units = {divmod(shape[0], weight * n_groups) for shape, weight in zip(shapes, weights, strict=True)}
    said = f" with {stated(rule.facts, facts)}" if rule.facts else ""
    if len(units) != 1 or next(iter(units))[1] or len({shape[1:] for shape in shapes}) != 1:
        raise LayoutError(
            f"parts of shapes {[list(shape) for shape in shapes]} are not {counted(n_groups, 'group')} of sizes "
            f"{list(weights)}{said}",
            where=name,
            hint=FACT_HINT,
        )
    unit = next(iter(units))[0]
    if rule.unit in facts and facts[rule.unit].value != unit:
        fact = facts[rule.unit]
        raise LayoutError(
            f"parts make {rule.unit} {unit:,}{said}, expected {fact.value:,} ({fact.evidence})",
            where=name,
            hint=FACT_HINT,
        )
    return unit
