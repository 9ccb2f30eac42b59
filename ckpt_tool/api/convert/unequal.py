"""What to do with tensors of which ranks hold different values, where no file says how these join."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.ranks_apart import ASSUMED, KEPT_APART, unequal_tensors
from ckpt_tool.errors import IntegrityError, LayoutError, UsageError
from ckpt_tool.layout.family import detect_family
from ckpt_tool.layout.names import spellings
from ckpt_tool.manifest.concatenate import concatenate_ranks, first_of_ranks, names_of_ranks
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.select import matching
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, shell_word

if TYPE_CHECKING:
    from ckpt_tool.api.convert.ranks_by_rules import JoinByRules

__all__ = ["Settled", "UnequalRule", "apply_unequal", "parse_unequal", "settle_unequal"]

_RULE = r"(?:(?P<pattern>[^=]+)=)?(?P<how>first|concat|rules)(?::(?P<what>.+))?"


@dataclass(frozen=True, slots=True)
class UnequalRule:
    """What becomes of tensors that fit a pattern."""

    pattern: str | None
    """All where None."""
    how: str
    """``first``: the first rank's is taken; ``concat``: joined along ``dim``; ``rules``: as the rules say."""
    dim: int | None = None
    file: str | None = None
    """Path of the rules, None for those of the family that the names fit."""


def parse_unequal(texts: str | Sequence[str] | None) -> tuple[UnequalRule, ...]:
    """Rules as people type them: ``first``, ``concat:0``, ``GLOB=concat:1``, ``rules``, ``rules:FILE``.

    Raises:
        UsageError: not of that form.

    >>> parse_unequal("*.bias=concat:0")
    (UnequalRule(pattern='*.bias', how='concat', dim=0, file=None),)
    """
    rules = []
    for text in [texts] if isinstance(texts, str) else texts or ():
        match = re.fullmatch(_RULE, text)
        pattern, how, what = match.groups() if match else (None, "", None)
        if not how or (how == "concat") != (what is not None and what.isdecimal()) or (how == "first" and what):
            hint = "write first, concat:DIM, rules or rules:FILE, each also for some names only: GLOB=concat:DIM"
            raise UsageError(f"--unequal {text!r} is no rule", hint=hint)
        dim, file = (int(what), None) if what is not None and how == "concat" else (None, what)
        rules.append(UnequalRule(pattern, how, dim, file))
    return tuple(rules)


@dataclass(frozen=True, slots=True)
class Settled:
    """What becomes of tensors of which ranks hold different things."""

    dims: Mapping[str, int]
    """By fqn, the dimension along which ranks' parts are put one behind another."""
    first: tuple[str, ...]
    """Names under which each rank has a tensor of its own, where the first rank's is the one to take."""
    by_rules: JoinByRules | None = None
    """What is put together as rules say."""


