"""Diff: two checkpoints of any format and layout, tensor by tensor: same, or how they differ and perhaps why."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckpt_tool.api.arguments import check_arguments
from ckpt_tool.api.checkpoint import DEFAULT_MEMORY_BYTES, Checkpoint, open_checkpoint
from ckpt_tool.api.convert.names_options import check_asked, names_options
from ckpt_tool.api.manifest_file import is_manifest_file, read_manifest
from ckpt_tool.api.ranks_apart import with_ranks_apart
from ckpt_tool.api.trust.diff_digests import DigestSide, diff_digests
from ckpt_tool.api.trust.diff_rows import DiffRows, select_rows
from ckpt_tool.api.trust.neighbours import NeighbourFinder
from ckpt_tool.api.trust.pairing import Pairing, name_map, pair_tensors
from ckpt_tool.api.trust.template import is_template, open_template
from ckpt_tool.api.unchanged import unchanged
from ckpt_tool.api.workers import available_cores
from ckpt_tool.compare.confirm import Confirmer, Place
from ckpt_tool.compare.reasons import Reason, explain, is_cast
from ckpt_tool.compare.report import STATUSES, DiffReport, Measures, ObjectDiff, Side, TensorDiff
from ckpt_tool.compare.tiles import ComparedPair, Pair, compare_tiles, cut_pairs
from ckpt_tool.engine.base import Progress
from ckpt_tool.engine.elements import bit_dtype
from ckpt_tool.engine.tile_reader import TileReader
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.select import texts
from ckpt_tool.plan.build import plan_reads
from ckpt_tool.plan.limits import PlanLimits

__all__ = ["DiffReport", "diff"]

_TILE_BYTES = 4 << 20  # as measured: threads wait less for the interpreter than at shorter ones, reading costs the same
_UNIT_BYTES = 32 << 20


def diff(  # noqa: PLR0913 - one argument per option of the command
    a: str | os.PathLike[str] | Checkpoint,
    b: str | os.PathLike[str] | Checkpoint,
    *,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    section: str | None = None,
    map_names: Sequence[tuple[str, str]] = (),
    strip_prefixes: str | Sequence[str] = (),
    names: Literal["auto", "exact", "hf"] = "auto",
    family: str = "auto",
    naming: str | os.PathLike[str] | None = None,
    facts: Mapping[str, int] | None = None,
    true_vocab: int | None = None,
    everything: bool = False,
    allow_cast: bool = False,
    quick: bool = False,
    reasons: bool = True,
    memory_budget_bytes: int = DEFAULT_MEMORY_BYTES,
    n_workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> DiffReport:
    """What differs between two checkpoints.

    Cost: the metadata of both, and each byte of the tensors that both have once; those that differ are read again
    where a reason is looked for.

    Args:
        a: a path, a URL, an open checkpoint, which stays open, or a JSON file of names, shapes and types that a model
            expects (see ``template``), which is all that is then compared. Or a manifest of digests: what is compared
            are digests then, those of two manifests without a look at either checkpoint.
        b: what is held against it.
        include: globs or ``re:`` patterns of names as either side has them; all when empty.
        exclude: globs or ``re:`` patterns.
        section: ``model``, ``optimizer`` or ``other``; None for all.
        map_names: (regular expression, replacement) pairs that are applied to the names of both sides, in order.
        strip_prefixes: prefixes to take off, the first that fits.
        names: ``auto`` pairs what is left without outer keys and wrapper prefixes, ``exact`` does not; ``hf`` shows
            a side of Megatron or torchtitan under the names of transformers before, as an export does: fused tensors
            apart, rows of padding left out.
        family: with ``hf``: whose names, as for an export; a side that they do not fit stays as it is.
        naming: with ``hf``: path of a TOML file with rules that go before the family's.
        facts: with ``hf``: numbers that such rules need and neither side records.
        true_vocab: with ``hf``: rows of the vocabulary that are no padding.
        everything: compare random states, extra state and objects too.
        allow_cast: a tensor that is the other one rounded to a narrower type counts as the same.
        quick: compare names, shapes and types alone; with ``hf`` rows that may be padding are read nevertheless.
        reasons: look for one that explains a difference.
        memory_budget_bytes: what buffers may take together.
        n_workers: threads; None for as many as there are cores, or as the storage likes requests.
        progress: called with the bytes compared so far, from one thread at a time.

    Raises:
        NotFound: nothing there, or no tensor matches a pattern.
        CoverageError: a tensor that is to be compared is incomplete.
        UsageError: names cannot be mapped, or meet on one side; no family's names are known, or nothing asks for them.
        LayoutError: a fact is missing that names need, or contradicts a shape.
        StorageError: the storage failed, or a file has changed while it was read.
    """
    include, exclude = texts(include), texts(exclude)
    check_arguments(names=(names, ("auto", "exact", "hf")), true_vocab=(true_vocab, 1))
    options = names_options(family, naming, facts, true_vocab)
    check_asked(options, is_asked=names == "hf")
    with_optimizer = section in (None, "optimizer")
    started = time.perf_counter()
    with ExitStack() as stack:
        tables = [not isinstance(each, Checkpoint) and is_manifest_file(each) for each in (a, b)]
        if any(tables):
            sides = [
                _digest_side(each, stack, memory_budget_bytes, n_workers, is_table=is_table)
                for each, is_table in zip((a, b), tables, strict=True)
            ]
            digest_notes: tuple[str, ...] = ()
            if names == "hf":
                from ckpt_tool.api.trust.diff_names import under_hf_names  # 8 ms that other comparisons save

                live = [side.checkpoint for side in sides]
                shown, digest_notes = under_hf_names(live, options, with_optimizer=with_optimizer)
                sides = [replace(side, checkpoint=shown.get(n, side.checkpoint)) for n, side in enumerate(sides)]
            return diff_digests(
                sides[0], sides[1], include=include, exclude=exclude, section=section, everything=everything,
                mapped=name_map(map_names, strip_prefixes), is_auto=names != "exact", is_quick=quick, started=started,
                notes=digest_notes,
            )  # fmt: skip
        one, other = (
            each if isinstance(each, Checkpoint) else stack.enter_context(_opened(each, memory_budget_bytes))
            for each in (a, b)
        )
        if not quick:
            one, other = (side if is_template(side) else with_ranks_apart(side) for side in (one, other))
        objects = _objects(one, other) if everything and not quick else ()
        notes: tuple[str, ...] = ()
        if names == "hf":
            from ckpt_tool.api.trust.diff_names import under_hf_names

            shown, notes = under_hf_names([one, other], options, with_optimizer=with_optimizer)
            one, other = shown.get(0, one), shown.get(1, other)
        templates = [name for name, side in (("A", one), ("B", other)) if is_template(side)]
        quick = quick or bool(templates)
        rows = [DiffRows(side.manifest, side.url, everything=everything) for side in (one, other)]
        select_rows(rows, include=include, exclude=exclude, section=section)
        pairing = pair_tensors(
            one.manifest,
            other.manifest,
            rows[0].taken,
            rows[1].taken,
            mapped=name_map(map_names, strip_prefixes),
            is_auto=names != "exact",
        )
        comparison = _Comparison(one, other, pairing, memory_budget_bytes, is_quick=quick, allow_cast=allow_cast)
        with nullcontext() if quick else unchanged(one, other):
            tensors = comparison.run(_n_workers(n_workers, one, other), progress, with_reasons=reasons and not quick)
        return DiffReport(
            a=_side(one, rows[0], ignores_objects=not objects),
            b=_side(other, rows[1], ignores_objects=not objects),
            tensors=tensors,
            objects=objects,
            notes=(*notes, *pairing.notes, *(f"{name} lists tensors without their bytes" for name in templates)),
            is_quick=quick,
            compared_nbytes=comparison.compared_nbytes,
            seconds=time.perf_counter() - started,
            hint=pairing.hint.text if pairing.hint and not _are_explained(tensors) else None,
        )


def _are_explained(tensors: Sequence[TensorDiff]) -> bool:
    """Whether a reason is known for every tensor that one side lacks, which other names would only hide."""
    return all(tensor.reason is not None for tensor in tensors if tensor.status.startswith("only"))


def _digest_side(
    given: str | os.PathLike[str] | Checkpoint,
    stack: ExitStack,
    budget_bytes: int,
    n_workers: int | None,
    *,
    is_table: bool,
) -> DigestSide:
    """A side of a comparison of digests: a manifest of them, or a checkpoint of which they are taken."""
    if is_table and not isinstance(given, Checkpoint):
        return DigestSide(os.fspath(given), table=read_manifest(given))
    opened = given if isinstance(given, Checkpoint) else stack.enter_context(_opened(given, budget_bytes))
    opened = opened if is_template(opened) else with_ranks_apart(opened)
    return DigestSide(opened.url, checkpoint=opened, memory_budget_bytes=budget_bytes, n_workers=n_workers)


def _opened(url: str | os.PathLike[str], memory_budget_bytes: int) -> Checkpoint:
    return open_template(url) or open_checkpoint(url, memory_budget_bytes=memory_budget_bytes)


class _Boxes:
    """Reads boxes of one checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def read(self, row: int, box: Box) -> npt.NDArray[Any]:
        """The raw elements of a box."""
        tensors = self._checkpoint.manifest.tensors
        array = self._checkpoint.read([(tensors.fqns[row], box)])[0]
        return np.ascontiguousarray(array).reshape(-1).view(bit_dtype(tensors.dtypes[row])).reshape(box.sizes)


