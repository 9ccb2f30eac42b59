"""An exchange lets each byte be read by one rank of a group and carries it to the others that need it.

It is a schedule, the same on every rank because it is a pure function of the plan, and rounds of one all-to-all each,
bounded in bytes. A rank whose read fails goes on to send, with a mark, so that all ranks leave in the same round. What
is for the memory of a device arrives there, where the group's transport reaches it, and is put in place on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from ckpt_tool.dtypes import DType
from ckpt_tool.engine.distributed_group import Group
from ckpt_tool.engine.elements import bit_dtype
from ckpt_tool.engine.landing import Filler, Landing, Memory, Places, packed_nbytes, put_elements
from ckpt_tool.engine.schedule import Schedule
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.model import Plan
from ckpt_tool.records import dataclass
from ckpt_tool.storage.store import Store

__all__ = ["MIN_TILE_BYTES", "DeviceMemory", "ExchangeReport", "exchange_tile_bytes", "run_exchange"]

MIN_TILE_BYTES = 64 << 10
_MAX_TILE_BYTES = 4 << 20
_MARK_BYTES = 8
"""Before the pieces for each rank: zero, or one when the sender's read failed. Eight keep what follows aligned."""


def exchange_tile_bytes(memory_budget_bytes: int, world_size: int) -> int:
    """Size of tiles such that a round, which may carry a tile between each pair of ranks, fits three buffers."""
    return max(min(memory_budget_bytes // (4 * world_size), _MAX_TILE_BYTES), MIN_TILE_BYTES)


@dataclass(frozen=True, slots=True)
class ExchangeReport:
    """What the exchange moved on this rank."""

    n_rounds: int
    read_nbytes: int
    sent_nbytes: int
    received_nbytes: int
    max_buffer_nbytes: int
    """Largest sum of send and receive buffers in any round."""


class DeviceMemory(Memory, Protocol):
    """Memory that numpy does not reach, but a copy from the device of a group does."""

    def put_tensor(self, index: tuple[slice, ...], content: torch.Tensor, sizes: tuple[int, ...]) -> None:
        """Set the elements at ``index``, of ``sizes``, to the bits of ``content``, uint8 on any device."""
        ...


class _Traffic:
    """Written pieces that one rank sends, or receives, by round and then by the other rank."""

    def __init__(
        self, plan: Plan, plan_schedule: Schedule, nbytes: IntArray, is_mine: npt.NDArray[np.bool_], other: IntArray
    ) -> None:
        rows = np.flatnonzero(is_mine)
        position = np.empty(len(plan_schedule.order), dtype=np.int64)
        position[plan_schedule.order] = np.arange(len(position))
        tile = plan.writes.tile[rows]
        order = np.lexsort((rows, position[tile], other[rows], plan_schedule.round[tile]))
        self.rows = rows[order]
        self._round = plan_schedule.round[plan.writes.tile[self.rows]]
        self._other = other[self.rows]
        self._length = nbytes[self.rows]

    def of_round(self, number: int, world_size: int, rank: int) -> tuple[list[int], IntArray, IntArray]:
        """``(bytes per other rank with its mark, rows, byte offset of each row in the round's buffer)``."""
        low, high = np.searchsorted(self._round, [number, number + 1])
        other, length = self._other[low:high], self._length[low:high]
        payload = np.zeros(world_size, dtype=np.int64)
        np.add.at(payload, other, length)
        splits = payload + _MARK_BYTES
        splits[rank] = 0
        marks_before = other + 1 - (other > rank)
        offset = np.cumsum(length) - length + marks_before * _MARK_BYTES
        return splits.tolist(), self.rows[low:high], offset


def run_exchange(
    plan: Plan,
    plan_schedule: Schedule,
    store: Store,
    landings: Mapping[int, Landing],
    group: Group,
    carrier: torch.device,
) -> ExchangeReport:
    """Fill all landings of this rank; every rank of the group calls this with the same plan.

    While a round is under way, the next one is read.

    Args:
        plan: what is read, and for whom.
        plan_schedule: who reads it, and when.
        store: where the checkpoint lies.
        landings: by chunk of the plan's target.
        group: the ranks.
        carrier: where this rank receives, of the same type on all ranks.

    Raises:
        CkptError: a read failed on some rank.
    """
    runner = _Runner(plan, plan_schedule, store, landings, group, carrier)
    with ThreadPoolExecutor(1, thread_name_prefix="ckpt-read-ahead") as ahead:
        pending = ahead.submit(runner.read_round, 0)
        for number in range(plan_schedule.n_rounds):
            sent, splits, is_marked = pending.result()
            if number + 1 < plan_schedule.n_rounds and not is_marked:
                pending = ahead.submit(runner.read_round, number + 1)
            if runner.carry_round(number, sent, splits) or is_marked:
                break
    runner.settle()
    group.agree(runner.failure)
    return runner.report()


class _Runner:
    """The state of one exchange on one rank."""

    def __init__(
        self, plan: Plan, plan_schedule: Schedule, store: Store, landings: Mapping[int, Landing], group: Group,
        carrier: torch.device,
    ) -> None:  # fmt: skip
        self._plan, self._schedule, self._group, self._landings = plan, plan_schedule, group, landings
        self._carrier = carrier
        writes, self._nbytes = plan.writes, packed_nbytes(plan)
        reader, target = plan_schedule.reader[writes.tile], writes.file.astype(np.int64)
        self._out = _Traffic(plan, plan_schedule, self._nbytes, (reader == group.rank) & (target != group.rank), target)
        self._in = _Traffic(plan, plan_schedule, self._nbytes, (reader != group.rank) & (target == group.rank), reader)
        self._places = Places(plan, np.arange(len(plan.writes)))
        self._filler = Filler(plan, store, landings, self._places, self._take)
        self._sending: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._offset_of_row: dict[int, int] = {}
        self._received = torch.empty(0, dtype=torch.uint8, device=carrier)
        self._buffers = [self._host_memory(0)] * 2
        self.failure: BaseException | None = None
        self._sent = self._received_nbytes = self._largest = 0

    def read_round(self, number: int) -> tuple[torch.Tensor, list[int], bool]:
        """Read this rank's tiles of a round: own pieces are put in place, others into the send buffer.

        Returns the buffer, its splits, and whether it is marked as failed.
        """
        group = self._group
        splits, rows, offsets = self._out.of_round(number, group.size, group.rank)
        nbytes = sum(splits)
        if self._buffers[number % 2].numel() < nbytes:
            self._buffers[number % 2] = self._host_memory(nbytes)
        buffer = self._buffers[number % 2][:nbytes]
        self._sending = buffer.numpy()
        self._offset_of_row = dict(zip(rows.tolist(), offsets.tolist(), strict=True))
        tiles = self._schedule.order[np.searchsorted(self._schedule.round[self._schedule.order], number) :]
        tiles = tiles[self._schedule.round[tiles] == number]
        try:
            for tile in tiles[self._schedule.reader[tiles] == group.rank].tolist():
                if self.failure is None:
                    self._filler.fill(tile)
        except BaseException as error:  # noqa: BLE001 - raised on every rank once all have left the rounds
            self.failure = error
        is_marked = self.failure is not None  # once: a failure that comes now is told by the next mark
        mark = np.frombuffer(int(is_marked).to_bytes(_MARK_BYTES, "little"), dtype=np.uint8)
        at = 0
        for split in splits:
            if split:
                self._sending[at : at + _MARK_BYTES] = mark
            at += split
        return buffer, splits, is_marked

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        """Whatever the default device is; pinned where a device copies it."""
        is_pinned = nbytes > 0 and self._carrier.type == "cuda"
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)

    def _take(self, row: int, elements: npt.NDArray[Any]) -> None:
        at = self._offset_of_row[row]
        space = self._sending[at : at + int(self._nbytes[row])]
        space.view(elements.dtype).reshape(elements.shape)[...] = elements

    def carry_round(self, number: int, sent: torch.Tensor, sent_splits: list[int]) -> bool:
        """Exchange one round and place what came; True when another rank's pieces are marked as failed."""
        group = self._group
        splits, rows, offsets = self._in.of_round(number, group.size, group.rank)
        nbytes = sum(splits)
        if self._received.numel() < nbytes:
            self._received = torch.empty(nbytes, dtype=torch.uint8, device=self._carrier)
        received = self._received[:nbytes]
        group.all_to_all(received, sent, splits, sent_splits)
        self._sent += sent.numel()
        self._received_nbytes += nbytes
        self._largest = max(self._largest, nbytes + sum(buffer.numel() for buffer in self._buffers))
        starts = np.cumsum([0, *splits[:-1]])
        if received[[at for at, split in zip(starts.tolist(), splits, strict=True) if split]].any():
            return True
        if self.failure is not None:
            return False
        try:
            self._place(received, rows.tolist(), offsets.tolist())
        except BaseException as error:  # noqa: BLE001 - marked in the next round, raised on every rank
            self.failure = error
        return False

    def _place(self, received: torch.Tensor, rows: list[int], offsets: list[int]) -> None:
        """Put written pieces ``rows``, which begin at ``offsets`` of what was received, in place."""
        plan, places, is_there = self._plan, self._places, self._carrier.type != "cpu"
        host: npt.NDArray[np.uint8] | None = None  # a device's content, once some of it is for the host
        for row, at in zip(rows, offsets, strict=True):
            dtype = plan.source.tensors.dtypes[int(plan.tiles.tensor[plan.writes.tile[row]])]
            landing, end = self._landings[places.chunk[row]], at + int(self._nbytes[row])
            if is_there and _takes_tensors(landing, dtype):
                memory = cast("DeviceMemory", landing.memory)
                memory.put_tensor(places.in_box[row], received[at:end], places.sizes[row])
                continue
            host = received.cpu().numpy() if host is None else host
            elements = host[at:end].view(bit_dtype(dtype))
            piece = elements if dtype.bits % 8 else elements.reshape(places.sizes[row])
            put_elements(landing, places.in_box[row], piece, dtype)

    def settle(self) -> None:
        """Return when a device has put in place all that it was told to."""
        self._received[:1].cpu()

    def report(self) -> ExchangeReport:
        """What was moved so far."""
        return ExchangeReport(
            self._schedule.n_rounds, self._filler.read_nbytes, self._sent, self._received_nbytes, self._largest
        )


def _takes_tensors(landing: Landing, dtype: DType) -> bool:
    """Whether elements of type ``dtype`` go to the landing bit for bit, in memory that numpy does not reach."""
    return landing.memory.array is None and landing.dtype == dtype and not dtype.bits % 8