def settle_unequal(checkpoint: Checkpoint, fqns: Sequence[str], rules: Sequence[UnequalRule]) -> Settled:
    """What ``rules`` say of the tensors that ranks do not share; the last rule that fits counts.

    Compares what is only taken for a replica; costs the files' checksums, or the bytes where none are recorded.

    Raises:
        IntegrityError: a tensor differs between ranks and no rule says what to do.
        NotFound: a rule's pattern fits no tensor.
    """
    manifest = checkpoint.manifest
    apart = [fqn for fqn in names_of_ranks(fqns) if fqn in manifest.info.get(KEPT_APART, ())]
    takes_first = all(rule == UnequalRule(None, "first") for rule in rules) and bool(rules)
    unequal = unequal_tensors(checkpoint, set() if takes_first else set(fqns), apart)
    by_fqn = _by_fqn(rules, [*fqns, *apart])
    open_ = [fqn for fqn in unequal if fqn not in by_fqn]
    if open_:
        names = ", ".join(open_[:4]) + (" ..." if len(open_) > 4 else "")
        raise IntegrityError(
            f"{counted(len(open_), 'tensor', 'differ')} between ranks and nothing says how they join ({names}); "
            f"{unequal[open_[0]].message}",
            where=checkpoint.url,
            hint=_by_rules_hint(open_, [*fqns, *apart]) + _hint(open_[0], manifest, is_apart=open_[0] in apart),
        )
    parted = [fqn for fqn in dict.fromkeys((*unequal, *apart)) if fqn in by_fqn]
    ruled = [fqn for fqn in parted if by_fqn[fqn].how == "rules"]
    join = None
    if ruled:
        from ckpt_tool.api.convert.ranks_by_rules import join_by_rules

        assumed = {fqn for key in ASSUMED for fqn in manifest.info.get(key, ())} - {*parted}
        same = [fqn for fqn, rule in by_fqn.items() if rule.how == "rules" and fqn in assumed]
        join = join_by_rules(checkpoint, ruled, same, by_fqn[ruled[-1]].file)
    return Settled(
        {fqn: dim for fqn in parted if (dim := by_fqn[fqn].dim) is not None},
        tuple(fqn for fqn in apart if fqn in by_fqn and by_fqn[fqn].how == "first"),
        join,
    )


def apply_unequal(manifest: Manifest, settled: Settled) -> tuple[Manifest, tuple[str, ...]]:
    """``manifest`` with tensors joined or taken as ``settle_unequal`` said, and notes about it."""
    notes = []
    if settled.dims:
        shown = _shown([f"{fqn} along {dim}" for fqn, dim in settled.dims.items()])
        manifest = concatenate_ranks(manifest, settled.dims)
        what = counted(len(settled.dims), "tensor of ranks", "are")
        notes.append(f"{what} put one behind another, as --unequal says: {shown}")
    if settled.first:
        manifest = first_of_ranks(manifest, settled.first)
        what = counted(len(settled.first), "tensor", "are")
        notes.append(f"{what} the first rank's, as --unequal says: {_shown(settled.first)}")
    if settled.by_rules is not None:
        manifest = settled.by_rules.apply(manifest)
        notes += settled.by_rules.notes
    return manifest, tuple(notes)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")


def _by_fqn(rules: Sequence[UnequalRule], fqns: Sequence[str]) -> dict[str, UnequalRule]:
    """The last rule that fits each tensor."""
    found: dict[str, UnequalRule] = {}
    for rule in rules:
        hits = range(len(fqns)) if rule.pattern is None else matching(rule.pattern, fqns)
        if not hits:
            raise UsageError(f"no tensor matches {rule.pattern!r} of --unequal among {len(fqns):,}")
        found.update({fqns[row]: rule for row in hits})
    return found


def _by_rules_hint(unequal: Sequence[str], fqns: Sequence[str]) -> str:
    """What to type where rules of the family that ``fqns`` fit cover all tensors that differ."""
    try:
        family = detect_family(fqns).family
    except LayoutError:
        return ""
    is_covered = all(any(family.match(s.parameter) for s in spellings(fqn, {})) for fqn in unequal)
    return f"join tensor-parallel parts as the rules of {family.name} say with --unequal rules, " if is_covered else ""


def _hint(fqn: str, manifest: Manifest, *, is_apart: bool) -> str:
    if fqn in manifest.info.get("flat_parameters", ()):
        return (
            "a flat parameter is another part of the model on each rank; say what is in it with --flat FILE, or leave "
            f"it out with --exclude {shell_word(fqn)}"
        )
    offsets = [] if is_apart else manifest.chunks.offsets[manifest.chunks.rows_of(manifest.tensor_id(fqn))].tolist()
    can_join = is_apart or (len(offsets) > 1 and all(row == offsets[0] for row in offsets))
    joined = f"put them one behind another with --unequal '{fqn}=concat:0', " if can_join else ""
    return (
        f"{joined}take the first rank's with --unequal first, or leave it out with --exclude "
        f"{shell_word(f'{fqn}@rank*' if is_apart else fqn)}"
    )