class _Comparison:
    """The run of one diff."""

    def __init__(
        self, a: Checkpoint, b: Checkpoint, pairing: Pairing, budget_bytes: int, *, is_quick: bool, allow_cast: bool
    ) -> None:
        self._a, self._b = a, b
        self._pairing = pairing
        self._budget_bytes = budget_bytes
        self._is_quick = is_quick
        self._allow_cast = allow_cast
        self._boxes = (_Boxes(a), _Boxes(b))
        self.compared_nbytes = 0

    def run(
        self, n_workers: int, progress: Callable[[Progress], None] | None, *, with_reasons: bool
    ) -> tuple[TensorDiff, ...]:
        """Rows of the report, in its order."""
        pairs = self._pairing.pairs
        if not self._is_quick:
            for checkpoint, picked in ((self._a, [p.row_a for p in pairs]), (self._b, [p.row_b for p in pairs])):
                checkpoint.resolve([checkpoint.manifest.tensors.fqns[row] for row in picked])
        found = self._compared(n_workers, progress, self._budget_bytes // 8 if with_reasons else 0)
        confirmer = Confirmer(self._budget_bytes // 2)
        neighbours = NeighbourFinder(self._a.manifest, self._b.manifest, pairs, found, self.place, confirmer)
        rows = [self._row(pair, each) for pair, each in zip(pairs, found, strict=True)]
        if with_reasons:
            for number, (pair, each) in enumerate(zip(pairs, found, strict=True)):
                if rows[number].status != "same":
                    reason = explain(each, self.place(0, pair.row_a), self.place(1, pair.row_b), confirmer)
                    reason = reason or neighbours.explain(number)
                    rows[number] = replace(rows[number], reason=reason)
            for number, pair in enumerate(pairs):
                if rows[number].status == "differs" and rows[number].reason is None:
                    rows[number] = replace(rows[number], reason=neighbours.explain_moved(1, pair.row_b))
        for side, only in ((0, self._pairing.only_a), (1, self._pairing.only_b)):
            for row in only:
                reason = neighbours.explain_only(side, row) if with_reasons else None
                rows.append(self._only(side, row, reason))
        rows = [replace(row, reason=neighbours.told(row.reason, row.fqn)) if row.reason else row for row in rows]
        order = {status: number for number, status in enumerate(STATUSES)}
        return tuple(sorted(rows, key=lambda row: order[row.status]))

    def place(self, side: int, row: int) -> Place:
        """One tensor, for reading."""
        tensors = (self._a, self._b)[side].manifest.tensors
        return Place(self._boxes[side], row, tensors.shape_of(row), max(tensors.dtypes[row].bits // 8, 1))

    def _compared(
        self, n_workers: int, progress: Callable[[Progress], None] | None, probe_budget_bytes: int
    ) -> list[ComparedPair]:
        a, b = self._a.manifest, self._b.manifest
        limits = self._limits(n_workers)
        pairs = self._pairing.pairs
        tiles = cut_pairs(a, b, () if self._is_quick else pairs, limits)
        self.compared_nbytes = tiles.nbytes
        if not len(tiles.pair):
            return [_uncompared(a, b, pair) for pair in pairs]
        reads_a, reads_b = plan_reads(a, tiles.a), plan_reads(b, tiles.b)
        store_a, store_b = self._a.store, self._b.store
        ahead_bytes = self._budget_bytes // 8 // max(n_workers, 1)
        return compare_tiles(
            a,
            b,
            pairs,
            tiles,
            open_readers=lambda: (
                TileReader(a, tiles.a, reads_a, store_a, ahead_bytes=ahead_bytes, n_workers=n_workers),
                TileReader(b, tiles.b, reads_b, store_b, ahead_bytes=ahead_bytes, n_workers=n_workers),
            ),
            probe_budget_bytes=probe_budget_bytes,
            n_workers=n_workers,
            progress=None if progress is None else lambda done, total: progress(Progress(done, total)),
        )

    def _limits(self, n_workers: int) -> PlanLimits:
        """A worker holds a tile of each side, and of each a piece or a span of one."""
        per_worker = self._budget_bytes // 2 // max(n_workers, 1)
        max_gap_bytes = max(side.source.store.cost.max_gap_bytes for side in (self._a, self._b))
        likes = max(8 * max_gap_bytes, _TILE_BYTES)  # requests are worth more bytes where each one waits for a network
        return PlanLimits(
            max_tile_bytes=max(min(likes, per_worker // 8), 4096),
            max_odd_tile_bytes=max(per_worker // 8, 4096),
            unit_bytes=_UNIT_BYTES,
        )

    def _row(self, pair: Pair, found: ComparedPair) -> TensorDiff:
        fqn, fqn_b = self._a.manifest.tensors.fqns[pair.row_a], self._b.manifest.tensors.fqns[pair.row_b]
        status, is_accepted = "same", False
        if found.shape_a != found.shape_b:
            status = "shape"
        elif found.dtype_a != found.dtype_b:
            status = "dtype"
            is_accepted = self._allow_cast and is_cast(found)
        elif not found.is_same:
            status = "differs"
        return TensorDiff(
            fqn=fqn,
            fqn_b=None if fqn_b == fqn else fqn_b,
            status=status,
            dtype_a=found.dtype_a.name,
            dtype_b=found.dtype_b.name,
            shape_a=found.shape_a,
            shape_b=found.shape_b,
            measures=_measures(found) if found.n_tiles else None,
            is_accepted=is_accepted,
        )

    def _only(self, side: int, row: int, reason: Reason | None) -> TensorDiff:
        tensors = (self._a, self._b)[side].manifest.tensors
        dtype, shape = tensors.dtypes[row].name, tensors.shape_of(row)
        return TensorDiff(
            fqn=tensors.fqns[row],
            fqn_b=None,
            status="only-a" if side == 0 else "only-b",
            dtype_a=dtype if side == 0 else None,
            dtype_b=dtype if side == 1 else None,
            shape_a=shape if side == 0 else None,
            shape_b=shape if side == 1 else None,
            reason=reason,
        )


def _uncompared(a: Manifest, b: Manifest, pair: Pair) -> ComparedPair:
    return ComparedPair(
        a.tensors.shape_of(pair.row_a),
        b.tensors.shape_of(pair.row_b),
        a.tensors.dtypes[pair.row_a],
        b.tensors.dtypes[pair.row_b],
    )


def _measures(found: ComparedPair) -> Measures:
    counts, first = found.tally, found.first
    return Measures(
        n_compared=counts.n_compared,
        n_differing=counts.n_differing,
        n_nan_payload=counts.n_nan_payload,
        n_non_finite=counts.n_non_finite,
        n_signed_zero=counts.n_signed_zero,
        max_abs=counts.max_abs,
        max_rel=counts.max_rel,
        max_ulp=counts.max_ulp,
        first_index=found.first_index,
        first_a=first.a if first else None,
        first_b=first.b if first else None,
        bounds=found.bounds,
    )


def _objects(a: Checkpoint, b: Checkpoint) -> tuple[ObjectDiff, ...]:
    """Objects of both sides by name; several of one name (one of each rank) count as one."""
    texts: list[dict[str, str]] = []
    for checkpoint in (a, b):
        values: dict[str, list[str]] = {}
        for blob in checkpoint.load_blobs():
            values.setdefault(blob.fqn, []).append(repr(blob.value))
        texts.append({fqn: "; ".join(dict.fromkeys(each)) for fqn, each in values.items()})
    return tuple(_object_rows(*texts))


def _object_rows(a: dict[str, str], b: dict[str, str]) -> Iterator[ObjectDiff]:
    names: Iterable[str] = dict.fromkeys([*a, *b])
    for fqn in names:
        if fqn not in b:
            status = "only-a"
        elif fqn not in a:
            status = "only-b"
        else:
            status = "same" if a[fqn] == b[fqn] else "differs"
        yield ObjectDiff(fqn, status, a.get(fqn), b.get(fqn))


def _side(checkpoint: Checkpoint, rows: DiffRows, *, ignores_objects: bool) -> Side:
    tensors = checkpoint.manifest.tensors
    n_objects = len(checkpoint.manifest.blobs) if ignores_objects else 0
    return Side(
        checkpoint.url, checkpoint.format, len(tensors), int(tensors.nbytes.sum()), rows.n_noise, n_objects,
        rows.n_unselected,
    )  # fmt: skip


def _n_workers(asked: int | None, a: Checkpoint, b: Checkpoint) -> int:
    if asked is not None:
        return max(asked, 1)
    n_cores = available_cores()
    concurrency = max(side.source.store.cost.concurrency for side in (a, b))
    # Where requests wait for a network, more of them than cores are worth having under way.
    return max(n_cores, concurrency) if concurrency > 8 else n_cores
