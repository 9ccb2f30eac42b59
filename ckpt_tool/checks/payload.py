"""Payload checks look behind the manifest: headers against metadata, the format's own checks, and all bytes.

A part that fails becomes a finding, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckpt_tool.checks.extents import Extents, extent_findings, length_findings, measure
from ckpt_tool.checks.headers import finding_of, is_resolved, resolve_all, restricted
from ckpt_tool.checks.ranks import disagreeing_ranks
from ckpt_tool.checks.sharing import sharing_findings
from ckpt_tool.checks.steps import mixed_steps
from ckpt_tool.checks.strays import other_files
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.formats.base import Checksum, MetadataChecker, Reader, Source
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import FileTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted_of
from ckpt_tool.storage.store import Store

__all__ = ["Payload", "check_content", "check_headers", "check_metadata"]

_MAX_FAULTS = 32
"""After so many unreadable checksums of parts, parts are no longer searched for the readable ones."""


@dataclass(frozen=True)
class Payload:
    """What was found in payload headers or bytes."""

    manifest: Manifest
    """Chunks whose bytes are there, resolved as far as that worked."""
    findings: tuple[Finding, ...]
    stored: Manifest
    """The resolved chunks as the reader gave them, which is what its ``checksums`` starts from."""
    checked_nbytes: int = 0
    covered_nbytes: int = 0
    unproven_files: tuple[str, ...] = ()
    """The checkpoint's files of which no byte has a recorded checksum, those that describe others among them."""


def check_headers(reader: Reader, source: Source, manifest: Manifest, extents: Extents, *, store: Store) -> Payload:
    """Headers of payloads against the metadata, the format's own checks, and the optimizer's steps.

    Cost: that of ``Reader.resolve`` and ``Reader.check``, and a request for each step counter; no other payload.
    """
    there = restricted(manifest, extents.has_chunk, extents.has_blob)
    resolved, findings = resolve_all(reader, source, there)
    findings += _caught(lambda: reader.check(source, resolved), source)
    after = measure(resolved, source.listing)
    if not is_resolved(there).all():  # item ranges were judged before, payload ranges are new
        findings += extent_findings(resolved, source.listing, after)
        known = resolved.replace(chunks=resolved.chunks.take(np.flatnonzero(is_resolved(resolved))))
        findings += length_findings(known)
        findings += sharing_findings(known, measure(known, source.listing).has_chunk)
    is_usable = after.has_chunk & is_resolved(resolved)
    findings += mixed_steps(resolved, is_usable, reader=reader, source=source, store=store)
    findings += disagreeing_ranks(resolved, reader, source)
    readable = restricted(there, is_resolved(resolved), np.ones(len(there.blobs), dtype=np.bool_))
    return Payload(resolved, tuple(findings), stored=readable)


def check_metadata(reader: Reader, source: Source, manifest: Manifest) -> Iterator[Finding]:
    """What files of metadata and headers of files contradict, where the format has several; no payload is read."""
    if isinstance(reader, MetadataChecker):
        yield from _caught(lambda: reader.check_metadata(source, manifest), source)


def _caught(check: Callable[[], Iterable[Finding]], source: Source) -> Iterator[Finding]:
    try:
        yield from check()
    except StorageError:
        raise
    except CkptError as error:
        found, path = finding_of(error, "check-failed"), source.listing.named(error.where)
        yield found if path is None else replace(found, where=FileRange(path, 0, 0))


def check_content(
    reader: Reader,
    source: Source,
    headers: Payload,
    *,
    store: Store,
    memory_budget_bytes: int,
    n_workers: int,
    progress: Callable[[int, int], None] | None,
) -> Payload:
    """Recorded checksums, values, zero runs and replicas of what ``check_headers`` resolved, from every payload byte.

    Cost: each byte that a chunk or a checksum covers is read once, and those of replicas once more; memory stays within
    the budget.
    """
    # What reads every byte; the other levels start 4 ms sooner without it.
    from ckpt_tool.checks.content import scan_content
    from ckpt_tool.checks.holes import hole_findings, shortest_holes
    from ckpt_tool.checks.moments import families_of, family_members, zero_findings
    from ckpt_tool.checks.replicas import replica_findings

    manifest = headers.manifest
    extents = measure(manifest, source.listing)
    rows = np.flatnonzero(extents.has_chunk & is_resolved(manifest) & (manifest.chunks.length > 0))
    checksums, findings = _checksums(reader, source, headers.stored)
    sizes = dict(zip(manifest.files.paths, extents.file_nbytes.tolist(), strict=True))
    sizes |= source.listing.sizes
    decoded = {entry.path for entry in manifest.files if entry.codec is not None and entry.nbytes < 0}
    checksums = [c for c in checksums if c.where.path in decoded or c.where.end <= sizes.get(c.where.path, -1)]
    families = families_of(manifest)
    scan = scan_content(
        manifest,
        rows,
        checksums,
        store=store,
        wanted_zeros=np.where(family_members(manifest, families), -1, shortest_holes(manifest)),
        memory_budget_bytes=memory_budget_bytes,
        n_workers=n_workers,
        progress=progress,
    )
    findings += scan.findings
    findings += zero_findings(manifest, families, scan.zeros)
    findings += hole_findings(manifest, scan.zeros)
    differing, compared_nbytes = replica_findings(
        manifest, rows, store=store, memory_budget_bytes=memory_budget_bytes, n_workers=n_workers
    )
    findings += differing
    findings += _uncovered(manifest, checksums)
    return Payload(
        manifest,
        tuple(findings),
        headers.stored,
        checked_nbytes=scan.checked_nbytes + compared_nbytes,
        covered_nbytes=scan.covered_nbytes,
        unproven_files=_unproven(source, manifest, checksums),
    )


