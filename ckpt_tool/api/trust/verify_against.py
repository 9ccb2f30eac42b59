"""A verification against another checkpoint: what ``diff`` finds, as findings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.trust.diff import diff
from ckpt_tool.compare.report import TensorDiff
from ckpt_tool.engine.base import Progress
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Compared", "compare_with"]


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison found."""

    findings: tuple[Finding, ...]
    nbytes: int
    """Bytes of both sides that were compared."""


def compare_with(
    checkpoint: Checkpoint,
    other: str | os.PathLike[str] | Checkpoint,
    *,
    strip_prefixes: str | Sequence[str],
    require_all: bool,
    memory_budget_bytes: int,
    n_workers: int | None,
    progress: Callable[[Progress], None] | None,
) -> Compared:
    """What a comparison says, as findings.

    Kinds: ``differs``, ``other-shape``, ``other-type`` (errors), ``only-here``, ``only-there``, ``names-apart``,
    ``compared``.
    What only one side has is a warning, an error with ``require_all`` or where nothing is on both sides.
    """
    report = diff(
        checkpoint, other, strip_prefixes=strip_prefixes, memory_budget_bytes=memory_budget_bytes, n_workers=n_workers,
        progress=progress,
    )  # fmt: skip
    n_both = sum(tensor.status in ("same", "differs", "shape", "dtype") for tensor in report.tensors)
    lone = Severity.ERROR if require_all or not n_both else Severity.WARNING
    findings = [_finding(tensor, report.b.url, lone) for tensor in report.tensors if tensor.status != "same"]
    if report.hint is not None:
        findings.append(Finding("names-apart", Severity.INFO, report.hint))
    n_same = report.counts["same"]
    said = f"{n_same:,} of {counted(n_both, 'tensor')} that both have are bit for bit those of {report.b.url}"
    return Compared((*findings, Finding("compared", Severity.INFO, said)), report.compared_nbytes)


def _finding(tensor: TensorDiff, other: str, lone: Severity) -> Finding:
    severity = Severity.INFO if tensor.is_accepted else Severity.ERROR
    reason = f": {tensor.reason.text}" if tensor.reason is not None else ""
    if tensor.status == "only-a":
        return Finding("only-here", lone, f"{tensor.fqn} is not in {other}{reason}", tensor.fqn)
    if tensor.status == "only-b":
        return Finding("only-there", lone, f"{tensor.fqn} is in {other}, and not here{reason}", tensor.fqn)
    if tensor.status == "shape":
        said = f"{tensor.fqn} is {list(tensor.shape_a or ())} here, {list(tensor.shape_b or ())} in {other}{reason}"
        return Finding("other-shape", severity, said, tensor.fqn)
    if tensor.status == "dtype":
        return Finding(
            "other-type",
            severity,
            f"{tensor.fqn} is {tensor.dtype_a} here, {tensor.dtype_b} in {other}{reason}",
            tensor.fqn,
        )
    counts = tensor.measures
    share = "" if counts is None else f" in {counts.n_differing:,} of {counted(counts.n_compared, 'element')}"
    first = "" if counts is None or counts.first_index is None else f", the first at {list(counts.first_index)}"
    return Finding("differs", severity, f"{tensor.fqn} differs from {other}{share}{first}{reason}", tensor.fqn)
