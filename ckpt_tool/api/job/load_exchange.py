"""The choice between reading for oneself and sharing what is read, from what is needed and what is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from ckpt_tool.errors import CkptError
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.geometry.join import Boxes, is_packed_in, join_boxes
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass
from ckpt_tool.storage.store import Store

if TYPE_CHECKING:
    from ckpt_tool.engine.distributed_group import Device, Group
    from ckpt_tool.engine.distributed_hosts import Hosts

__all__ = ["Choice", "Exchange", "choose_exchange", "needed_bytes"]

Exchange = Literal["auto", "none", "shared-memory", "all-to-all"]

_SHARED_ENOUGH = 1.25  # below this many readers per byte there is nothing to save
_PROBE_BYTES = 1 << 20
_PROBE_GAPS = 8  # a probe is so many times what costs as much as a request does, so that requests hardly count
_N_PROBES = 3
_COPY_BYTES = 2 << 20
_UNCACHED = 1.5  # times as long as the copy that is measured, whose target the last of the caches has by then
_FAST_S = 2e-3  # a probe as short as this is repeated: it may have been interrupted
_STEP_S = 2e-4  # what a rank waits at each of the others' slots, or rounds
_STEP_BYTES = 2 << 20
_ALIKE = 1.1  # estimates that close are the same, and what asks less of the storage is taken
_SHARING_S = 5e-3  # what it takes to plan who reads what for whom, and to make and map the memory for it


@dataclass(frozen=True, slots=True)
class Choice:
    """How bytes come to the ranks that need them."""

    exchange: str
    """``none``, ``shared-memory`` or ``all-to-all``."""
    why: str
    carrier: Device
    """Where an all-to-all receives on this rank, of the same type on all."""
    probe_nbytes: int = 0
    """Read by this rank to measure the storage."""


def choose_exchange(
    asked: Exchange, manifest: Manifest, everyone: Sequence[IntArray], store: Store, group: Group, hosts: Hosts,
    carrier: Device,
) -> Choice:  # fmt: skip
    """The same choice on every rank. Costs a read of at most 1 MiB and a few small exchanges where sharing could pay.

    Args:
        asked: ``auto``, or the answer.
        manifest: the checkpoint, resolved.
        everyone: the boxes of every rank, see ``engine.landing.box_rows``.
        store: where it lies.
        group: the ranks.
        hosts: where they run.
        carrier: where an all-to-all would receive, of the same type on all ranks.
    """
    if group.size == 1:
        return Choice("none", "there is one rank", carrier)
    if asked != "auto":
        return Choice(asked, "asked for", carrier)
    needed, once = needed_bytes(manifest, everyone, store.cost.max_gap_bytes)
    sharing = sum(needed) / max(once, 1)
    why = f"each byte would be read {sharing:.2f} times"
    if sharing < _SHARED_ENOUGH:
        return Choice("none", why, carrier)
    exact = _rank_bytes(everyone, _box_bytes(manifest, np.concatenate(everyone)))
    # Bytes that are read with gaps between them are copied once more, without them.
    works = {"none": _Work(max(needed), max(exact) if sum(needed) > sum(exact) else 0)}
    if max(len(ranks) for ranks in hosts.groups) > 1:
        works["shared-memory"] = _shared_work(manifest, everyone, hosts)
    if len(hosts.groups) > 1 or carrier.type != "cpu":  # on one host devices may be joined by more than its memory
        works["all-to-all"] = _Work(once / group.size, 0, -(-(once / group.size) // _STEP_BYTES) * _STEP_S)
    copies_differ = len({work.copied for work in works.values()}) > 1  # what all ways copy alike decides nothing
    read_cost, probe_nbytes, failure = 0.0, 0, None
    try:
        read_cost, probe_nbytes = _read_cost(manifest, store, group)
    except CkptError as error:
        failure = error
    read_cost, copy_cost = group.agree(failure, [read_cost, _copy_cost() if copies_differ else 0.0])
    seconds = {way: work.read * read_cost + work.copied * copy_cost + work.waiting for way, work in works.items()}
    if "all-to-all" in works:
        (send_cost,) = group.largest([group.exchange_cost(_PROBE_BYTES, carrier)])
        seconds["all-to-all"] += max(exact) * (group.size - 1) / group.size * send_cost
    least = min(seconds.values())
    best = min((way for way in works if seconds[way] <= _ALIKE * least), key=lambda way: works[way].read)
    rates = f"reading for oneself at {1e-6 / read_cost:,.0f} MB/s a rank"
    told = ", ".join(f"{_WORDS[way]} {took:.3f} s" for way, took in seconds.items())
    return Choice(best, f"{why}; {rates}: {told}{'' if copies_differ else ' besides copying'}", carrier, probe_nbytes)


_WORDS = {"none": "would take", "shared-memory": "through shared memory", "all-to-all": "through an all-to-all"}


@dataclass(frozen=True, slots=True)
class _Work:
    """What the busiest rank would do in one way."""

    read: float
    """Bytes."""
    copied: int
    """Bytes, in memory."""
    waiting: float = 0.0
    """Seconds."""


def _shared_work(manifest: Manifest, everyone: Sequence[IntArray], hosts: Hosts) -> _Work:
    """Through shared memory."""
    read, copied = 0.0, 0
    for ranks in hosts.groups:
        here = [everyone[rank] for rank in ranks]
        rows = np.concatenate(here)
        nbytes = _box_bytes(manifest, rows)
        read = max(read, _distinct_bytes(manifest, rows, nbytes) / len(ranks))
        copied = max(copied, *_rank_bytes(here, nbytes))
    return _Work(read, copied, -(-read // _STEP_BYTES) * _STEP_S + _SHARING_S)


def _box_bytes(manifest: Manifest, rows: IntArray) -> IntArray:
    """int64[n]: bytes of each box."""
    width = (rows.shape[1] - 1) // 2
    nbytes: IntArray = np.prod(rows[:, 1 + width :], axis=1) * manifest.tensors.bits[rows[:, 0]] // 8
    return nbytes


def _rank_bytes(everyone: Sequence[IntArray], nbytes: IntArray) -> list[int]:
    """Of each rank's boxes, given those of all boxes."""
    ends = np.cumsum([len(rows) for rows in everyone])
    total = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(nbytes)])
    found: list[int] = np.diff(total[ends], prepend=0).tolist()
    return found


