"""To resolve a tensor is to find the rule for its name, whatever is wrapped around that, and what it says of its shape.

Ends in one `TensorLayout` per tensor, or in an error that lists what no rule covers. Knows no mesh.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Literal

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.names import Spelling, spellings
from ckpt_tool.layout.placement import Replicate, Shard, TensorLayout
from ckpt_tool.layout.rules import Kind, RuleMatch, RuleSet
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, some_below

__all__ = ["Default", "Notes", "Resolved", "is_for_everyone", "resolve", "rows_of_kind"]

Default = Literal["shard0", "replicate"]

_N_LISTED = 10


class Notes:
    """Sentences about tensors, each with the number of tensors it holds for and the first of them."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def add(self, sentence: str, fqn: str) -> None:
        """Say ``sentence`` of one more tensor."""
        self._found.setdefault(sentence, []).append(fqn)

    def sentences(self) -> tuple[str, ...]:
        """In order of first mention."""
        return tuple(
            f"{sentence}: {fqns[0]}"
            if len(fqns) == 1
            else f"{sentence}: {counted(len(fqns), 'tensor')}, first {fqns[0]}"
            for sentence, fqns in self._found.items()
        )


@dataclass(frozen=True, slots=True)
class Resolved:
    """Layouts of tensors, in their order."""

    layouts: tuple[TensorLayout, ...]
    n_layers: int
    """One more than the highest layer number in any name."""
    n_experts: int
    """One more than the highest expert number in any name."""


def resolve(
    fqns: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    rules: RuleSet,
    *,
    default: Default | None,
    numbered: Mapping[int, str],
    notes: Notes,
) -> Resolved:
    """The layout of each tensor, by the first rule that fits the plainest reading of its name.

    Optimizer state of its parameter's shape lies as the parameter does; other state (step counters, factored moments)
    is replicated over the ranks that hold the parameter. Tensors of the rest of the training state, and state without
    dimensions, are replicated everywhere when no rule fits.

    Args:
        fqns: names of tensors.
        shapes: global shapes.
        rules: the rules.
        default: what happens to names without a rule; None: they are an error.
        numbered: names of the parameters that an optimizer numbers.
        notes: where to say what is worth knowing.

    Raises:
        LayoutError: names without a rule, and no default; or a rule that does not fit a shape.
    """
    found = [_find(fqn, rules, numbered) for fqn in fqns]
    parameter_shapes = {
        spelling.parameter: shape
        for (spelling, match), shape in zip(found, shapes, strict=True)
        if match is not None and spelling.slot is None and spelling.adapter is None
    }
    layouts: list[TensorLayout] = []
    uncovered: list[str] = []
    for fqn, shape, (spelling, match) in zip(fqns, shapes, found, strict=True):
        if spelling.stripped:
            notes.add(f"read without {spelling.stripped!r}", fqn)
        if match is not None:
            layouts.append(_layout(fqn, shape, spelling, match, parameter_shapes, notes))
        elif prod(shape) <= 1:
            layouts.append(TensorLayout(is_whole=True))  # nothing to cut, so no rule is needed
        elif is_for_everyone(fqn, shape):
            notes.add("no part of the model, replicated", fqn)
            layouts.append(TensorLayout(is_whole=True))
        elif default is not None:
            notes.add(f"no rule, by default {default}", fqn)
            layouts.append(TensorLayout(tp=Shard(0) if default == "shard0" and shape else Replicate()))
        else:
            uncovered.append(fqn)
    if uncovered:
        raise _uncovered_error(uncovered, len(fqns), rules)
    layers = [match.layer for _, match in found if match is not None and match.layer is not None]
    experts = [match.expert for _, match in found if match is not None and match.expert is not None]
    _note_missing("layer", layers, notes)
    _note_missing("expert", experts, notes)
    return Resolved(tuple(layouts), max(layers, default=-1) + 1, max(experts, default=-1) + 1)


