r"""A rule says how tensors of one kind lie on a mesh: a pattern over names, and what tensor parallelism does to them.

Rules are data, read from TOML, so that a new model needs no code::

    [family]
    name = "mymodel"
    layer_pattern = "model\.layers\.(?P<layer>\d+)"  # what {layer} stands for below
    detect = ["self_attn\.q_proj\.weight$"]  # names that must occur for the family to fit
    modules = ["norms", "ends"]  # rules that come along for parts which many models have, behind those below

    [[rule]]
    match = "{layer}\.self_attn\.[qkv]_proj\.(weight|bias)"
    kind = "column"

``match`` must match the whole name. Kinds, and the dimension that tensor-parallel ranks cut (``dim`` overrides it):

- ``column``, ``vocab``: 0. ``row``: 1, and a bias (one dimension) is replicated. ``replicated``: none. ``whole``: none,
  and data-parallel ranks do not cut it either (buffers).
- ``fused``: 0, each of ``parts`` by itself: numbers are relative sizes; ``"in"`` is the size of the other dimension and
  ``"*"`` an equal share of the rest.
- ``expert``, ``expert_column``, ``expert_row``, ``expert_fused``: where the pattern has a group ``expert``, the tensor
  belongs to the rank of that expert; else dimension 0 counts experts, expert-parallel ranks cut it, and the dimensions
  above count from 1.

``stage`` is ``first``, ``last``, ``layer`` or ``all``; left out, it is ``layer`` where the pattern has a group
``layer``, else ``all``. Knows nothing of meshes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.placement import Replicate, Shard, StageName, TensorLayout
from ckpt_tool.records import dataclass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "Kind",
    "Rule",
    "RuleMatch",
    "RuleSet",
    "check_keys",
    "compiled",
    "load_rules",
    "parsed_rules",
    "typical_names",
]

Kind = Literal[
    "column", "row", "vocab", "replicated", "whole", "fused",
    "expert", "expert_column", "expert_row", "expert_fused",
]  # fmt: skip
Part = int | Literal["in", "*"]

# One record for each: equal layouts of many tensors are told by identity.
_REPLICATE, _shard = Replicate(), cache(Shard)

_MODULES = Path(__file__).with_name("modules")
_RULE_KEYS = {"match", "kind", "dim", "parts", "stage", "layer", "expert"}
_LISTS, _TABLES = ("rule", "refuse", "ignore", "flat"), ("family", "naming", "facts")
_FAMILY_KEYS = {"name", "layer_pattern", "detect", "modules"}


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of a rules file."""

    pattern: re.Pattern[str]
    kind: Kind
    dim: int | None = None
    parts: tuple[Part, ...] = ()
    stage: StageName | None = None
    layer_group: str = "layer"
    expert_group: str = "expert"

    def layout(self, shape: Sequence[int], layer: int | None, expert: int | None) -> TensorLayout:
        """How a tensor of a (global) shape lies; ``layer`` and ``expert`` are what the pattern captured of its name.

        Raises:
            LayoutError: the tensor has no such dimension, or its size does not fit the parts.
        """
        is_stacked = self.kind.startswith("expert") and expert is None
        if is_stacked and not shape:
            raise LayoutError(f"rule {self.pattern.pattern!r} finds stacked experts in a tensor without dimensions")
        dim = self._tp_dim(len(shape), int(is_stacked))
        if dim is not None and dim >= len(shape):
            raise LayoutError(f"rule {self.pattern.pattern!r} cuts dimension {dim}, the tensor has {len(shape)}")
        return TensorLayout(
            tp=_REPLICATE if dim is None else _shard(dim),
            parts=() if dim is None else self._part_sizes(shape, dim),
            ep=_shard(0) if is_stacked else _REPLICATE,
            expert=expert if self.kind.startswith("expert") else None,
            stage=self.stage or ("layer" if layer is not None else "all"),
            layer=layer,
            is_whole=self.kind == "whole",
        )

    def adapter_layout(self, side: str, shape: Sequence[int], layer: int | None, expert: int | None) -> TensorLayout:
        """How a low-rank adapter of a tensor with this rule lies: ``A`` is ``[r, in]``, ``B`` is ``[out, r]``.

        What is cut of the base weight is cut of the adapter: ``out`` of a column layer, ``in`` of a row layer. Any
        other ``side`` is replicated, and so is everything of a layer whose parts are not known from the adapter.
        """
        whole = Rule(self.pattern, "replicated", stage=self.stage)
        base = replace(whole.layout(shape, layer, None), expert=expert)
        style = self.kind.removeprefix("expert_")
        if len(shape) != 2 or "in" in self.parts:
            return base
        if side == "B" and style in ("column", "vocab", "fused"):
            return replace(base, tp=Shard(0), parts=self._part_sizes(shape, 0))
        return replace(base, tp=Shard(1)) if side == "A" and style == "row" else base

    def _tp_dim(self, ndim: int, n_stacked: int) -> int | None:
        style = self.kind.removeprefix("expert").removeprefix("_")
        if style in ("", "replicated", "whole") or (style == "row" and ndim - n_stacked <= 1):
            return None
        if self.dim is not None and ndim - n_stacked > 1:
            return self.dim
        return n_stacked + (style == "row")

    def _part_sizes(self, shape: Sequence[int], dim: int) -> tuple[int, ...]:
        if not self.parts:
            return ()
        length = shape[dim]
        weights = [part for part in self.parts if isinstance(part, int)]
        if len(weights) == len(self.parts):
            unit, rest = divmod(length, sum(weights))
            sizes = tuple(weight * unit for weight in weights)
        else:
            other = shape[1 - dim] if len(shape) == 2 and dim < 2 else length
            n_shares = self.parts.count("*")
            left = length - other * self.parts.count("in")
            share, rest = divmod(left, n_shares) if n_shares else (0, left)
            sizes = tuple(other if part == "in" else share for part in self.parts)
        if rest or min(sizes) < 0:
            raise LayoutError(
                f"rule {self.pattern.pattern!r}: dimension {dim} of shape {tuple(shape)} does not divide into parts "
                f"{list(self.parts)}",
                hint="give a rule of your own with the sizes of the parts",
            )
        return sizes


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """A rule that fits a name, and what its pattern captured."""

    rule: Rule
    layer: int | None
    expert: int | None


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules in order: the first that matches a name is the one."""

    name: str
    rules: tuple[Rule, ...]
    layer_pattern: str = ""
    detect: tuple[re.Pattern[str], ...] = ()

    def match(self, fqn: str) -> RuleMatch | None:
        """The first rule that matches the whole of ``fqn`` as it is, or None."""
        for rule in self.rules:
            found = rule.pattern.fullmatch(fqn)
            if found is not None:
                groups = found.groupdict()
                layer, expert = groups.get(rule.layer_group), groups.get(rule.expert_group)
                return RuleMatch(rule, None if layer is None else int(layer), None if expert is None else int(expert))
        return None

    def preceded_by(self, other: RuleSet) -> RuleSet:
        """These rules with those of ``other`` in front, so that they win."""
        return replace(self, name=f"{other.name}+{self.name}", rules=other.rules + self.rules)


def load_rules(text: str, *, source: str = "rules", base: RuleSet | None = None) -> RuleSet:
    """The rules in a text, TOML or JSON; those of ``base``, a family, follow, and ``{layer}`` is by default its own.

    ``source`` is named in errors: a path, usually. Reads no file but those of ``modules``, which are the package's own.

    Raises:
        LayoutError: neither TOML nor JSON, an unknown key, kind or module, or a pattern that is no regular expression.
    """
    document = parsed_rules(text, source)
    check_keys(document, {"family", "rule"}, source)
    family = document.get("family", {})
    check_keys(family, _FAMILY_KEYS, f"{source}: [family]")
    layer_pattern = family.get("layer_pattern", base.layer_pattern if base else r"(?:.*\.)?(?P<layer>\d+)")
    own = RuleSet(
        name=family.get("name", source),
        rules=(
            *_rules(document.get("rule", []), layer_pattern, source),
            *_module_rules(family.get("modules", []), layer_pattern, source),
        ),
        layer_pattern=layer_pattern,
        detect=tuple(compiled(pattern, f"{source}: detect") for pattern in family.get("detect", [])),
    )
    return own if base is None else base.preceded_by(own)


def parsed_rules(text: str, source: str) -> Mapping[str, Any]:
    """What a rules file says: TOML, or the same in JSON, which begins with a brace.

    Raises:
        LayoutError: it is neither, or what should be tables are none.
    """
    is_json = text.lstrip().startswith("{")
    try:
        document: dict[str, Any] = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # both decoders' errors are ValueErrors
        name = "JSON" if is_json else "TOML"
        hint = "rules are TOML, or the same as a JSON object: docs/layouts.md and docs/megatron.md show some"
        raise LayoutError(f"not valid {name}: {error}", where=source, hint=hint) from error
    for key, value in document.items():
        is_list = key in _LISTS
        entries = value if is_list and isinstance(value, list) else [value]
        if not (is_list or key in _TABLES):
            continue  # said to be unknown by whoever knows what there may be
        if isinstance(value, list) != is_list or not all(isinstance(entry, dict) for entry in entries):
            expected = f"a list of tables ([[{key}]])" if is_list else f"a table ([{key}])"
            raise LayoutError(f"{key} is {type(value).__name__}, expected {expected}", where=source)
    return document


def typical_names(text: str) -> tuple[str, ...]:
    """The ``detect`` patterns of a family's own rules file; the rules below them are many, and are not parsed."""
    return tuple(tomllib.loads(text.partition("[[rule]]")[0]).get("family", {}).get("detect", []))


