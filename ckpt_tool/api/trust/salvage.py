"""Salvage: what is still wholly readable of a damaged checkpoint, in a new one, and a list of what is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np

from ckpt_tool.api.checkpoint import DEFAULT_MEMORY_BYTES, Checkpoint
from ckpt_tool.api.convert.conversion import ConversionResult, Execution, build_conversion, whole_boxes
from ckpt_tool.api.convert.rank_state import by_name
from ckpt_tool.api.digest import take_digests
from ckpt_tool.api.manifest_file import manifest_beside, write_text
from ckpt_tool.api.trust.borrow import Borrowed, borrowed
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.api.workers import moving_workers
from ckpt_tool.checks.absent import telling
from ckpt_tool.checks.extents import measure
from ckpt_tool.checks.headers import is_resolved, resolve_all, restricted
from ckpt_tool.checks.tolerant import TolerantReading, read_tolerantly
from ckpt_tool.engine.base import Progress
from ckpt_tool.errors import CkptError, NotFound, StorageError, Unsupported
from ckpt_tool.formats._hf_index import parse_index
from ckpt_tool.formats.base import Reader, Source, WriterOptions
from ckpt_tool.formats.dcp.unnamed import READER as UNNAMED
from ckpt_tool.formats.dcp.unnamed import SUFFIX
from ckpt_tool.formats.detect import detect
from ckpt_tool.formats.registry import writer as writer_named
from ckpt_tool.manifest.digest_table import DigestTable
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.subset import only_tensors
from ckpt_tool.records import dataclass
from ckpt_tool.storage.apart import check_apart
from ckpt_tool.storage.open import open_store

__all__ = ["Lost", "SalvageResult", "salvage"]

SCHEMA = "ckpt-tool/salvage/1"
SUFFIX_OF_REPORT = ".salvage.json"
# A payload that is not what was written: other errors are of metadata, or of values, which is no reason to lose them.
_DAMAGE = frozenset({"crc-mismatch", "unreadable"})
_ABSENT = frozenset({"missing-file", "empty-file", "truncated-file", "unreadable-file"})
_MANY = 32
"""From so many on, verification no longer tells which tensors of a file are meant."""
_BESIDE = frozenset({"nan", "gap"})
"""Errors that are not why something cannot be read, or say it less well."""
_TARGETS = {
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".gguf": "gguf",
    ".pt": "torch-save",
    ".pth": "torch-save",
    ".bin": "torch-save",
}


@dataclass(frozen=True, slots=True)
class Lost:
    """Something that could not be saved."""

    fqn: str
    why: str


@dataclass(frozen=True)
class SalvageResult:
    """What was saved, and what not."""

    source_url: str
    source_format: str
    result: ConversionResult
    kept: tuple[str, ...]
    """Tensors and objects."""
    lost: tuple[Lost, ...]
    unknown: tuple[str, ...]
    """What nothing that is left can tell."""
    borrowed: tuple[str, ...]
    """What another step told, and what speaks for it."""
    report_url: str

    @property
    def is_all(self) -> bool:
        """Whether nothing is known to be lost."""
        return not self.lost and not self.unknown

    def to_json(self) -> dict[str, Any]:
        """Schema ``ckpt-tool/salvage/1``.

        ``source format target``, ``kept[]``, ``lost[] {fqn why}``, ``unknown[]``, ``borrowed[]``.
        """
        return {
            "schema": SCHEMA,
            "source": self.source_url,
            "format": self.source_format,
            "target": self.result.target_url,
            "kept": list(self.kept),
            "lost": [asdict(each) for each in self.lost],
            "unknown": list(self.unknown),
            "borrowed": list(self.borrowed),
        }


def salvage(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    durable: bool = True,
    memory_budget_bytes: int = DEFAULT_MEMORY_BYTES,
    n_workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SalvageResult:
    """Write what is wholly readable to ``target``: in the source's format where that is written, else as DCP.

    A torch.save file is read up to where it was cut; files that are missing or refused are done without; a DCP
    checkpoint without ``.metadata`` gives its items, without names. A payload with another checksum than was recorded
    is lost, and so is a tensor of which any element is.

    Args:
        source: what is left.
        like: another step of the same run: what it says of structure is taken where ``source`` lacks it (``.metadata``,
            an index, Megatron's common state), no payload and no value; what it has besides is told as lost.
        target: where to write; ``target + ".salvage.json"`` lists what is kept and lost.
        overwrite: replace what is there.
        durable: fsync before the target gets its name.
        memory_budget_bytes: what buffers may take together.
        n_workers: threads.
        progress: called with the bytes read so far.

    Raises:
        NotFound: nothing that could be saved.
        UsageError: source and target do not lie apart.
    """
    url = os.fspath(source)
    check_apart(source, target)
    if like is not None:
        check_apart(like, target)
    store, listing = open_store(source)
    try:
        lent = borrowed(Source(store, listing, is_salvage=True), like) if like is not None else None
        reader, reading = _read(Source(store, listing, is_salvage=True) if lent is None else lent.source)
        opened = Checkpoint(url, reading.source, reader, reading.manifest, memory_budget_bytes)
        report = verify(opened, level="full", memory_budget_bytes=memory_budget_bytes, n_workers=n_workers)
        findings = (*reading.left_out, *report.findings)
        manifest = _readable(opened, findings)
        if lent is not None:
            manifest = _own_values(manifest, lent)
        opened = Checkpoint(url, reading.source, reader, manifest, memory_budget_bytes)
        rows = list(range(len(manifest.tensors)))
        taken = take_digests(
            opened, rows, wide=False, files="none", memory_budget_bytes=memory_budget_bytes, n_workers=n_workers,
            progress=progress,
        )  # fmt: skip
        lost = [Lost(fqn, _why(fqn, error.message, findings)) for fqn, error in taken.unread.items()]
        lost += _of_missing_files(opened)
        blobs, lost_blobs = _objects(opened)
        there = {blob.fqn for blob in manifest.blobs}
        gone = [blob.fqn for blob in reading.manifest.blobs if blob.fqn not in there]
        lost_blobs += [Lost(fqn, "its bytes are not there") for fqn in gone]
        if lent is not None:
            seen = {*taken.table.tensors, *(each.fqn for each in (*lost, *lost_blobs)), *(blob.fqn for blob in blobs)}
            lost += [
                Lost(fqn, f"not here; {like} has it: {what}") for fqn, what in lent.known.items() if fqn not in seen
            ]
        result = _write(opened, os.fspath(target), taken.table, blobs, overwrite=overwrite, durable=durable)
        unknown = [f.message for f in findings if f.kind in ("unreadable-file", "unsafe-pickle")]
        if not any(True for _ in _of_missing_files(opened)):
            unknown += [f"{path} is missing: what it held is not known" for path in _unlisted(manifest)]
        unknown += [] if reader is not UNNAMED else list(manifest.notes)
        unknown += _untold(findings, unknown, (*lost, *lost_blobs))
        done = SalvageResult(
            url,
            manifest.format,
            result,
            (*taken.table.tensors, *(blob.fqn for blob in blobs)),
            (*lost, *lost_blobs),
            tuple(unknown),
            () if lent is None else lent.notes,
            f"{manifest_beside(target).removesuffix('.digests.json')}{SUFFIX_OF_REPORT}",
        )
        text = json.dumps(done.to_json(), indent=1) + "\n"
        write_text(text, done.report_url, schema=SCHEMA, what="report of a salvage")
        return done
    finally:
        store.close()


def _read(source: Source) -> tuple[Reader, TolerantReading]:
    """The best reading of what is left."""
    try:
        reader = detect(source)
        return reader, read_tolerantly(reader, source)
    except StorageError:
        raise
    except CkptError as error:
        if not source.listing.match(f"*{SUFFIX}") or source.listing.entry is not None:
            raise
        first = error
    try:
        return UNNAMED, TolerantReading(source, UNNAMED.read(source), ())
    except NotFound:
        raise first from None


def _readable(checkpoint: Checkpoint, findings: Sequence[Finding]) -> Manifest:
    """The manifest without chunks and objects whose bytes are not there, cannot be placed or are damaged."""
    before = checkpoint.manifest
    extents = measure(before, checkpoint.source.listing)
    there = restricted(before, extents.has_chunk, extents.has_blob)
    resolved, _ = resolve_all(checkpoint.reader, checkpoint.source, there)
    usable = measure(resolved, checkpoint.source.listing).has_chunk & is_resolved(resolved)
    manifest = resolved.replace(chunks=resolved.chunks.take(np.flatnonzero(usable)))
    bad = [f.where for f in findings if f.kind in _DAMAGE and f.severity is Severity.ERROR and f.where is not None]
    chunks = manifest.chunks
    keep = np.ones(len(chunks), dtype=bool)
    unknown = [f for f in findings if f.kind == "checksum-unreadable" and f.where is not None]
    for finding in unknown:  # a checksum was recorded, and nobody knows which
        file = manifest.files.index.get(finding.where.path if finding.where is not None else "", -1)
        tensor = manifest.tensors.index.get(finding.fqn or "", -1)
        is_hit = chunks.file == file
        keep &= ~(is_hit if tensor < 0 or len(unknown) >= _MANY else is_hit & (chunks.tensor == tensor))
    for where in bad:
        row = manifest.files.index.get(where.path)
        if row is not None:
            is_hit = (chunks.offset < where.end) & (chunks.offset + chunks.length > where.offset)
            keep &= ~((chunks.file == row) & is_hit)
    return manifest.replace(chunks=chunks.take(np.flatnonzero(keep)))


def _own_values(manifest: Manifest, lent: Borrowed) -> Manifest:
    """The manifest without what only another step's files say."""
    files = [row for row, entry in enumerate(manifest.files) if entry.path in lent.of_another_step]
    if not lent.of_another_step:
        return manifest
    chunks = manifest.chunks.take(np.flatnonzero(~np.isin(manifest.chunks.file, files)))
    stored = tuple(blob for blob in manifest.blobs if blob.where is not None and not _is_in(blob, lent))
    return manifest.replace(chunks=chunks, blobs=stored)


def _is_in(blob: Blob, lent: Borrowed) -> bool:
    return blob.where is not None and blob.where.path in lent.of_another_step


def _why(fqn: str, error: str, findings: Sequence[Finding]) -> str:
    """What the verification says of a tensor, else the error that reading it gave."""
    own = (f.message for f in findings if f.fqn == fqn and f.severity is Severity.ERROR and f.kind not in _BESIDE)
    return next(own, error)


def _objects(checkpoint: Checkpoint) -> tuple[tuple[Blob, ...], list[Lost]]:
    """Objects that can be loaded, and those that cannot."""
    kept: list[Blob] = []
    lost: list[Lost] = []
    for row, blob in enumerate(checkpoint.manifest.blobs):
        try:
            kept.append(checkpoint.load_blobs([row])[row])
        except CkptError as error:  # noqa: PERF203 - one that fails must not take the others along
            lost.append(Lost(blob.fqn, str(error)))
    return by_name(tuple(kept)), lost


def _of_missing_files(checkpoint: Checkpoint) -> Iterator[Lost]:
    """Tensors that an index puts into files that are not here."""
    path = checkpoint.manifest.info.get("index")
    if not isinstance(path, str):
        return
    index = parse_index(checkpoint.source.read_whole(path), path)
    for fqn, file in index.weight_map.items():
        if fqn not in checkpoint.manifest.tensors.index and file not in checkpoint.source.listing:
            yield Lost(fqn, f"{file} is missing or unreadable")


def _untold(findings: Sequence[Finding], unknown: Sequence[str], lost: Sequence[Lost]) -> list[str]:
    """What the verification found to be missing or unreadable, and nothing says yet, as of files that hold objects."""
    is_said, names = telling([*unknown, *(each.why for each in lost)]), {each.fqn for each in lost}
    absent = [f for f in findings if f.kind in _ABSENT and f.severity is Severity.ERROR and f.fqn not in names]
    return [f.message for f in absent if f.where is not None and not is_said(f.where.path)]


def _unlisted(manifest: Manifest) -> Sequence[str]:
    return tuple(str(path) for path in manifest.info.get("missing_files") or ())


def _write(
    checkpoint: Checkpoint, url: str, kept: DigestTable, blobs: tuple[Blob, ...], *, overwrite: bool, durable: bool
) -> ConversionResult:
    manifest = checkpoint.manifest
    rows = [row for row, fqn in enumerate(manifest.tensors.fqns) if fqn in kept.tensors]
    if not rows:
        raise NotFound("nothing is left that could be saved", where=checkpoint.url)
    chosen = only_tensors(manifest, rows)
    name = _format(checkpoint.format, url)
    execution = Execution(
        DEFAULT_MEMORY_BYTES, moving_workers(), overwrite, resume=False, durable=durable,
        manifest_url=manifest_beside(url),
    )  # fmt: skip
    for own, objects in ((name, blobs if name != "safetensors" else ()), ("dcp", blobs)):
        with suppress(Unsupported):
            return build_conversion(
                checkpoint,
                chosen,
                url,
                writer=writer_named(own),
                tensors=chosen.tensors,
                boxes=whole_boxes(chosen.tensors),
                mesh=None,
                blobs=objects,
                dropped=(),
                notes=(),
                options=WriterOptions(),
                execution=execution,
            ).run()
    suffix = next((suffix for suffix, kind in _TARGETS.items() if kind == checkpoint.format), None)
    hint = None if suffix is None else f"name it by its own kind: --salvage {url}{suffix}"
    raise Unsupported(f"{name} holds not all of these types", where=checkpoint.url, hint=hint)


def _format(source: str, url: str) -> str:
    """The format to write: as the target's name says, else the source's own kind."""
    named = next((name for suffix, name in _TARGETS.items() if url.endswith(suffix)), None)
    if named is not None:
        return named
    return "safetensors" if source.startswith(("safetensors", "hf-bin")) else "dcp"
