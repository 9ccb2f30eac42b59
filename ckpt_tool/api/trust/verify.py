"""Verification of a checkpoint at a path or URL: what is wrong with it, as typed findings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from ckpt_tool.api.checkpoint import DEFAULT_MEMORY_BYTES, Checkpoint, plan_limits
from ckpt_tool.api.unchanged import unchanged
from ckpt_tool.api.workers import reading_workers
from ckpt_tool.checks.absent import missing_file_findings
from ckpt_tool.checks.companions import side_files
from ckpt_tool.checks.extents import measure
from ckpt_tool.checks.other_names import with_other_names
from ckpt_tool.checks.payload import check_content, check_headers, check_metadata
from ckpt_tool.checks.report import LEVELS, VerifyReport, sort_findings
from ckpt_tool.checks.stand_ins import stand_ins, with_stand_ins
from ckpt_tool.checks.structure import structure_findings
from ckpt_tool.checks.tolerant import read_tolerantly
from ckpt_tool.checks.unowned import unowned_findings
from ckpt_tool.engine.base import Progress
from ckpt_tool.errors import CkptError, StorageError, UsageError
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.detect import detect
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.concatenate import fqn_without_rank
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.sizes import counted
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.store import Listing

__all__ = ["VerifyReport", "verify"]


def verify(  # noqa: PLR0913 - one argument per option of the command
    checkpoint: str | os.PathLike[str] | Checkpoint,
    *,
    level: str = "default",
    memory_budget_bytes: int = DEFAULT_MEMORY_BYTES,
    manifest: str | os.PathLike[str] | None = None,
    strip_prefixes: str | Sequence[str] = (),
    require_all: bool = False,
    against: str | os.PathLike[str] | Checkpoint | None = None,
    n_workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> VerifyReport:
    """A report of everything that is found wrong.

    Args:
        checkpoint: a path, a URL, or an open checkpoint, which stays open.
        level: ``quick`` looks at the listing, the metadata and headers of files, and reads no payload; ``default``
            compares each payload's own header with the metadata besides, and runs the format's own checks; ``full``
            reads every byte: recorded checksums, NaN and infinities, runs of zeros in optimizer state, stretches that
            stand twice, replicas, tied copies, padding of the vocabulary.
        memory_budget_bytes: what buffers may take together.
        manifest: a file that ``write_manifest`` wrote; every tensor is read and compared with its recorded digest.
        strip_prefixes: with ``manifest``, prefixes to take off the names of both sides, the first that fits.
        require_all: with ``manifest`` or ``against``, a tensor that only one side has is an error.
        against: another checkpoint of any format and layout; every tensor that both have is compared with it.
        n_workers: threads that read and check, or copies of this process for local files where it has no other
            thread and no torch; None for as many as there are cores, or as the storage likes requests.
        progress: at the full level, called with the bytes read so far, from one thread at a time.

    Raises:
        NotFound: nothing is there, or nothing that reads as a checkpoint.
        FormatError: its metadata cannot be read at all; a file that can be left out is a finding instead.
        StorageError: the storage failed, or at the full level a file has changed while it was read.
        UsageError: an unknown level, or a manifest at the quick one.
    """
    if level not in LEVELS:
        raise UsageError(f"{level!r} is no level of verification, expected one of {', '.join(LEVELS)}")
    started = time.perf_counter()
    recorded = None
    if manifest is not None:
        from ckpt_tool.api.manifest_file import read_manifest

        recorded = read_manifest(manifest)
    if recorded is not None and level == "quick":
        raise UsageError("the quick level reads no payload, which a manifest is compared with")
    if against is not None and level == "quick":
        raise UsageError("the quick level reads no payload", hint="ckpt diff --quick compares names, shapes and types")

    def report_of(opened: Checkpoint) -> VerifyReport:
        with unchanged(opened) if level == "full" else nullcontext():
            report = _report(opened, level, memory_budget_bytes, n_workers, progress, started)
        if against is not None:
            from ckpt_tool.api.trust.verify_against import compare_with  # with the next, 18 ms that most calls save

            compared = compare_with(
                opened, against, strip_prefixes=strip_prefixes, require_all=require_all,
                memory_budget_bytes=memory_budget_bytes, n_workers=n_workers, progress=progress,
            )  # fmt: skip
            report = replace(
                report,
                findings=sort_findings([*report.findings, *compared.findings]),
                checked_nbytes=report.checked_nbytes + compared.nbytes,
                seconds=time.perf_counter() - started,
            )
        if recorded is None:
            return report
        from ckpt_tool.api.trust.digest_check import check_digests

        checked = check_digests(
            opened,
            recorded,
            strip_prefixes=strip_prefixes,
            require_all=require_all,
            memory_budget_bytes=memory_budget_bytes,
            n_workers=n_workers,
            progress=progress,
        )
        return replace(
            report,
            findings=sort_findings([*report.findings, *checked.findings]),
            checked_nbytes=report.checked_nbytes + checked.read_nbytes,
            covered_nbytes=report.covered_nbytes + checked.proven_nbytes,
            seconds=time.perf_counter() - started,
        )

    if isinstance(checkpoint, Checkpoint):
        return _with_side_files(report_of(checkpoint), checkpoint.source, checkpoint.manifest, memory_budget_bytes)
    store, listing = open_store(checkpoint, remembers_bytes=memory_budget_bytes // 4 if level == "full" else 0)
    try:
        source = Source(store, listing)
        reader = detect(source)
        reading = read_tolerantly(reader, source)
        opened = Checkpoint(os.fspath(checkpoint), reading.source, reader, reading.manifest, memory_budget_bytes)
        report = _with_side_files(report_of(opened), reading.source, reading.manifest, memory_budget_bytes)
        return replace(report, findings=sort_findings(reading.merged(report.findings)))
    finally:
        store.close()


def _report(
    checkpoint: Checkpoint,
    level: str,
    memory_budget_bytes: int,
    n_workers: int | None,
    progress: Callable[[Progress], None] | None,
    started: float,
) -> VerifyReport:
    if level != "quick":
        _load_groups(checkpoint)
    manifest, source = checkpoint.manifest, checkpoint.source
    extents = measure(manifest, source.listing)
    structure: list[Finding] = list(with_stand_ins(structure_findings(manifest, source.listing, extents), source))
    findings = structure
    if level == "quick":
        findings = [*structure, *check_metadata(checkpoint.reader, source, manifest)]
    checked_nbytes = covered_nbytes = 0
    unproven: tuple[str, ...] = ()
    if level != "quick":
        structure += stand_ins(manifest, source)
        store = checkpoint.store
        headers = check_headers(checkpoint.reader, source, manifest, extents, store=store)
        structure += unowned_findings(manifest, source.listing, extents.has_chunk, headers.manifest.chunks)
        findings = [*structure, *headers.findings]
        if level == "full":
            content = check_content(
                checkpoint.reader,
                source,
                headers,
                store=store,
                memory_budget_bytes=memory_budget_bytes // 2,  # the other half is for decoded content and columns
                n_workers=reading_workers(n_workers, source.store.cost.concurrency),
                progress=None if progress is None else lambda done, total: progress(Progress(done, total)),
            )
            told, told_nbytes = _vocabulary(checkpoint, content.manifest, memory_budget_bytes, n_workers)
            findings = [*structure, *content.findings, *told, *headers.findings]  # of equal ones the first is kept
            checked_nbytes, covered_nbytes = content.checked_nbytes + told_nbytes, content.covered_nbytes
            unproven = content.unproven_files
    findings = [*_parts_explained(checkpoint, findings), *missing_file_findings(manifest, findings)]
    findings = list(with_other_names(findings, manifest, source.listing))
    named = {finding.where.path for finding in findings if finding.where is not None}
    coded = {entry.path: entry.part for entry in manifest.files if entry.part is not None and entry.path in named}
    return VerifyReport(
        url=checkpoint.url,
        format=manifest.format,
        level=level,
        findings=sort_findings(findings),
        n_tensors=len(manifest.tensors),
        n_chunks=len(manifest.chunks),
        n_files=manifest.files.n_stored,
        checked_nbytes=checked_nbytes,
        covered_nbytes=covered_nbytes,
        seconds=time.perf_counter() - started,
        unproven_files=unproven,
        parts={path: _on_storage(part, source.listing) for path, part in coded.items()},
    )


def _parts_explained(checkpoint: Checkpoint, findings: Sequence[Finding]) -> Sequence[Finding]:
    """``findings`` with one warning for differences between ranks that the rules of a model's family explain."""
    info = checkpoint.manifest.info
    assumed = {*info.get("replicated_by_assumption", ()), *info.get("kept_apart", ())}
    different = {
        finding.fqn
        for finding in findings
        if finding.kind in ("different-replicas", "different-shapes") and finding.severity is Severity.ERROR
    }
    parted = [fqn for fqn in dict.fromkeys(map(fqn_without_rank, checkpoint.manifest.tensors.fqns)) if fqn in different]
    if not parted or not different <= assumed:
        return findings
    from ckpt_tool.api.convert.ranks_by_rules import join_by_rules  # for files that say nothing of the mesh

    same = [fqn for fqn in info.get("replicated_by_assumption", ()) if fqn not in different]
    try:
        join = join_by_rules(checkpoint, parted, same, None)
        join.apply(checkpoint.resolve())
    except CkptError:
        return findings
    said = (
        f"{counted(len(parted), 'tensor', 'differ')} between ranks as parts of {join.ranks} do by the rules of "
        f"{join.rules.name}, and no file says so; export and reshard put them together with --unequal rules"
    )
    return [
        *(finding for finding in findings if finding.fqn not in different or finding.severity is not Severity.ERROR),
        Finding("parts-of-ranks", Severity.WARNING, said, fqn=parted[0]),
    ]