def _parts(manifest: Manifest) -> dict[str, str]:
    """Of each coded part the file on the storage."""
    return {entry.path: entry.part.path for entry in manifest.files if entry.part is not None}


def _covered(parts: Mapping[str, str], checksums: Sequence[Checksum]) -> set[str]:
    """The files on the storage of which some byte has a recorded checksum."""
    return {parts.get(checksum.where.path, checksum.where.path) for checksum in checksums}


def _unproven(source: Source, manifest: Manifest, checksums: Sequence[Checksum]) -> tuple[str, ...]:
    listing = source.listing
    apart = _covered(_parts(manifest), checksums) | set(other_files(manifest, listing))
    return tuple(path for path in listing.paths if path not in apart and listing.nbytes(path))


def _uncovered(manifest: Manifest, checksums: Sequence[Checksum]) -> Iterator[Finding]:
    """Files of which no byte has a recorded checksum; coded parts of one file count once."""
    parts = _parts(manifest)
    paths = [manifest.files.paths[row] for row in distinct(manifest.chunks.file).tolist()]
    used = {parts.get(path, path) for path in paths}
    bare = used - _covered(parts, checksums)
    if bare:
        said = (
            f"not covered: {counted_of(len(bare), len(used), 'file of tensors', 'record')} no checksum, so flipped "
            "bits in them go unseen"
        )
        yield Finding("not-covered", Severity.INFO, said)


def _checksums(reader: Reader, source: Source, manifest: Manifest) -> tuple[list[Checksum], list[Finding]]:
    """All recorded checksums; where a file's cannot be read, those of the others, and a finding."""
    try:
        return _sorted_out(reader.checksums(source, manifest))
    except StorageError:
        raise
    except CkptError:
        pass
    found: dict[FileRange, Checksum] = {}
    findings: list[Finding] = []
    n_faults = 0
    pending = [_of_file(manifest, number) for number in range(len(manifest.files))][::-1]
    while pending:
        part = pending.pop()
        try:
            checksums, told = _sorted_out(reader.checksums(source, part))
            found.update({checksum.where: checksum for checksum in checksums})
            findings += told
        except StorageError:
            raise
        except CkptError as error:
            halves = _halves(part)
            if halves and n_faults < _MAX_FAULTS:
                pending += halves[::-1]
            else:
                fqn = part.tensors.fqns[int(part.chunks.tensor[0])] if len(part.chunks) else None
                place = FileRange(part.files.paths[0], 0, 0)
                if len(part.chunks):  # each by itself, or equal places would be told once
                    place = FileRange(place.path, int(part.chunks.offset[0]), int(part.chunks.length[0]))
                fault = finding_of(error, "checksum-unreadable", fqn)
                n_faults += 1
                findings.append(Finding(fault.kind, fault.severity, fault.message, fqn, place))
    return list(found.values()), findings


def _sorted_out(found: Iterable[Checksum | Finding]) -> tuple[list[Checksum], list[Finding]]:
    checksums: list[Checksum] = []
    findings: list[Finding] = []
    for each in found:
        if isinstance(each, Finding):
            findings.append(each)
        else:
            checksums.append(each)
    return checksums, findings


def _of_file(manifest: Manifest, number: int) -> Manifest:
    """What lies in one file."""
    entry = manifest.files.entries[number]
    rows = np.flatnonzero(manifest.chunks.file == number)
    chunks = manifest.chunks.take(rows).replace(file=np.zeros(len(rows), dtype=np.int32))
    blobs = tuple(blob for blob in manifest.blobs if blob.where is not None and blob.where.path == entry.path)
    items = None if manifest.items is None else manifest.items.take_files(np.array([number], dtype=np.int64))
    return manifest.replace(chunks=chunks, files=FileTable((entry,)), blobs=blobs, items=items)


def _halves(part: Manifest) -> list[Manifest]:
    """Chunks and objects of one file in two parts; nothing when there is but one left."""
    n_chunks, n_blobs = len(part.chunks), len(part.blobs)
    if n_chunks + n_blobs < 2:
        return []
    middle, blob_middle = (n_chunks + 1) // 2, n_blobs // 2
    return [
        part.replace(chunks=part.chunks.take(np.arange(middle)), blobs=part.blobs[:blob_middle]),
        part.replace(chunks=part.chunks.take(np.arange(middle, n_chunks)), blobs=part.blobs[blob_middle:]),
    ]
