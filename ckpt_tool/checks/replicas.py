"""Replicas are equal boxes of one tensor that are stored more than once; they must hold the same bytes.

Compares stored bytes, block by block; knows no format.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt_tool.checks.extents import chunk_nbytes
from ckpt_tool.checks.places import global_indices, strides_of
from ckpt_tool.errors import CkptError
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.store import Store

__all__ = ["replica_findings", "replica_pairs"]

_BLOCK_BYTES = 1 << 20


def replica_pairs(manifest: Manifest, rows: Int64Array) -> Int64Array:
    """``int64[m, 2]``: chunks among ``rows``, each behind the first that has the same box and is stored elsewhere."""
    chunks = manifest.chunks
    rows = rows[(chunks.volume[rows] > 0)]
    first = rows[exact_duplicates(chunks.offsets[rows], chunks.sizes[rows], chunks.tensor[rows].astype(np.int64))]
    is_elsewhere = (chunks.file[first] != chunks.file[rows]) | (chunks.offset[first] != chunks.offset[rows])
    picked = np.flatnonzero((first != rows) & is_elsewhere)
    return np.stack([first[picked], rows[picked]], axis=1)


def replica_findings(
    manifest: Manifest, rows: Int64Array, *, store: Store, memory_budget_bytes: int, n_workers: int
) -> tuple[list[Finding], int]:
    """Replicas that differ, with the first element that does; and how many bytes were read.

    Args:
        manifest: ``rows`` of it are resolved.
        rows: chunks whose bytes are there.
        store: reads the manifest's files.
        memory_budget_bytes: bounds the blocks of all workers together.
        n_workers: threads.
    """
    pairs = replica_pairs(manifest, rows)
    pairs = pairs[np.argsort(manifest.chunks.file[pairs[:, 1]], kind="stable")]
    block_bytes = max(min(_BLOCK_BYTES, memory_budget_bytes // (4 * max(n_workers, 1))), 4096)
    comparison = _Comparison(manifest, store, block_bytes, memory_budget_bytes // (4 * max(n_workers, 1)))
    found = fetch_all(lambda pair: comparison.compare(*pair), pairs.tolist(), concurrency=n_workers)
    nbytes = int(chunk_nbytes(manifest, pairs.reshape(-1)).sum())
    return [finding for finding in found if finding is not None], nbytes


class _Comparison:
    """Compares pairs of chunks; safe to use from several threads."""

    def __init__(self, manifest: Manifest, store: Store, block_bytes: int, whole_bytes: int) -> None:
        self._manifest = manifest
        self._store = store
        self._block_bytes = block_bytes
        self._whole_bytes = whole_bytes
        self._assumed = frozenset(manifest.info.get("replicated_by_assumption", ()))

    def compare(self, left: int, right: int) -> Finding | None:
        """What is wrong with a pair of replicas, None when nothing is."""
        chunks, tensors = self._manifest.chunks, self._manifest.tensors
        tensor = int(chunks.tensor[left])
        ndim, bits = int(tensors.ndim[tensor]), int(tensors.bits[tensor])
        strides = [strides_of(chunks, row, ndim) for row in (left, right)]
        is_packed = all(s == contiguous_strides(tuple(chunks.sizes[left, :ndim].tolist())) for s in strides)
        is_alike = chunks.flags[left] == chunks.flags[right]
        if is_alike and is_packed and chunks.length[left] == chunks.length[right]:
            return self._guarded(left, right, max(bits // 8, 1))
        fits = int(max(chunks.length[left], chunks.length[right])) * 2 <= self._whole_bytes
        if not is_alike or bits % 8 or not fits or min(min(s, default=0) for s in strides) < 0:
            record = chunks.record(right, tensors, self._manifest.files)
            said = f"replicas of box {record.box} are stored in different ways and were not compared"
            return Finding("replicas-not-compared", Severity.INFO, said, record.fqn, record.where)
        return self._guarded(left, right, bits // 8, strides)

    def _guarded(
        self, left: int, right: int, width: int, strides: list[tuple[int, ...]] | None = None
    ) -> Finding | None:
        """Compare; a range that cannot be read is reported by the pass over the content."""
        try:
            if strides is not None:
                return self._elements(left, right, width, strides)
            return self._bytes(left, right, width)
        except CkptError:
            return None

    def _bytes(self, left: int, right: int, width: int) -> Finding | None:
        length = int(self._manifest.chunks.length[left])
        for at in range(0, length, self._block_bytes):
            n = min(self._block_bytes, length - at)
            one, other = self._read(left, at, n), self._read(right, at, n)
            if not np.array_equal(one, other):
                byte = at + int(np.argmax(one != other))
                return self._differ(left, right, byte // width, byte // width * width)
        return None

    def _elements(self, left: int, right: int, width: int, strides: list[tuple[int, ...]]) -> Finding | None:
        chunks = self._manifest.chunks
        ndim = len(strides[0])
        sizes = tuple(chunks.sizes[left, :ndim].tolist())
        views = []
        for row, steps in zip((left, right), strides, strict=True):
            raw = self._read(row, 0, int(chunks.length[row]))
            views.append(np.ndarray((*sizes, width), np.uint8, raw.data, 0, (*(s * width for s in steps), 1)))
        differs = (views[0] != views[1]).any(axis=-1)
        if not differs.any():
            return None
        index = np.unravel_index(int(np.argmax(differs)), sizes) if ndim else ()
        position = sum(int(i) * s for i, s in zip(index, strides[1], strict=True))
        return self._differ(left, right, position, position * width)

    def _read(self, row: int, at: int, n: int) -> npt.NDArray[np.uint8]:
        chunks = self._manifest.chunks
        path = self._manifest.files.paths[chunks.file[row]]
        return np.frombuffer(self._store.read(path, int(chunks.offset[row]) + at, n), dtype=np.uint8)

    def _differ(self, left: int, right: int, position: int, byte: int) -> Finding:
        """``position`` and ``byte`` are those in the right chunk."""
        chunks, tensors = self._manifest.chunks, self._manifest.tensors
        one = chunks.record(left, tensors, self._manifest.files)
        other = chunks.record(right, tensors, self._manifest.files)
        index, _ = global_indices(chunks, right, other.box.ndim, np.array([position], dtype=np.int64))
        why = "; nothing in the files says how the ranks' parts belong together" if one.fqn in self._assumed else ""
        said = (
            f"{one.where.path} and {other.where.path} hold different bytes for box {one.box}, first at index "
            f"{index[0].tolist()}, byte {other.where.offset + byte:,} of {other.where.path}{why}"
        )
        # Random states and the like are each rank's own under one name.
        is_other = SECTIONS[tensors.section[int(chunks.tensor[left])]] == "other"
        severity = Severity.WARNING if is_other else Severity.ERROR
        return Finding("different-replicas", severity, said, one.fqn, other.where)