def _with_side_files(report: VerifyReport, source: Source, manifest: Manifest, budget_bytes: int) -> VerifyReport:
    """The report with what is wrong with torch files that lie beside the tensors, each looked at as one by itself."""
    for path in side_files(manifest, source.listing):
        if report.level == "quick" and source.listing.nbytes(path):
            continue
        own = Source(source.store, replace(source.listing, entry=path))
        try:
            reader = detect(own)
            opened = Checkpoint(report.url, own, reader, reader.read(own), budget_bytes)
            found = _report(opened, report.level, budget_bytes, 1, None, time.perf_counter())
        except StorageError:
            raise
        except CkptError as error:
            said = f"{path} cannot be read: {error.message}"
            finding = Finding("unreadable-file", Severity.ERROR, said, where=FileRange(path, 0, 0))
            report = replace(report, findings=sort_findings([*report.findings, finding]))
            continue
        errors = [finding for finding in found.findings if finding.severity is Severity.ERROR]
        report = replace(
            report,
            findings=sort_findings([*report.findings, *errors]),
            checked_nbytes=report.checked_nbytes + found.checked_nbytes,
            covered_nbytes=report.covered_nbytes + found.covered_nbytes,
            seconds=report.seconds + found.seconds,
            unproven_files=tuple(sorted({*report.unproven_files, *found.unproven_files})),
            parts={**found.parts, **report.parts},
        )
    return report