def _module_rules(names: Any, layer_pattern: str, source: str) -> Iterator[Rule]:
    """The rules of parts that many models have, ``modules/*.toml``."""
    if not isinstance(names, list):
        raise LayoutError(f"modules is a list of names, got {names!r}", where=f"{source}: [family]")
    known = {path.stem for path in _MODULES.glob("*.toml")} if names else set()
    for name in names:
        if name not in known:
            hint = f"modules are {', '.join(sorted(known))}"
            raise LayoutError(f"no module {name!r}", where=f"{source}: [family]", hint=hint)
        yield from _module(name, layer_pattern)


@cache
def _module(name: str, layer_pattern: str) -> tuple[Rule, ...]:
    """Those of one; families with the same pattern of layers share them."""
    path = _MODULES / f"{name}.toml"
    return tuple(_rules(tomllib.loads(path.read_text(encoding="utf-8"))["rule"], layer_pattern, path.name))


def _rules(tables: Sequence[Mapping[str, Any]], layer_pattern: str, source: str) -> Iterator[Rule]:
    for number, table in enumerate(tables, start=1):
        where = f"{source}: rule {number}"
        check_keys(table, _RULE_KEYS, where)
        kind, match, dim, stage = str(table.get("kind")), table.get("match"), table.get("dim"), table.get("stage")
        if not isinstance(match, str):
            raise LayoutError("a rule needs match, a regular expression over names", where=where)
        if kind not in get_args(Kind):
            raise LayoutError(f"unknown kind {kind!r}", where=where, hint=f"one of {', '.join(get_args(Kind))}")
        if stage is not None and stage not in get_args(StageName):
            raise LayoutError(f"unknown stage {stage!r}", where=where, hint=f"one of {', '.join(get_args(StageName))}")
        if dim is not None and (not isinstance(dim, int) or dim < 0):
            raise LayoutError(f"dim must be a number from 0, got {dim!r}", where=where)
        pattern = compiled(match.replace("{layer}", layer_pattern), where)
        layer_group, expert_group = table.get("layer", "layer"), table.get("expert", "expert")
        needed = [layer_group] * ("layer" in table or stage == "layer") + [expert_group] * ("expert" in table)
        for group in needed:
            if group not in pattern.groupindex:
                raise LayoutError(f"{match!r} has no group (?P<{group}>...)", where=where)
        yield Rule(
            pattern=pattern,
            kind=cast("Kind", kind),
            dim=dim,
            parts=_checked_parts(table.get("parts", []), is_fused=kind.endswith("fused"), where=where),
            stage=cast("StageName | None", stage),
            layer_group=layer_group,
            expert_group=expert_group,
        )


def _checked_parts(parts: Any, *, is_fused: bool, where: str) -> tuple[Part, ...]:
    if is_fused != bool(parts):
        raise LayoutError("parts and a fused kind go together: give both or neither", where=where)
    are_weights = all(type(part) is int and part > 0 for part in parts)
    if not are_weights and not all(part in ("in", "*") for part in parts):
        raise LayoutError(f'parts are all numbers above 0, or all of "in" and "*"; got {parts}', where=where)
    return tuple(parts)


def check_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raise LayoutError for a key that a table of rules cannot have."""
    unknown = sorted(set(table) - known)
    if unknown:
        raise LayoutError(f"unknown key {unknown[0]!r}", where=where, hint=f"known are {', '.join(sorted(known))}")


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """A pattern of a rules file, or a LayoutError that names it."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise LayoutError(f"{pattern!r} is no regular expression: {error}", where=where) from error
