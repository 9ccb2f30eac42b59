"""The choice between reading for oneself and sharing what is read, from what is needed and what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.storage.store import Store

if TYPE_CHECKING:
    from ckpt_tool.engine.distributed_group import Group

__all__ = ["Choice", "Exchange", "choose_exchange", "needed_bytes"]

Exchange = Literal["auto", "none", "all-to-all"]

_SHARED_ENOUGH = 1.25  # below this many readers per byte an exchange has nothing to spare
_PROBE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Choice:
    """How bytes come to the ranks that need them."""

    exchange: str
    """``none`` or ``all-to-all``."""
    why: str
    probe_nbytes: int
    """Read by this rank to measure the storage."""


def choose_exchange(
    asked: Exchange,
    manifest: Manifest,
    everyone: Sequence[IntArray],
    store: Store,
    group: Group,
    together: Callable[[Callable[[], Any]], Any],
) -> Choice:
    """The same choice on every rank. Costs a read of at most 1 MiB and two small exchanges where sharing could pay.

    Args:
        asked: ``auto``, or the answer.
        manifest: the checkpoint, resolved.
        everyone: the boxes of every rank, see ``engine.landing.box_rows``.
        store: where it lies.
        group: the ranks.
        together: runs something on every rank and raises its failure on all.
    """
    if group.size == 1:
        return Choice("none", "there is one rank", 0)
    if asked != "auto":
        return Choice(asked, "asked for", 0)
    needed, distinct = needed_bytes(manifest, everyone)
    sharing = sum(needed) / max(distinct, 1)
    if sharing < _SHARED_ENOUGH:
        return Choice("none", f"each byte is needed by {sharing:.2f} ranks", 0)
    read_cost, probe_nbytes = together(lambda: _read_cost(manifest, store, group))
    costs = group.largest([read_cost, group.exchange_cost(_PROBE_BYTES)])
    alone = max(needed) * costs[0]
    shared = distinct / group.size * costs[0] + max(needed) * (group.size - 1) / group.size * costs[1]
    why = (
        f"each byte is needed by {sharing:.2f} ranks; reading for oneself at {1e-6 / costs[0]:,.0f} MB/s a rank would "
        f"take {alone:.3f} s, sharing at {1e-6 / costs[1]:,.0f} MB/s {shared:.3f} s"
    )
    return Choice("all-to-all" if shared < alone else "none", why, probe_nbytes)


def needed_bytes(manifest: Manifest, everyone: Sequence[IntArray]) -> tuple[list[int], int]:
    """Bytes that each rank needs, and bytes of the distinct boxes of all."""
    rows = np.concatenate(everyone)
    width = (rows.shape[1] - 1) // 2
    offsets, sizes = rows[:, 1 : 1 + width], rows[:, 1 + width :]
    nbytes = np.prod(sizes, axis=1) * manifest.tensors.bits[rows[:, 0]] // 8
    rank = np.repeat(np.arange(len(everyone)), [len(each) for each in everyone])
    needed = np.bincount(rank, weights=nbytes, minlength=len(everyone)).astype(np.int64)
    first = exact_duplicates(offsets, sizes, rows[:, 0])
    return needed.tolist(), int(nbytes[np.unique(first)].sum())


def _read_cost(manifest: Manifest, store: Store, group: Group) -> tuple[float, int]:
    """Seconds per byte of one read, while the other ranks read other chunks; and the bytes read."""
    chunks = manifest.chunks
    if not len(chunks):
        return 1e-12, 0
    largest = np.argsort(-chunks.length, kind="stable")[: group.size]
    chunk = int(largest[group.rank % len(largest)])
    buffer = bytearray(min(int(chunks.length[chunk]), _PROBE_BYTES))
    path = manifest.files.paths[chunks.file[chunk]]
    store.read_into(path, int(chunks.offset[chunk]), memoryview(buffer)[:1])  # opening is paid once, not per byte
    begun = time.perf_counter()
    store.read_into(path, int(chunks.offset[chunk]), memoryview(buffer))
    return max((time.perf_counter() - begun) / max(len(buffer), 1), 1e-12), len(buffer) + 1
