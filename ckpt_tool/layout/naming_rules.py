r"""A naming says what tensors of one family are called in another: a pattern over names, and the names it becomes.

Namings are data, read from TOML, so that a new model needs no code::

    [naming]
    name = "megatron-llama"
    family = "llama"  # what --family calls the names that come out
    detect = ["self_attention\.linear_qkv\.weight$"]  # names that must occur for it to fit
    absent = ["_layernorm\.bias$"]  # names of tensors that the family's models do not have
    base = "other"  # another naming, whose rules follow behind

    [naming.behind]  # layers of another kind that the family numbers on behind the last of the others
    match = "mtp\.layers\.(?P<behind>\d+)\.transformer_layer\."
    back = "mtp.layers.{behind}.transformer_layer."
    instead_of = "decoder.layers.{layer}."

    [facts]  # numbers that the rules need and the checkpoint does not tell
    ssm_heads = 4

    [[rule]]
    match = "{layers}mlp\.linear_fc2\.weight"
    to = "model.layers.{layer}.mlp.down_proj.weight"

``match`` must match the whole name. In it ``{layers}`` stands for ``[naming] layers``, ``{experts}`` for ``experts``:
patterns with an optional group ``layer`` or ``expert``. Where a name is without its number, the leading dimensions of
the tensor count them, layers before experts, and each becomes a tensor of its own. Groups may be used in ``to``; with a
group ``behind``, ``{layer}`` is it and the number of layers added up. Each rule with ``{layers}`` is one for the layers
of ``[naming.behind]`` too, with ``match`` in place of ``{layers}``, and ``back`` in that of ``instead_of``.
The first dimension behind those can be taken apart:

- ``parts`` lie in it one after another, each a tensor; ``{part}`` in ``to`` is its name. ``weight`` (1 if left out) is
  its relative size: a number, or facts with ``*`` and ``/`` between them, as in ``heads/kv_heads``.
- ``groups``: the parts repeat that often, and a part's tensor is its pieces of all groups, joined.
- ``unit``: a name for the size of weight 1; it is the same in all tensors, and as the fact of that name says, if any.
- ``joined``: the tensors of the parts are one, each behind the one before; ``to`` has no ``{part}``.
- ``transposed``: rows are columns under the name in ``to`` (the last two dimensions of more); one dimension stays.
- ``halves``: in each group rows 0, 2, 4 ... come first, then 1, 3, 5 ... (rotary pairs become rotary halves).
- ``rows``: a fact; rows from there on are padding and left out. Without the fact all are kept.
- ``counts``: a fact that it must be as long as, if the fact is known.
- ``witness``: another tensor of the same layer that proves the sizes: ``tensor`` is a pair of pattern and replacement
  that makes its name of this one's, ``dim`` its dimension, which ``part`` must be as long as. Where there are no parts,
  all rows must be ``times`` as many; ``because`` says what it means that they are not.

``drop`` instead of ``to``: the reason why a tensor has no counterpart. ``[[refuse]]``: a ``fact`` that must not be
true, and ``because``.

The other way (``naming_back``) a rule is read from ``to``, where it also says

- ``back``: the name that ``match`` is of, with ``{layer}.`` and ``{expert}.``, which are left out where these are
  dimensions. A table gives names by variant: ``{ default = "...", local = "..." }``. Rules without it go one way only.
- ``beside``: it is the rule only where a tensor of this name (groups as in ``to``) is there too.

``[[ignore]]``: names (``match``) of the other family that have no counterpart here, and ``because``. ``[naming] of``:
models, by the ``model_type`` of their config, that the rules are of, read the other way; ``only_asked``: names alone do
not tell it from others, so it has to be asked for; ``allow``: facts that the base refuses. Knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.rules import check_keys, compiled, parsed_rules
from ckpt_tool.records import dataclass

__all__ = ["NamedPart", "Naming", "NamingRule", "Witness", "builtin_namings", "load_naming", "published_namings"]

_RULE_KEYS = {
    "match",
    "to",
    "drop",
    "parts",
    "groups",
    "unit",
    "halves",
    "rows",
    "counts",
    "witness",
    "back",
    "beside",
    "joined",
    "transposed",
}
_NAMING_KEYS = {
    "name", "family", "detect", "absent", "base", "layers", "experts", "of", "only_asked", "allow", "behind", "prefix",
}  # fmt: skip
_BEHIND_KEYS = {"match", "back", "instead_of"}
_COUNTED = ("layer", "expert")
_SIZE = re.compile(r"(?:[a-z_]+|[1-9][0-9]*)(?:[*/](?:[a-z_]+|[1-9][0-9]*))*")


@dataclass(frozen=True, slots=True)
class NamedPart:
    """One of the tensors that lie in a fused one."""

    name: str
    weight: str = "1"


@dataclass(frozen=True, slots=True)
class Witness:
    """Where a size is written a second time."""

    pattern: re.Pattern[str]
    replacement: str
    dim: int
    part: int = 0
    """Position in the rule's parts."""
    times: int = 0
    """Of a rule without parts: how often the size is in the rows."""
    because: str = ""
    """What it means that it is not."""


