"""What to do with tensors of which ranks hold different values, where no file says how these join."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.errors import IntegrityError, UsageError
from ckpt_tool.manifest.concatenate import concatenate_ranks, first_of_ranks, names_of_ranks
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.select import matching
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, shell_word

__all__ = ["Settled", "UnequalRule", "apply_unequal", "parse_unequal", "settle_unequal"]

_ASSUMED = ("replicated_by_assumption", "copies_of_ranks")
"""Lists of tensors that count as replicas though no writer compared them; the second has those of DCP without
collectives, and the norms and biases of Megatron's and DeepSpeed's tensor-parallel ranks."""
_RULE = r"(?:(?P<pattern>.+)=)?(?:first|concat:(?P<dim>\d))"


@dataclass(frozen=True, slots=True)
class UnequalRule:
    """``pattern`` (all where None) is joined along ``dim``, or is the first rank's where that is None."""

    pattern: str | None
    dim: int | None


def parse_unequal(texts: str | Sequence[str] | None) -> tuple[UnequalRule, ...]:
    """Rules as people type them: ``first``, ``concat:0``, ``GLOB=concat:1``.

    Raises:
        UsageError: not of that form.

    >>> parse_unequal("*.bias=concat:0")
    (UnequalRule(pattern='*.bias', dim=0),)
    """
    rules = []
    for text in [texts] if isinstance(texts, str) else texts or ():
        match = re.fullmatch(_RULE, text)
        if match is None:
            raise UsageError(
                f"--unequal {text!r} is no rule", hint="write first, concat:DIM, GLOB=first or GLOB=concat:DIM"
            )
        rules.append(UnequalRule(match["pattern"], None if match["dim"] is None else int(match["dim"])))
    return tuple(rules)


@dataclass(frozen=True, slots=True)
class Settled:
    """What becomes of tensors of which ranks hold different things."""

    dims: Mapping[str, int]
    """By fqn, the dimension along which ranks' parts are put one behind another."""
    first: tuple[str, ...]
    """Names under which each rank has a tensor of its own, where the first rank's is the one to take."""


def settle_unequal(checkpoint: Checkpoint, fqns: Sequence[str], rules: Sequence[UnequalRule]) -> Settled:
    """What ``rules`` say of the tensors that ranks do not share; the last rule that fits counts.

    Compares what is only taken for a replica; costs the files' checksums, or the bytes where none are recorded.

    Raises:
        IntegrityError: a tensor differs between ranks and no rule says what to do.
        NotFound: a rule's pattern fits no tensor.
    """
    manifest = checkpoint.manifest
    apart = [fqn for fqn in names_of_ranks(fqns) if fqn in manifest.info.get("kept_apart", ())]
    takes_first = all(rule == UnequalRule(None, None) for rule in rules) and bool(rules)
    unequal = _unequal(checkpoint, set() if takes_first else set(fqns), apart)
    by_fqn = _by_fqn(rules, [*fqns, *apart])
    open_ = [fqn for fqn in unequal if fqn not in by_fqn]
    if open_:
        names = ", ".join(open_[:4]) + (" ..." if len(open_) > 4 else "")
        raise IntegrityError(
            f"{counted(len(open_), 'tensor', 'differ')} between ranks and nothing says how they join ({names}); "
            f"{unequal[open_[0]].message}",
            where=checkpoint.url,
            hint=_hint(open_[0], manifest, is_apart=open_[0] in apart),
        )
    return Settled(
        {fqn: dim for fqn in dict.fromkeys((*unequal, *apart)) if (dim := by_fqn.get(fqn)) is not None},
        tuple(fqn for fqn in apart if fqn in by_fqn and by_fqn[fqn] is None),
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
    return manifest, tuple(notes)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")


def _by_fqn(rules: Sequence[UnequalRule], fqns: Sequence[str]) -> dict[str, int | None]:
    """The dimension (None: the first rank's) of each tensor that a rule fits."""
    found: dict[str, int | None] = {}
    for rule in rules:
        hits = range(len(fqns)) if rule.pattern is None else matching(rule.pattern, fqns)
        if not hits:
            raise UsageError(f"no tensor matches {rule.pattern!r} of --unequal among {len(fqns):,}")
        found.update({fqns[row]: rule.dim for row in hits})
    return found


def _unequal(checkpoint: Checkpoint, fqns: set[str], apart: Sequence[str]) -> dict[str, Finding]:
    """Tensors of ``fqns`` that are assumed to be replicas and are none, and those ``apart`` that should not be so."""
    manifest = checkpoint.manifest
    assumed = {key: [fqn for fqn in manifest.info.get(key, ()) if fqn in fqns] for key in _ASSUMED}
    if not any(assumed.values()) and not apart:
        return {}
    names = {*apart, *(fqn for listed in assumed.values() for fqn in listed)}
    rows = [row for row, fqn in enumerate(manifest.tensors.fqns) if fqn in names or fqn.partition("@rank")[0] in names]
    only = only_tensors(manifest, rows).replace(info={**assumed, "kept_apart": list(apart)})
    return {
        str(finding.fqn): finding
        for finding in checkpoint.reader.check(checkpoint.source, only)
        if finding.kind in ("different-replicas", "different-shapes") and finding.severity is Severity.ERROR
    }


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