def _on_storage(part: FileRange, listing: Listing) -> FileRange:
    """The bytes of a coded part; length 0 where these are a file of their own."""
    is_file = not part.offset and part.length >= listing.sizes.get(part.path, 0)
    return FileRange(part.path, 0, 0) if is_file else part


def _vocabulary(
    checkpoint: Checkpoint, manifest: Manifest, memory_budget_bytes: int, n_workers: int | None
) -> tuple[list[Finding], int]:
    """Tied copies and padding rows of ``manifest``, whose chunks are resolved; and how many bytes were read."""
    from ckpt_tool.checks.vocabulary import padding_findings, tied_findings  # for the full level alone

    n_workers = reading_workers(n_workers, checkpoint.source.store.cost.concurrency)
    limits = plan_limits(memory_budget_bytes // 2, n_workers)

    def read(fqn: str, box: Box) -> npt.NDArray[Any]:
        from ckpt_tool.engine.memory import read_boxes  # most checkpoints need no engine here

        return read_boxes(manifest, checkpoint.store, [(fqn, box)], limits=limits)[0]

    tied, tied_nbytes = tied_findings(manifest, read, memory_budget_bytes=memory_budget_bytes // 2, n_workers=n_workers)
    padding, padding_nbytes = padding_findings(manifest, read, memory_budget_bytes=memory_budget_bytes // 2)
    return [*tied, *padding], tied_nbytes + padding_nbytes


def _load_groups(checkpoint: Checkpoint) -> None:
    """Load which parameters each optimizer has; what cannot be read is found by the checks."""
    rows = [row for row, blob in enumerate(checkpoint.manifest.blobs) if "param_groups" in blob.fqn]
    with suppress(CkptError):
        checkpoint.load_blobs(rows)
