"""Digests of a checkpoint: what each tensor holds, whatever the format and layout, in a table small enough to keep.

They guard against accidents; they are no signature.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence

from ckpt_tool.api.checkpoint import DEFAULT_MEMORY_BYTES, Checkpoint, open_checkpoint, plan_limits
from ckpt_tool.api.ranks_apart import with_ranks_apart
from ckpt_tool.api.unchanged import unchanged
from ckpt_tool.api.workers import reading_workers
from ckpt_tool.engine.base import Progress
from ckpt_tool.engine.digest_pass import DigestPass, digest_tensors
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.manifest.digest_table import DigestRow, DigestTable, FileDigest
from ckpt_tool.manifest.select import select
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.records import dataclass
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.store import Store
from ckpt_tool.storage.summing import SummingStore
from ckpt_tool.storage.virtual.decode import open_files

__all__ = ["DigestTable", "FileSum", "Taken", "digests", "take_digests"]

_TILE_BYTES = 4 << 20  # longer than a conversion's: there is no packed copy, and threads meet less often
_BLOCK_BYTES = 4 << 20

FileSum = str
"""Which sum of whole files is taken: ``none``, ``crc32`` (on the way) or ``sha256`` (reads each file once more).

xxh3 is left out: it finds the bit rot that CRC-32 finds, at the cost of a pass; against intent only SHA-256 helps.
"""


@dataclass(frozen=True)
class Taken:
    """A table, and what is not in it."""

    table: DigestTable
    unread: dict[str, CkptError]
    """Tensors that could not be read, by fqn."""
    read_nbytes: int
    """Payload that was read."""


def digests(  # noqa: PLR0913 - one argument per option
    checkpoint: str | os.PathLike[str] | Checkpoint,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    section: str | None = None,
    wide: bool = False,
    files: FileSum = "none",
    memory_budget_bytes: int = DEFAULT_MEMORY_BYTES,
    n_workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> DigestTable:
    """The content digest of each tensor, the same for every layout and format of the same values.

    Of a tensor that ranks hold differently, and nothing places, each rank's has one (``name@rank3``).

    Cost: each byte of the tensors once, in the order of the files; with ``files`` the rest of the files besides.

    Args:
        checkpoint: a path, a URL, or an open checkpoint, which stays open.
        include: globs or ``re:`` patterns of names; all when empty.
        exclude: globs or ``re:`` patterns.
        section: ``model``, ``optimizer`` or ``other``; None for all.
        wide: take the 128-bit sums besides the CRC-32.
        files: ``none``, ``crc32`` or ``sha256`` of every file as such.
        memory_budget_bytes: what buffers may take together.
        n_workers: threads; None for as many as there are cores, or as the storage likes requests.
        progress: called with the bytes read so far, from one thread at a time.

    Raises:
        NotFound: nothing there, or no tensor matches a pattern.
        CoverageError: a tensor is incomplete.
        StorageError: something cannot be read.
    """
    if not isinstance(checkpoint, Checkpoint):
        with open_checkpoint(checkpoint, memory_budget_bytes=memory_budget_bytes) as opened:
            return digests(
                opened, include=include, exclude=exclude, section=section, wide=wide, files=files,
                memory_budget_bytes=memory_budget_bytes, n_workers=n_workers, progress=progress,
            )  # fmt: skip
    checkpoint = with_ranks_apart(checkpoint)
    sections = () if section is None else (section,)
    rows = select(checkpoint.manifest, include=include, exclude=exclude, sections=sections).tolist()
    taken = take_digests(
        checkpoint, rows, wide=wide, files=files, memory_budget_bytes=memory_budget_bytes, n_workers=n_workers,
        progress=progress,
    )  # fmt: skip
    for error in taken.unread.values():
        raise error
    return taken.table


def take_digests(
    checkpoint: Checkpoint,
    rows: Sequence[int],
    *,
    wide: bool,
    files: FileSum,
    memory_budget_bytes: int,
    n_workers: int | None,
    progress: Callable[[Progress], None] | None = None,
) -> Taken:
    """Digests of the tensors at ``rows`` that can be read, and why others cannot."""
    base = checkpoint.source.store
    n_threads = reading_workers(n_workers, base.cost.concurrency)
    unread = _resolved(checkpoint, list(rows))
    manifest = checkpoint.manifest
    left = [row for row in rows if row not in unread]
    summing = SummingStore(base)
    is_summed = files == "crc32"
    opened = open_files(summing if is_summed else base, manifest.files, memory_budget_bytes // 4)
    nbytes = int(manifest.tensors.nbytes[left].sum())
    limits = plan_limits(memory_budget_bytes // 2, n_threads, nbytes, tile_bytes=_TILE_BYTES)
    with unchanged(checkpoint):
        found = digest_tensors(
            manifest, left, opened, limits=limits, wide=wide, n_workers=n_threads,
            summing=summing if is_summed else None,
            progress=None if progress is None else lambda done, total: progress(Progress(done, total)),
        )  # fmt: skip
    table = DigestTable(manifest.format, _rows(checkpoint, found), _files(checkpoint, summing, files, n_threads))
    why = {manifest.tensors.fqns[row]: error for row, error in {**unread, **found.unread}.items()}
    return Taken(table, why, found.read_nbytes)


def _resolved(checkpoint: Checkpoint, rows: list[int]) -> dict[int, CkptError]:
    """Resolve these tensors; those whose headers contradict the metadata, with the reason."""
    fqns = checkpoint.manifest.tensors.fqns
    try:
        checkpoint.resolve([fqns[row] for row in rows])
    except StorageError:
        raise
    except CkptError as error:
        if len(rows) == 1:
            return {rows[0]: error}
        middle = len(rows) // 2
        return {**_resolved(checkpoint, rows[:middle]), **_resolved(checkpoint, rows[middle:])}
    return {}


def _rows(checkpoint: Checkpoint, found: DigestPass) -> tuple[DigestRow, ...]:
    tensors = checkpoint.manifest.tensors
    return tuple(
        DigestRow(tensors.fqns[row], SECTIONS[tensors.section[row]], digest) for row, digest in found.digests.items()
    )


def _files(checkpoint: Checkpoint, summing: SummingStore, kind: FileSum, n_threads: int) -> tuple[FileDigest, ...]:
    """Sums of all files of the checkpoint's folder, or of the one that was named."""
    listing, store = checkpoint.source.listing, checkpoint.source.store
    if kind == "none":
        return ()

    def summed(path: str) -> FileDigest:
        nbytes = listing.nbytes(path)
        if kind == "sha256":
            return FileDigest(path, nbytes, None, _sha256(store, path, nbytes))
        return FileDigest(path, nbytes, summing.file_crc32(path, nbytes))

    return tuple(fetch_all(summed, listing.paths, concurrency=n_threads))


def _sha256(store: Store, path: str, nbytes: int) -> str:
    """The SHA-256 of a file in hexadecimal; reads all of it, about 2 GB/s."""
    digest = hashlib.sha256()
    for at in range(0, nbytes, _BLOCK_BYTES):
        digest.update(store.read(path, at, min(_BLOCK_BYTES, nbytes - at)))
    return digest.hexdigest()