@dataclass(frozen=True, slots=True)
class NamingRule:
    """One entry of a naming."""

    pattern: re.Pattern[str]
    to: str = ""
    drop: str = ""
    parts: tuple[NamedPart, ...] = ()
    groups: str = "1"
    unit: str = ""
    halves: bool = False
    joined: bool = False
    transposed: bool = False
    rows: str = ""
    counts: str = ""
    witness: Witness | None = None
    back: tuple[tuple[str, str], ...] = ()
    """The name of what it matches, by variant; the first is of all that are not named."""
    beside: str = ""

    @property
    def is_behind(self) -> bool:
        """Whether it is one of layers that are numbered behind the others."""
        return "behind" in self.pattern.groupindex

    def missing_counts(self, groups: Mapping[str, str | None]) -> tuple[str, ...]:
        """What leading dimensions count (``layer``, ``expert``) in a tensor whose name gave these ``groups``."""
        return tuple(group for group in _COUNTED if group in self.pattern.groupindex and groups[group] is None)

    @property
    def facts(self) -> frozenset[str]:
        """Facts without which the rule cannot be applied."""
        sizes = [self.groups, *(part.weight for part in self.parts)]
        return frozenset(word for size in sizes for word in re.split("[*/]", size) if not word.isdecimal())


@dataclass(frozen=True, slots=True)
class Naming:
    """Rules in order: the first that matches a name is the one."""

    name: str
    family: str
    rules: tuple[NamingRule, ...]
    detect: tuple[re.Pattern[str], ...] = ()
    absent: tuple[re.Pattern[str], ...] = ()
    facts: tuple[tuple[str, int], ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    """Facts that must not be true, and why."""
    ignored: tuple[tuple[re.Pattern[str], str], ...] = ()
    """Names of the other family without a counterpart, and why."""
    model_types: tuple[str, ...] = ()
    only_asked: bool = False
    """Names do not tell it from another one, so that it is taken for nobody who has not named it."""
    allowed: tuple[str, ...] = ()
    """Facts that a base refuses."""
    layers: str = r"(?:.*\.)?(?P<layer>\d+)\."
    experts: str = r"(?P<expert>\d+)\."
    prefix: str = ""
    """What names of the other family have in front, and lack where the model was saved without its head."""
    behind: tuple[str, str, str] | None = None
    """Pattern and name of what is in front of the names in layers behind the others, and instead of what."""

    def preceded_by(self, other: Naming) -> Naming:
        """This naming with what ``other`` says in front, so that it wins."""
        return replace(
            other,
            rules=other.rules + self.rules,
            detect=other.detect or self.detect,
            absent=self.absent + other.absent,
            facts=self.facts + other.facts,
            refused=tuple(pair for pair in self.refused if pair[0] not in other.allowed) + other.refused,
            ignored=self.ignored + other.ignored,
            model_types=other.model_types or self.model_types,
        )


def builtin_namings() -> dict[str, Naming]:
    """Namings of what other libraries save, by name. Reads the package's own files, once."""
    return _namings("namings")


def published_namings() -> dict[str, Naming]:
    """Namings of what transformers has in memory, as models are published, by name; of tensors that differ alone."""
    return _namings("published")


@cache
def _namings(folder_name: str) -> dict[str, Naming]:
    folder = Path(__file__).with_name(folder_name)  # importlib.resources takes 4 ms to load
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name[-5:] == ".toml"}
    bases: dict[str, Naming] = {}
    # Bases first: a file that has one is named after it, as in megatron.toml and megatron_mixtral.toml.
    for name in sorted(texts, key=lambda name: (name.count("_"), name)):
        naming = load_naming(texts[name], source=name, known=bases)
        bases[naming.name] = naming
    return bases