def rows_of_kind(fqns: Sequence[str], rules: RuleSet, kind: Kind) -> list[int]:
    """Rows of ``fqns`` whose rule is of ``kind``; state of optimizers and adapters is not among them."""
    found = ((row, *_find(fqn, rules, {})) for row, fqn in enumerate(fqns))
    return [
        row
        for row, spelling, match in found
        if match is not None and match.rule.kind == kind and spelling.slot is None and spelling.adapter is None
    ]


def _find(fqn: str, rules: RuleSet, numbered: Mapping[int, str]) -> tuple[Spelling, RuleMatch | None]:
    for spelling in spellings(fqn, numbered):
        match = rules.match(spelling.parameter)
        if match is not None:
            return spelling, match
    return Spelling(fqn), None


def _layout(
    fqn: str,
    shape: tuple[int, ...],
    spelling: Spelling,
    match: RuleMatch,
    parameter_shapes: Mapping[str, tuple[int, ...]],
    notes: Notes,
) -> TensorLayout:
    if spelling.adapter is not None:
        return match.rule.adapter_layout(spelling.adapter, shape, match.layer, match.expert)
    parameter_shape = parameter_shapes.get(spelling.parameter, shape)
    if spelling.slot is not None and (shape != parameter_shape or not shape):
        if shape:
            notes.add("optimizer state of another shape than its parameter, replicated", fqn)
        # A tensor without dimensions keeps the stage and the expert of its parameter, which has some.
        owner = match.rule.layout(parameter_shape or (1,), match.layer, match.expert)
        return TensorLayout(expert=owner.expert, stage=owner.stage, layer=owner.layer)
    try:
        return match.rule.layout(shape, match.layer, match.expert)
    except LayoutError as error:
        raise LayoutError(error.message, where=fqn, hint=error.hint) from error


def is_for_everyone(fqn: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor belongs to the training as a whole, not to a part of the model: random states, counters."""
    section = section_of((), fqn)
    return section == "other" or (section == "optimizer" and not shape)


def _note_missing(what: str, numbers: Sequence[int], notes: Notes) -> None:
    missing = sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers))
    if missing:
        listed = ", ".join(str(n) for n in missing[:_N_LISTED])
        notes.add(f"{counted(len(missing), f'{what} below the highest number', 'are')} not there", listed)


def _uncovered_error(uncovered: Sequence[str], n_tensors: int, rules: RuleSet) -> LayoutError:
    names = [[*spellings(fqn, {})][-1].parameter for fqn in uncovered]
    # One rule per parameter: it holds for the optimizer's state of it too, under whatever prefix.
    patterns = list(dict.fromkeys(_pattern_for(name) for name in names))
    stanzas = "\n\n".join(f"[[rule]]\nmatch = '{pattern}'\nkind = \"replicated\"" for pattern in patterns[:_N_LISTED])
    return LayoutError(
        f"no rule of {rules.name!r} covers {len(uncovered):,} of {counted(n_tensors, 'tensor')}:"
        f"{some_below(uncovered, _N_LISTED)}{_partial_match(names, rules)}",
        hint=f"give every rank a copy of them with --default replicate, or put rules for them into a file for --rules "
        f"(kind: column, row, vocab, replicated ...):\n\n{stanzas}",
    )


def _partial_match(names: Sequence[str], rules: RuleSet) -> str:
    """What to say of a rule that was perhaps meant for one of ``names``, but does not match the whole of it."""
    for rule in rules.rules:
        near = next((name for name in names if rule.pattern.match(name)), None)
        if near is not None:
            return f"\na rule matches whole names: {rule.pattern.pattern!r} matches only the beginning of {near!r}"
    return ""


def _pattern_for(fqn: str) -> str:
    """A pattern for a name and its likes in other layers: the first number counts layers, others are any number."""
    pattern = re.sub(r"(?<![^.])\d+(?=\\.)", r"\\d+", re.escape(fqn).replace(r"\-", "-"))
    return pattern.replace(r"\d+", r"(?P<layer>\d+)", 1)