def _distinct_bytes(manifest: Manifest, rows: IntArray, nbytes: IntArray) -> int:
    """Bytes of the different boxes; no more than the tensors have, where boxes overlap."""
    width = (rows.shape[1] - 1) // 2
    box = exact_duplicates(rows[:, 1 : 1 + width], rows[:, 1 + width :], rows[:, 0])
    of_boxes = int(nbytes[box == np.arange(len(rows))].sum())
    return min(of_boxes, int(manifest.tensors.nbytes[distinct(rows[:, 0])].sum()))


def _copy_cost() -> float:
    """Seconds per byte of a copy to memory that is in no cache, while the other ranks copy as well."""
    source, target = np.ones(_COPY_BYTES, dtype=np.uint8), np.empty(_COPY_BYTES, dtype=np.uint8)
    best = 1.0
    for _ in range(3):  # the first one pays for the memory of the target
        begun = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begun)
    return max(best * _UNCACHED / _COPY_BYTES, 1e-12)


def needed_bytes(manifest: Manifest, everyone: Sequence[IntArray], max_gap_bytes: int) -> tuple[list[int], int]:
    """Bytes that each rank would read for itself, short gaps of strided boxes included, and distinct bytes needed."""
    rows = np.concatenate(everyone)
    width = (rows.shape[1] - 1) // 2
    tensor, offsets, sizes = rows[:, 0], rows[:, 1 : 1 + width], rows[:, 1 + width :]
    bits, nbytes = manifest.tensors.bits, _box_bytes(manifest, rows)
    live = (sizes > 0).all(axis=1)
    if is_packed_in(sizes[live], manifest.tensors.shape[tensor[live]]).all():
        # A run of its tensor is a run of each chunk as well, however that is cut: there are no gaps.
        return _rank_bytes(everyone, nbytes), _distinct_bytes(manifest, rows, nbytes)
    chunks = manifest.chunks
    chunk_tensor = chunks.tensor.astype(np.int64)
    stored = distinct(exact_duplicates(chunks.offsets, chunks.sizes, chunk_tensor))
    pairs = join_boxes(
        Boxes(chunk_tensor[stored], chunks.offsets[stored], chunks.sizes[stored]), Boxes(tensor, offsets, sizes)
    )
    read = pairs.volume * bits[tensor[pairs.right]] // 8
    container = chunks.sizes[stored][pairs.left]
    strided = np.flatnonzero(~is_packed_in(pairs.sizes, container))
    if len(strided):
        run, step = _run_and_step(pairs.sizes[strided], container[strided])
        gap_bytes = (step - run) * bits[tensor[pairs.right[strided]]] // 8
        read[strided] = np.where(gap_bytes <= max_gap_bytes, read[strided] * step // run, read[strided])
    rank = np.repeat(np.arange(len(everyone)), [len(each) for each in everyone])
    needed = np.bincount(rank[pairs.right], weights=read, minlength=len(everyone)).astype(np.int64)
    return needed.tolist(), _distinct_bytes(manifest, rows, nbytes)


def _run_and_step(sizes: IntArray, container: IntArray) -> tuple[IntArray, IntArray]:
    """Elements of one contiguous run of each box in its container, and elements from one run to the next."""
    is_cut = sizes != container
    last_cut = sizes.shape[1] - 1 - np.argmax(is_cut[:, ::-1], axis=1)
    behind = np.arange(sizes.shape[1]) >= last_cut[:, None]
    run: IntArray = np.prod(np.where(behind, sizes, 1), axis=1)
    step: IntArray = np.prod(np.where(behind, container, 1), axis=1)
    return run, step


def _read_cost(manifest: Manifest, store: Store, group: Group) -> tuple[float, int]:
    """Seconds per byte of one read, while the other ranks read other chunks; and the bytes read."""
    chunks = manifest.chunks
    if not len(chunks):
        return 1e-12, 0
    largest = np.argsort(-chunks.length, kind="stable")[: _N_PROBES * group.size]
    own = largest[group.rank :: group.size] if len(largest) >= group.size else largest[:1]
    buffer = memoryview(bytearray(min(_PROBE_BYTES, _PROBE_GAPS * store.cost.max_gap_bytes)))
    best, total = 1.0, 0
    for number in range(_N_PROBES):
        chunk = int(own[number % len(own)])  # another one each time: the processor has not seen its bytes
        path, offset = manifest.files.paths[chunks.file[chunk]], int(chunks.offset[chunk])
        nbytes = min(int(chunks.length[chunk]), len(buffer))
        store.read_into(path, offset, buffer[:1])  # opening is paid once, not per byte
        begun = time.perf_counter()
        store.read_into(path, offset, buffer[:nbytes])
        seconds = time.perf_counter() - begun
        best = min(best, seconds / max(nbytes, 1))
        total += nbytes + 1
        if seconds > _FAST_S:
            break
    return max(best, 1e-12), total