def load_naming(
    text: str, *, source: str, known: Mapping[str, Naming] | None = None, base: Naming | None = None
) -> Naming:
    """The naming in a TOML text, followed by its ``base``. ``source`` is named in errors: a path, usually.

    Args:
        text: TOML or JSON.
        source: where it came from.
        known: namings that may be named as base; by default those of the package.
        base: the base of a text that names none.

    Raises:
        LayoutError: neither TOML nor JSON, an unknown key, or a value that does not fit.
    """
    document = parsed_rules(text, source)
    check_keys(document, {"naming", "facts", "rule", "refuse", "ignore"}, source)
    head = document.get("naming", {})
    check_keys(head, _NAMING_KEYS, f"{source}: [naming]")
    if "base" in head:
        found = builtin_namings() if known is None else known
        if head["base"] not in found:
            raise LayoutError(f"unknown base {head['base']!r}", where=source, hint=f"known are {', '.join(found)}")
        base = found[head["base"]]
    plain = base or Naming(source, source, ())
    own = Naming(
        name=head.get("name", source),
        family=head.get("family", plain.family),
        rules=(),
        detect=tuple(compiled(pattern, f"{source}: detect") for pattern in head.get("detect", [])),
        absent=tuple(compiled(pattern, f"{source}: absent") for pattern in head.get("absent", [])),
        facts=tuple(_checked_facts(document.get("facts", {}), source)),
        refused=tuple((str(entry.get("fact")), str(entry.get("because"))) for entry in document.get("refuse", [])),
        ignored=tuple(
            (compiled(entry.get("match"), f"{source}: ignore"), str(entry.get("because")))
            for entry in document.get("ignore", [])
        ),
        model_types=tuple(head.get("of", ())),
        only_asked=bool(head.get("only_asked", False)),
        allowed=tuple(head.get("allow", ())),
        layers=head.get("layers", plain.layers),
        experts=head.get("experts", plain.experts),
        prefix=str(head.get("prefix", plain.prefix)),
        behind=_behind(head["behind"], source) if "behind" in head else plain.behind,
    )
    rules = [
        _rule(variant, own, f"{source}: rule {number}")
        for number, table in enumerate(document.get("rule", []), start=1)
        for variant in _variants(table, own.behind)
    ]
    own = replace(own, rules=tuple(rules))
    return own if base is None else base.preceded_by(own)


def _behind(table: Mapping[str, Any], source: str) -> tuple[str, str, str]:
    check_keys(table, _BEHIND_KEYS, f"{source}: [naming.behind]")
    words = tuple(table.get(key) for key in ("match", "back", "instead_of"))
    if not all(isinstance(word, str) for word in words) or "(?P<behind>" not in str(words[0]):
        raise LayoutError("match (with a group behind), back and instead_of are needed", where=f"{source}: behind")
    return str(words[0]), str(words[1]), str(words[2])


def _variants(table: Mapping[str, Any], behind: tuple[str, str, str] | None) -> list[Mapping[str, Any]]:
    """A rule, and the same rule for layers behind the others."""
    match = table.get("match")
    if behind is None or not isinstance(match, str) or "{layers}" not in match:
        return [table]
    pattern, name, instead_of = behind
    back = table.get("back", {})
    backs = {key: value.replace(instead_of, name) for key, value in back.items()} if isinstance(back, dict) else (
        str(back).replace(instead_of, name)
    )  # fmt: skip
    return [table, {**table, "match": match.replace("{layers}", pattern), "back": backs}]


