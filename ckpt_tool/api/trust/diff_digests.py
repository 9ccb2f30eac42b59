"""The difference of two checkpoints by their digests: two small files, or one of them and a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.digest import take_digests
from ckpt_tool.api.trust.diff_rows import DiffRows, select_rows
from ckpt_tool.api.trust.digest_check import as_manifest
from ckpt_tool.api.trust.pairing import NameMap, pair_tensors
from ckpt_tool.checksum import crc32_combine
from ckpt_tool.compare.reasons import Reason
from ckpt_tool.compare.report import STATUSES, DiffReport, Side, TensorDiff
from ckpt_tool.compare.tiles import Pair
from ckpt_tool.dtypes import DTYPES
from ckpt_tool.manifest.digest import ContentDigest, crc32_of_zeros
from ckpt_tool.manifest.digest_table import DigestTable
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["DigestSide", "diff_digests"]


@dataclass(frozen=True)
class DigestSide:
    """A manifest of digests, or a checkpoint whose digests are taken."""

    url: str
    table: DigestTable | None = None
    checkpoint: Checkpoint | None = None
    memory_budget_bytes: int = 0
    n_workers: int | None = None

    @property
    def manifest(self) -> Manifest:
        """Names, types and shapes."""
        if self.checkpoint is not None:
            return self.checkpoint.manifest
        return as_manifest(self.table or DigestTable("", ()))

    @property
    def format(self) -> str:
        """Of the checkpoint, or of the one that the manifest was written for."""
        return self.checkpoint.format if self.checkpoint is not None else f"digests of {self._format}"

    @property
    def _format(self) -> str:
        return "" if self.table is None else self.table.format

    def names(self) -> tuple[frozenset[str], ...]:
        """The names that its tensors have, and those of the tensors that they were made of."""
        if self.checkpoint is not None or self.table is None:
            return (frozenset(self.manifest.tensors.fqns),)
        listed = (self.table.rows, self.table.originals)
        return tuple(frozenset(row.fqn for row in rows) for rows in listed if rows)

    def known_as(self, number: int) -> DigestSide:
        """Under the names at this position of ``names()``."""
        if not number or self.table is None:
            return self
        return replace(self, table=replace(self.table, rows=self.table.originals))

    def digests(self, rows: Sequence[int], *, wide: bool) -> tuple[dict[int, ContentDigest], int]:
        """Digests by row of the manifest, and the bytes that were read for them.

        Raises:
            CkptError: a tensor cannot be read.
        """
        if self.checkpoint is None:
            table = self.table or DigestTable("", ())
            return {row: table.rows[row].digest for row in rows}, 0
        taken = take_digests(
            self.checkpoint,
            rows,
            wide=wide,
            files="none",
            memory_budget_bytes=self.memory_budget_bytes,
            n_workers=self.n_workers,
        )
        for error in taken.unread.values():
            raise error
        fqns = self.checkpoint.manifest.tensors.fqns
        return {row: taken.table.tensors[fqns[row]] for row in rows}, taken.read_nbytes


def diff_digests(  # noqa: PLR0913 - the options of a diff
    a: DigestSide,
    b: DigestSide,
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    section: str | None,
    everything: bool,
    mapped: NameMap,
    is_auto: bool,
    is_quick: bool,
    started: float,
    notes: Sequence[str],
) -> DiffReport:
    """What differs by the digests; nothing tells how much, or where.

    Where a manifest also has the digests of the tensors that its own were made of, those names are taken that the
    other side has more of. Rows of zeros at the end (a padded vocabulary) are nobody's content.
    """
    a, b, name_notes = _same_names(a, b)
    notes = [*notes, *name_notes]
    rows = [DiffRows(side.manifest, side.url, everything=everything) for side in (a, b)]
    select_rows(rows, include=include, exclude=exclude, section=section)
    one, other = rows[0].manifest, rows[1].manifest
    pairing = pair_tensors(one, other, rows[0].taken, rows[1].taken, mapped=mapped, is_auto=is_auto)
    wide = all(side.table is None or side.table.is_wide for side in (a, b))
    found_a, n_a = a.digests([] if is_quick else [pair.row_a for pair in pairing.pairs], wide=wide)
    found_b, n_b = b.digests([] if is_quick else [pair.row_b for pair in pairing.pairs], wide=wide)
    diffs = [_row(one, other, pair, found_a.get(pair.row_a), found_b.get(pair.row_b)) for pair in pairing.pairs]
    diffs += [_only("only-a", one, row) for row in pairing.only_a]
    diffs += [_only("only-b", other, row) for row in pairing.only_b]
    order = {status: number for number, status in enumerate(STATUSES)}
    sums = "CRC-32 and 128-bit sums" if wide else "CRC-32"
    if not is_quick:
        notes.append(f"digests were compared ({sums} of type, shape and bytes), no bytes")
    return DiffReport(
        a=Side(a.url, a.format, len(one.tensors), _nbytes(one), rows[0].n_noise, 0, rows[0].n_unselected),
        b=Side(b.url, b.format, len(other.tensors), _nbytes(other), rows[1].n_noise, 0, rows[1].n_unselected),
        tensors=tuple(sorted(diffs, key=lambda row: order[row.status])),
        objects=(),
        notes=(*pairing.notes, *notes),
        is_quick=is_quick,
        compared_nbytes=n_a + n_b,
        seconds=time.perf_counter() - started,
        hint=pairing.hint.text if pairing.hint else None,
    )


def _same_names(a: DigestSide, b: DigestSide) -> tuple[DigestSide, DigestSide, list[str]]:
    """Both under the names that most of their tensors share."""
    choices = [
        (len(names_a & names_b), -i - j, i, j)
        for i, names_a in enumerate(a.names())
        for j, names_b in enumerate(b.names())
    ]
    _, _, i, j = max(choices, default=(0, 0, 0, 0))
    notes = [f"{name} is compared by what its tensors were made of" for name, k in (("A", i), ("B", j)) if k]
    return a.known_as(i), b.known_as(j), notes


def _row(
    a: Manifest, b: Manifest, pair: Pair, found_a: ContentDigest | None, found_b: ContentDigest | None
) -> TensorDiff:
    tensors_a, tensors_b = a.tensors, b.tensors
    fqn, fqn_b = tensors_a.fqns[pair.row_a], tensors_b.fqns[pair.row_b]
    dtype_a, dtype_b = tensors_a.dtypes[pair.row_a].name, tensors_b.dtypes[pair.row_b].name
    shape_a, shape_b = tensors_a.shape_of(pair.row_a), tensors_b.shape_of(pair.row_b)
    status, reason = "same", None
    if shape_a != shape_b:
        status = "shape"
        reason = _padded(found_a, found_b) if found_a is not None and found_b is not None else None
    elif dtype_a != dtype_b:
        status = "dtype"
    elif found_a is not None and found_b is not None and not found_a.matches(found_b):
        status = "differs"
    other = None if fqn_b == fqn else fqn_b
    accepted = reason is not None
    return TensorDiff(fqn, other, status, dtype_a, dtype_b, shape_a, shape_b, None, reason, is_accepted=accepted)


def _padded(a: ContentDigest, b: ContentDigest) -> Reason | None:
    """Whether the longer one has nothing more than rows of zeros at the end."""
    short, long = sorted((a, b), key=lambda each: each.shape[:1])
    dtype = DTYPES.get(short.dtype)
    if dtype is None or dtype.bits % 8 or (short.dtype, short.shape[1:]) != (long.dtype, long.shape[1:]):
        return None
    if not short.shape:
        return None
    nbytes = dtype.nbytes((long.shape[0] - short.shape[0]) * prod(short.shape[1:]))
    if crc32_combine(short.crc32, crc32_of_zeros(nbytes), nbytes) != long.crc32:
        return None
    rows = (
        f"{counted(short.shape[0], 'row', 'are')} the same, and {long.shape[0] - short.shape[0]:,} behind them are "
        "zeros"
    )
    return Reason("padding-rows", rows)


def _only(status: str, manifest: Manifest, row: int) -> TensorDiff:
    fqn, dtype = manifest.tensors.fqns[row], manifest.tensors.dtypes[row].name
    shape = manifest.tensors.shape_of(row)
    if status == "only-a":
        return TensorDiff(fqn, None, status, dtype, None, shape, None)
    return TensorDiff(fqn, None, status, None, dtype, None, shape)


def _nbytes(manifest: Manifest) -> int:
    return int(manifest.tensors.nbytes.sum())
