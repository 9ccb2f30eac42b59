"""What to do with tensors of which ranks hold different values, where no file says how these join."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.errors import IntegrityError, UsageError
from ckpt_tool.manifest.concatenate import concatenate_ranks, names_of_ranks
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.select import matching
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, shell_word

__all__ = ["UnequalRule", "apply_unequal", "parse_unequal", "settle_unequal"]

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


def settle_unequal(checkpoint: Checkpoint, fqns: Sequence[str], rules: Sequence[UnequalRule]) -> dict[str, int]:
    """The dimension along which each of the tensors that must be joined is, by ``rules``; the last that fits counts.

    Compares what is only taken for a replica; costs the files' checksums, or the bytes where none are recorded.

    Raises:
        IntegrityError: a tensor differs between ranks and no rule says what to do.
        NotFound: a rule's pattern fits no tensor.
    """
    manifest = checkpoint.manifest
    chosen = set(fqns)
    apart = [fqn for fqn, names in names_of_ranks(fqns).items() if fqn in manifest.info.get("kept_apart", ())]
    unequal = {} if all(rule == UnequalRule(None, None) for rule in rules) and rules else _unequal(checkpoint, chosen)
    by_fqn = _by_fqn(rules, [*fqns, *apart])
    open_ = [fqn for fqn in unequal if fqn not in by_fqn]
    if open_:
        names = ", ".join(open_[:4]) + (" ..." if len(open_) > 4 else "")
        raise IntegrityError(
            f"{counted(len(open_), 'tensor', 'differ')} between ranks and nothing says how they join ({names}); "
            f"{unequal[open_[0]].message}",
            where=checkpoint.url,
            hint=_hint(open_[0], manifest),
        )
    return {fqn: dim for fqn in (*unequal, *apart) if (dim := by_fqn.get(fqn)) is not None}


def apply_unequal(manifest: Manifest, dims: Mapping[str, int]) -> tuple[Manifest, tuple[str, ...]]:
    """``manifest`` with tensors joined as ``settle_unequal`` said, and a note about it."""
    if not dims:
        return manifest, ()
    shown = ", ".join(f"{fqn} along {dim}" for fqn, dim in list(dims.items())[:4]) + (" ..." if len(dims) > 4 else "")
    return concatenate_ranks(manifest, dims), (
        f"{counted(len(dims), 'tensor of ranks', 'are')} put one behind another, as --unequal says: {shown}",
    )


def _by_fqn(rules: Sequence[UnequalRule], fqns: Sequence[str]) -> dict[str, int | None]:
    """The dimension (None: the first rank's) of each tensor that a rule fits."""
    found: dict[str, int | None] = {}
    for rule in rules:
        hits = range(len(fqns)) if rule.pattern is None else matching(rule.pattern, fqns)
        if not hits:
            raise UsageError(f"no tensor fits {rule.pattern!r} of --unequal among {len(fqns):,}")
        found.update({fqns[row]: rule.dim for row in hits})
    return found


def _unequal(checkpoint: Checkpoint, fqns: set[str]) -> dict[str, Finding]:
    """Tensors of ``fqns`` that are assumed to be replicas and are none."""
    manifest = checkpoint.manifest
    assumed = [fqn for fqn in manifest.info.get("replicated_by_assumption", ()) if fqn in fqns]
    if not assumed:
        return {}
    only = manifest.replace(info={"replicated_by_assumption": assumed})
    return {
        str(finding.fqn): finding
        for finding in checkpoint.reader.check(checkpoint.source, only)
        if finding.kind == "different-replicas" and finding.severity is Severity.ERROR
    }


def _hint(fqn: str, manifest: Manifest) -> str:
    if fqn in manifest.info.get("flat_parameters", ()):
        return (
            f"a flat parameter is another part of the model on each rank; leave it out with --exclude {shell_word(fqn)}"
        )
    return (
        f"put them one behind another with --unequal '{fqn}=concat:0', take the first rank's with --unequal first, or "
        f"leave it out with --exclude {shell_word(fqn)}"
    )