def _rule(table: Mapping[str, Any], naming: Naming, where: str) -> NamingRule:
    check_keys(table, _RULE_KEYS, where)
    match, to, drop = table.get("match"), table.get("to", ""), table.get("drop", "")
    if not isinstance(match, str) or not isinstance(to, str) or bool(to) == bool(drop):
        raise LayoutError("a rule needs match, a regular expression over names, and either to or drop", where=where)
    pattern = compiled(match.replace("{layers}", naming.layers).replace("{experts}", naming.experts), where)
    parts = tuple(_part(part, where) for part in table.get("parts", []))
    rule = NamingRule(
        pattern=pattern,
        to=to,
        drop=str(drop),
        parts=parts,
        groups=_size(table.get("groups", 1), where),
        unit=str(table.get("unit", "")),
        halves=bool(table.get("halves", False)),
        joined=bool(table.get("joined", False)),
        transposed=bool(table.get("transposed", False)),
        rows=str(table.get("rows", "")),
        counts=str(table.get("counts", "")),
        witness=_witness(table["witness"], parts, where) if "witness" in table else None,
        back=_back(table.get("back", {}), where),
        beside=str(table.get("beside", "")),
    )
    if rule.back and rule.halves:
        raise LayoutError("halves cannot be put back into pairs: back goes without halves", where=where)
    if rule.joined and (not parts or rule.halves):
        raise LayoutError("joined goes with parts and without halves", where=where)
    if rule.rows and (rule.parts or rule.transposed or rule.groups != "1" or rule.halves):
        raise LayoutError("rows goes without parts, groups, halves and transposed", where=where)
    names = {
        *pattern.groupindex,
        *(["part"] if parts and not rule.joined else []),
        *(["layer"] if rule.is_behind else []),
    }
    unknown = sorted(set(re.findall(r"{(\w*)}", to)) - names)
    if unknown or to.count("{") != len(re.findall(r"{\w+}", to)) or to.count("}") != to.count("{"):
        raise LayoutError(f"{to!r} uses {unknown}, known are {sorted(names)}", where=where)
    return rule


def _back(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    named = {"default": value} if isinstance(value, str) else value
    if not isinstance(named, dict) or (named and next(iter(named)) != "default"):
        raise LayoutError(f"back is a name, or a table of names, default first; got {value!r}", where=where)
    return tuple((variant, str(name)) for variant, name in named.items())


def _part(value: Any, where: str) -> NamedPart:
    if isinstance(value, str):
        return NamedPart(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise LayoutError(f"a part is a name, or a table with name and weight; got {value!r}", where=where)
    check_keys(value, {"name", "weight"}, where)
    return NamedPart(value["name"], _size(value.get("weight", 1), where))


def _size(value: Any, where: str) -> str:
    text = str(value).replace(" ", "")
    if isinstance(value, bool) or not _SIZE.fullmatch(text):
        raise LayoutError(f"a size is a number or facts with * and / between them, got {value!r}", where=where)
    return text


def _witness(table: Mapping[str, Any], parts: Sequence[NamedPart], where: str) -> Witness:
    check_keys(table, {"tensor", "dim", "part"} if parts else {"tensor", "dim", "times", "because"}, where)
    pair, dim, name, times = (table.get(key) for key in ("tensor", "dim", "part", "times"))
    position = next((number for number, part in enumerate(parts) if part.name == name), None)
    is_said = position is not None if parts else type(times) is int and times > 0
    if not isinstance(pair, list) or len(pair) != 2 or type(dim) is not int or not is_said:
        said = "part (a name)" if parts else "times (a number above 0)"
        raise LayoutError(f"a witness needs tensor (pattern, replacement), dim (a number) and {said}", where=where)
    return Witness(compiled(pair[0], where), pair[1], dim, position or 0, times or 0, str(table.get("because", "")))


def _checked_facts(table: Mapping[str, Any], source: str) -> list[tuple[str, int]]:
    wrong = next((name for name, value in table.items() if type(value) is not int or value < 1), None)
    if wrong is not None:
        raise LayoutError(f"fact {wrong} must be a number above 0, got {table[wrong]!r}", where=source)
    return list(table.items())
