"""A digest check holds a checkpoint against a manifest of digests; what does not agree becomes findings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.digest import FileSum, Taken, take_digests
from ckpt_tool.api.ranks_apart import with_ranks_apart
from ckpt_tool.api.trust.pairing import Pairing, name_map, pair_tensors
from ckpt_tool.checksum import crc32, crc32_combine
from ckpt_tool.dtypes import DTYPES, opaque
from ckpt_tool.engine.base import Progress
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.digest import ContentDigest, crc32_of_zeros
from ckpt_tool.manifest.digest_table import DigestTable, FileDigest
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest, TensorMeta
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, counted_of

__all__ = ["DigestCheck", "as_manifest", "check_digests"]

_VOID = re.compile(r"V(\d{1,3})")
_SLAB_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DigestCheck:
    """What a check found."""

    findings: tuple[Finding, ...]
    read_nbytes: int
    proven_nbytes: int
    """Bytes of tensors that have the recorded content."""


def check_digests(
    checkpoint: Checkpoint,
    recorded: DigestTable,
    *,
    strip_prefixes: str | Sequence[str],
    require_all: bool,
    memory_budget_bytes: int,
    n_workers: int | None,
    progress: Callable[[Progress], None] | None,
) -> DigestCheck:
    """What does not agree with a manifest.

    Tensors are paired by name, then by what a name is without outer keys and wrapper prefixes. Kinds of findings:
    ``digest-mismatch`` (error), ``not-in-manifest`` and ``not-in-checkpoint`` (warnings, errors with ``require_all``,
    and when nothing was paired at all), ``unreadable``, ``file-mismatch``; ``padded-rows`` where all that differs is
    rows at the end; and ``digests-compared`` with the counts.

    Args:
        checkpoint: open; of any format.
        recorded: the manifest.
        strip_prefixes: prefixes to take off the names of both sides, the first that fits.
        require_all: each tensor of either side must be on the other.
        memory_budget_bytes: what buffers may take together.
        n_workers: threads.
        progress: called with the bytes read so far.
    """
    checkpoint = with_ranks_apart(checkpoint)
    tensors = checkpoint.manifest.tensors
    recorded = replace(recorded, rows=recorded.known_as(tensors.index))
    expected = as_manifest(recorded)
    pairing = pair_tensors(
        expected,
        checkpoint.manifest,
        range(len(recorded.rows)),
        range(len(tensors)),
        mapped=name_map([], strip_prefixes),
        is_auto=True,
    )
    same_files = _same_files(checkpoint, recorded)
    taken = take_digests(
        checkpoint,
        [pair.row_b for pair in pairing.pairs],
        wide=recorded.is_wide,
        files=_kind(recorded) if same_files else "none",
        memory_budget_bytes=memory_budget_bytes,
        n_workers=n_workers,
        progress=progress,
    )
    findings = [
        *_mismatches(checkpoint, recorded, pairing, taken),
        *_unpaired(checkpoint, recorded, pairing, is_strict=require_all or not pairing.pairs),
    ]
    findings += _file_findings(recorded, taken.table.files) if same_files else _other_files(recorded)
    bad = {finding.fqn for finding in findings if finding.severity is Severity.ERROR}
    proven = [pair.row_b for pair in pairing.pairs if tensors.fqns[pair.row_b] not in bad]
    return DigestCheck(tuple(findings), taken.read_nbytes, int(tensors.nbytes[proven].sum()))


def as_manifest(recorded: DigestTable) -> Manifest:
    """Names, types and shapes of a table as a manifest without any bytes."""
    tensors = TensorTable.from_records(
        TensorMeta(
            row.fqn,
            DTYPES.get(row.digest.dtype) or opaque(row.digest.dtype, numel=0, nbytes=0),
            row.digest.shape,
            row.section,
            (row.fqn,),
        )
        for row in recorded.rows
    )
    files = FileTable()
    return Manifest("digests", "the manifest", tensors, ChunkTable.from_records((), tensors, files), files)


def _mismatches(checkpoint: Checkpoint, recorded: DigestTable, pairing: Pairing, taken: Taken) -> Iterator[Finding]:
    owners: dict[ContentDigest, str] = {}
    for row in recorded.rows:
        owners.setdefault(row.digest, row.fqn)
    n_equal = 0
    for pair in pairing.pairs:
        fqn, row = checkpoint.manifest.tensors.fqns[pair.row_b], recorded.rows[pair.row_a]
        if fqn in taken.unread:
            said = f"{fqn} cannot be read, so that its content is not proven: {taken.unread[fqn]}"
            yield Finding("unreadable", Severity.ERROR, said, fqn)
            continue
        found = taken.table.tensors[fqn]
        if found.matches(row.digest):
            n_equal += 1
            continue
        nameless = _nameless(found, row.digest)
        if nameless is not None:
            n_equal += 1
            said = f"{fqn} has the recorded bytes; {nameless} is no type, as numpy has no name for some"
            yield Finding("untyped", Severity.INFO, said, fqn)
            continue
        padding = _padding(checkpoint, fqn, found, row.digest)
        if padding is not None:
            n_equal += 1
            yield Finding("padded-rows", Severity.INFO, f"{fqn} {padding}", fqn)
            continue
        said = f"{fqn} has {_difference(found, row.digest)}"
        owner = owners.get(found)
        if owner is not None:
            said += f"; it is what is recorded for {owner}"
        yield Finding("digest-mismatch", Severity.ERROR, said, fqn)
    sums = "CRC-32 and 128-bit sums" if recorded.is_wide else "CRC-32"
    said = (
        f"{counted_of(n_equal, len(recorded.rows), 'recorded tensor', 'are')} here with the recorded content ({sums})"
    )
    yield Finding("digests-compared", Severity.INFO, said)
    for note in pairing.notes:
        yield Finding("names-paired", Severity.INFO, note)
    if pairing.hint is not None:
        yield Finding("names-apart", Severity.INFO, pairing.hint.text)


def _nameless(found: ContentDigest, expected: ContentDigest) -> str | None:
    """What numpy calls elements of which it knows the width alone (``V2``), where these are all that two differ in."""
    for one, other in ((found, expected), (expected, found)):
        width = _VOID.fullmatch(one.dtype)
        kind = DTYPES.get(other.dtype)
        if width and kind and kind.bits == 8 * int(width[1]) and replace(found, dtype=expected.dtype).matches(expected):
            return one.dtype
    return None


def _padding(checkpoint: Checkpoint, fqn: str, found: ContentDigest, expected: ContentDigest) -> str | None:
    """Whether all that two tensors differ in is rows at the end of one, as of a vocabulary padded for other ranks.

    Cost: where the checkpoint has more rows, those that were recorded are read once more.
    """
    dtype = checkpoint.manifest.tensors.dtypes[checkpoint.manifest.tensor_id(fqn)]
    is_alike = found.dtype == expected.dtype and found.shape[1:] == expected.shape[1:] and dtype.bits % 8 == 0
    if not is_alike or not (found.shape and expected.shape) or found.shape[0] == expected.shape[0]:
        return None
    n_rows = min(found.shape[0], expected.shape[0])
    row_nbytes = dtype.nbytes(Box.whole(found.shape[1:]).volume)
    if found.shape[0] < expected.shape[0]:
        nbytes = (expected.shape[0] - n_rows) * row_nbytes
        if crc32_combine(found.crc32, crc32_of_zeros(nbytes), nbytes) != expected.crc32:
            return None
        return (
            f"has {counted(n_rows, 'row')} with the recorded content, of {expected.shape[0]:,}; the others were zeros"
        )
    value = 0
    step = max(_SLAB_BYTES // max(row_nbytes, 1), 1)
    for first in range(0, n_rows, step):
        sizes = (min(step, n_rows - first), *found.shape[1:])
        slab = checkpoint.read([(fqn, Box((first, *(0 for _ in sizes[1:])), sizes))])[0]
        value = crc32(np.ascontiguousarray(slab).reshape(-1).view(np.uint8).data, value)
    if value != expected.crc32:
        return None
    return (
        f"has {counted(found.shape[0], 'row')}, the first {n_rows:,} with the recorded content; the others are padding"
    )


def _difference(found: ContentDigest, expected: ContentDigest) -> str:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        got = f"{found.dtype} {list(found.shape)}"
        return f"another type or shape than recorded, expected {expected.dtype} {list(expected.shape)}, got {got}"
    if found.crc32 != expected.crc32:
        return f"other content than recorded, expected CRC-32 {expected.crc32:08x}, got {found.crc32:08x}"
    return f"other content than recorded, expected sum {expected.wide:032x}, got {found.wide:032x}"


def _unpaired(checkpoint: Checkpoint, recorded: DigestTable, pairing: Pairing, *, is_strict: bool) -> Iterator[Finding]:
    severity = Severity.ERROR if is_strict else Severity.WARNING
    for row in pairing.only_b:
        fqn = checkpoint.manifest.tensors.fqns[row]
        said = f"{fqn} has no recorded digest, so that nothing proves its content"
        yield Finding("not-in-manifest", severity, said, fqn)
    for row in pairing.only_a:
        fqn = recorded.rows[row].fqn
        yield Finding("not-in-checkpoint", severity, f"{fqn} is in the manifest, but not here", fqn)


def _kind(recorded: DigestTable) -> FileSum:
    return "sha256" if any(file.sha256 is not None for file in recorded.files) else "crc32"


def _same_files(checkpoint: Checkpoint, recorded: DigestTable) -> bool:
    """Whether the checkpoint is a copy of the recorded files: the same format, most of them there and of their size.

    A reshard may have files of the same names, and other sizes.
    """
    listing = checkpoint.source.listing
    here = set(listing.paths)
    n_alike = sum(file.path in here and listing.sizes[file.path] == file.nbytes for file in recorded.files)
    return checkpoint.format == recorded.format and 2 * n_alike > len(recorded.files)


def _file_findings(recorded: DigestTable, found: Sequence[FileDigest]) -> Iterator[Finding]:
    by_path = {file.path: file for file in found}
    for expected in recorded.files:
        got = by_path.get(expected.path)
        if got is None:
            yield _file_finding(expected, f"{expected.path} is in the manifest, but not here")
        elif got.nbytes != expected.nbytes:
            sizes = f"expected {counted(expected.nbytes, 'byte')}, got {got.nbytes:,}"
            yield _file_finding(expected, f"{expected.path} has another size than recorded, {sizes}")
        elif got != expected:
            sums = [each.sha256 or f"{each.crc32:08x}" for each in (expected, got)]
            said = f"{expected.path} has other bytes than recorded, expected {sums[0]}, got {sums[1]}"
            yield _file_finding(expected, said)


def _file_finding(file: FileDigest, said: str) -> Finding:
    return Finding("file-mismatch", Severity.ERROR, said, None, FileRange(file.path, 0, 0))


def _other_files(recorded: DigestTable) -> Iterator[Finding]:
    if recorded.files:
        n = len(recorded.files)
        said = (
            f"{counted(n, 'recorded file', 'belong')} to another copy ({recorded.format}): only tensors were compared"
        )
        yield Finding("other-files", Severity.INFO, said)
