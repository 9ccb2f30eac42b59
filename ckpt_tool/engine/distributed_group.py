"""A group is the ranks that load together, with the few collectives that it takes; one rank without torch.distributed.

Every call is made by all ranks in the same order. What fails on one rank is raised on all of them, named by its rank.
Waiting is bounded by ``timeout_s``. Carries bytes and integers only, never pickles.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ckpt_tool.engine.distributed_roll_call import RollCall
from ckpt_tool.errors import CkptError, StorageError, UsageError
from ckpt_tool.sizes import counted

__all__ = ["Device", "Group"]

Device: TypeAlias = torch.device

_MAX_TEXT_BYTES = 1 << 20
_HEAD_BYTES = 128 << 10  # of a broadcast whose length only the first rank knows; most end within it
_FEW_NUMBERS = 2_048  # go with the number of rows that follow: most states have few boxes
_FEW_NUMBERS_OF_ALL = 1 << 18
_LOOK_S = 0.05  # between two looks whether the others are alive
_POLL_S = 5e-5
_SOURCE_LINE = re.compile(r"^\[[^\]]*\] *")  # that gloo puts in front of what it says
_KINDS: dict[str, type[CkptError]] = {
    kind.__name__: kind for child in CkptError.__subclasses__() for kind in (child, *child.__subclasses__())
}


class Group:
    """The ranks of a torch process group, or this process alone."""

    def __init__(self, process_group: Any = None, *, timeout_s: float) -> None:
        self._group = process_group
        self._timeout = timedelta(seconds=timeout_s)
        self.timeout_s = timeout_s
        is_joined = dist.is_available() and dist.is_initialized()
        if process_group is not None and not is_joined:
            raise UsageError("a process group was given, but torch.distributed is not initialised")
        self.size: int = dist.get_world_size(process_group) if is_joined else 1
        self.rank: int = dist.get_rank(process_group) if is_joined else 0
        if self.rank < 0:
            raise UsageError("this rank does not belong to the process group that it was given")
        self.process_group: Any = (process_group or dist.group.WORLD) if is_joined else None
        """torch's object, for what is kept as long as it lives; None without torch.distributed."""
        self._roll_call = RollCall(self.process_group, self.rank, self.size) if self.size > 1 else None
        self._root = dist.get_global_rank(process_group, 0) if is_joined and process_group is not None else 0
        self._kinds = _kinds_of(self.process_group) if is_joined else ("cpu",)
        self.device = _device_of(self.process_group) if is_joined else torch.device("cpu")
        """Where the tensors of its small collectives are."""

    @property
    def backend(self) -> str:
        """Name of the transport, ``none`` for one rank."""
        return str(dist.get_backend(self._group)) if self.size > 1 else "none"

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest value of any rank, for each position."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        self._wait(dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group, async_op=True))
        found: list[float] = numbers.tolist()
        return found

    def gather_row(self, row: Sequence[int], failure: BaseException | None = None) -> npt.NDArray[np.int64]:
        """``int64[size, n]``: the row of every rank, of the same length on all. One collective.

        Raises:
            CkptError: some rank has a ``failure``: the first one's error, on every rank.
        """
        if self.size == 1:
            self.agree(failure)
            return np.array([row], dtype=np.int64)
        rows = self._all_gather(np.array([failure is not None, *row], dtype=np.int64)).reshape(self.size, -1)
        if rows[:, 0].any():
            self._raise_first(failure)
        return rows[:, 1:]

    def gather(self, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """The rows of every rank; ``int64[n, width]`` with a width that is the same on all ranks. Two collectives."""
        return self.gather_noting(rows, (), None)[0]

    def gather_noting(
        self, rows: npt.NDArray[np.int64], notes: Sequence[int], failure: BaseException | None
    ) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
        """The rows of every rank, and ``int64[size, n]``: its notes. One collective, two where some have many rows.

        Raises:
            CkptError: some rank has a ``failure``; its rows are not looked at.
        """
        if self.size == 1:
            self.agree(failure)
            return [rows], np.array([notes], dtype=np.int64)
        width = rows.shape[1]
        room = min(_FEW_NUMBERS, _FEW_NUMBERS_OF_ALL // self.size)
        few = rows.reshape(-1)[:room].tolist()
        headers = self.gather_row([len(rows), *notes, *few, *[0] * (room - len(few))], failure)
        counts, noted, content = np.split(headers, [1, 1 + len(notes)], axis=1)
        counts = counts[:, 0].tolist()
        if max(counts) * width <= room:
            return [content[rank, : n * width].reshape(n, width) for rank, n in enumerate(counts)], noted
        padded = np.zeros((max(counts), width), dtype=np.int64)
        padded[: len(rows)] = rows
        if not padded.size:
            return [padded[:count] for count in counts], noted
        everyone = self._all_gather(padded.reshape(-1)).reshape(self.size, -1, width)
        return [everyone[rank, :count] for rank, count in enumerate(counts)], noted

    def gather_texts(self, text: str) -> list[str]:
        """The text of every rank."""
        data = np.frombuffer(text.encode()[:_MAX_TEXT_BYTES], dtype=np.uint8).astype(np.int64)
        texts = self.gather(data.reshape(-1, 1))
        return [part.astype(np.uint8).tobytes().decode(errors="replace") for part in texts]

    def share(self, make: Callable[[], bytes]) -> bytes:
        """What ``make`` returns on the first rank, on all of them; the others do not call it.

        Raises:
            CkptError: ``make`` failed.
        """
        if self.size == 1:
            return make()
        data, failure = b"", None
        if self.rank == 0:
            try:
                data = make()
            except BaseException as error:  # noqa: BLE001 - raised below, on every rank
                failure = error
                data = _described(error).encode()
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8, device="cpu")  # whatever the default device is
        if self.rank == 0:
            head[:16] = torch.tensor([len(data), int(failure is not None)], device="cpu").view(torch.uint8)
            start = data[: _HEAD_BYTES - 16]
            head[16 : 16 + len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8) if start else 0
        head = self._broadcast(head)
        nbytes, is_failed = head[:16].view(torch.int64).tolist()
        received: bytes = head[16 : 16 + nbytes].numpy().tobytes()
        if nbytes > len(received):
            rest = torch.empty(nbytes - len(received), dtype=torch.uint8, device="cpu")
            if self.rank == 0:
                rest = torch.frombuffer(bytearray(data[len(received) :]), dtype=torch.uint8)
            received += self._broadcast(rest).numpy().tobytes()
        if is_failed:
            raise _rebuilt(received.decode(), 0, self.size, 0) from failure
        return received

    def _broadcast(self, content: torch.Tensor) -> torch.Tensor:
        """The first rank's ``content``, in host memory."""
        moved = content.to(self.device)
        self._wait(dist.broadcast(moved, self._root, group=self._group, async_op=True))
        return moved.cpu()

    def agree(self, failure: BaseException | None, values: Sequence[float] = ()) -> list[float]:
        """The largest of ``values`` of any rank, for each position, when no rank has failed. One collective then.

        Raises:
            CkptError: some rank has failed: the first one's error, on every rank, of its class where that is ours.
        """
        if self.size == 1:
            if failure is not None:
                raise failure
            return list(values)
        is_failed, *largest = self.largest([float(failure is not None), *values])
        if is_failed:
            self._raise_first(failure)
        return largest

    def _raise_first(self, failure: BaseException | None) -> None:
        texts = self.gather_texts("" if failure is None else _described(failure))
        if failure is not None and not isinstance(failure, Exception):
            raise failure  # an interruption is for who was interrupted; to the others it is an error
        failed = [rank for rank, text in enumerate(texts) if text]
        raise _rebuilt(texts[failed[0]], failed[0], self.size, len(failed) - 1) from failure

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_splits: list[int], sent_splits: list[int]
    ) -> None:
        """Bytes to and from every rank, in rank order.

        Args:
            received: uint8[sum of ``received_splits``] on a `carrier`, by whose device the group moves them. On return
                host memory holds what came, and a device's stream comes to it after it is there.
            sent: uint8[sum of ``sent_splits``], in host memory.
            received_splits: bytes from each rank.
            sent_splits: bytes to each rank.
        """
        moved = sent.to(received.device, non_blocking=True)
        work = dist.all_to_all_single(received, moved, received_splits, sent_splits, group=self._group, async_op=True)
        self._wait(work)

    def carrier(self, device: torch.device | None) -> torch.device:
        """Where `all_to_all` is to receive what is for ``device`` (None: the host): there, if the group reaches it."""
        return device if device is not None and device.type in self._kinds else self.device

    def exchange_cost(self, nbytes: int, carrier: torch.device) -> float:
        """Seconds per byte that one rank receives when all send ``nbytes`` in all, measured once, warmed up."""
        share = max(nbytes // self.size, 1)
        splits = [share] * self.size
        sent = torch.zeros(share * self.size, dtype=torch.uint8, device="cpu")
        received = torch.empty(share * self.size, dtype=torch.uint8, device=carrier)
        for _ in range(2):
            begun = time.perf_counter()
            self.all_to_all(received, sent, splits, splits)
            received[-1].item()  # which a device gives when it has all
        return (time.perf_counter() - begun) / (share * max(self.size - 1, 1))

    def begin_row(self, row: Sequence[int]) -> Callable[[], npt.NDArray[np.int64]]:
        """As `gather_row`, of ranks that have not failed; what is returned waits for the others, to be called once."""
        gathered = self._begin_gather(np.array(row, dtype=np.int64))
        return lambda: gathered().reshape(self.size, -1)

    def _all_gather(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._begin_gather(numbers)()

    def _begin_gather(self, numbers: npt.NDArray[np.int64]) -> Callable[[], npt.NDArray[np.int64]]:
        mine = torch.from_numpy(np.ascontiguousarray(numbers)).to(self.device)
        everyone = torch.empty(self.size * len(numbers), dtype=torch.int64, device=self.device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        work = gather(everyone, mine, group=self._group, async_op=True)

        def heard() -> npt.NDArray[np.int64]:
            self._wait(work)
            found: npt.NDArray[np.int64] = everyone.cpu().numpy()
            return found

        return heard

    def _wait(self, work: Any) -> None:
        if work is None:
            return
        try:
            if self.device.type != "cpu":
                self._look_after(work)
            work.wait(self._timeout)
        except RuntimeError as error:  # what torch raises for a timeout as well as for a peer that has gone
            raise self.lost(_SOURCE_LINE.sub("", str(error).splitlines()[0])) from error

    def _look_after(self, work: Any) -> None:
        """Return when ``work`` has ended, or its time is over.

        A transport of host memory hears of a rank that ends. One of devices does not: it waits all its time.

        Raises:
            StorageError: a rank of this host has ended meanwhile.
        """
        begun = looked = time.monotonic()
        while not work.is_completed() and (now := time.monotonic()) - begun < self.timeout_s:
            if now - looked > _LOOK_S and self._roll_call is not None:
                looked = now
                if self._roll_call.ended():
                    raise self.lost("a collective has not ended")
            time.sleep(_POLL_S)

    def watch(self, ended: Callable[[], Sequence[int]]) -> None:
        """Have ``ended`` asked, when something fails, which ranks are known to be gone."""
        if self._roll_call is not None:
            self._roll_call.ended = ended

    def lost(self, said: str) -> StorageError:
        """The error for when the others cannot be reached any more; it names those that are gone."""
        cause = said if self._roll_call is None else self._roll_call.cause(said, self.timeout_s)
        hint = "look for the first error in the other ranks' output"
        return StorageError(f"rank {self.rank} of {self.size} cannot go on: {cause}", hint=hint)


def _kinds_of(process_group: Any) -> tuple[str, ...]:
    """The types of devices whose tensors a group takes; torch writes them as ``cpu:gloo,cuda:nccl``."""
    return tuple(pair.partition(":")[0] for pair in str(dist.get_backend_config(process_group)).split(","))


def _device_of(process_group: Any) -> torch.device:
    """Where the tensors of a group's small collectives are to be: in host memory where it takes that.

    Else on the device that the group is bound to (``init_process_group(device_id=...)``), or this thread's current one.
    """
    kinds = _kinds_of(process_group)
    if "cpu" in kinds:
        return torch.device("cpu")
    bound = getattr(process_group, "bound_device_id", None)
    return bound or torch.device(kinds[0], getattr(torch, kinds[0]).current_device())


def _described(error: BaseException) -> str:
    """An error as text that other ranks can make one of."""
    fields: dict[str, str | None] = {"kind": type(error).__name__, "message": str(error) or repr(error)}
    if isinstance(error, CkptError):
        fields |= {"message": error.message, "where": error.where, "hint": error.hint}
    return json.dumps(fields)


def _rebuilt(text: str, rank: int, size: int, n_others: int) -> CkptError:
    """The error that ``_described`` told of, with the rank in front of its message."""
    fields = json.loads(text)
    kind = _KINDS.get(fields["kind"])
    others = f" ({counted(n_others, 'other rank')} failed as well)" if n_others else ""
    name = "" if kind else f"{fields['kind']}: "
    message = f"rank {rank} of {size}: {name}{fields['message']}{others}"
    return (kind or CkptError)(message, where=fields.get("where"), hint=fields.get("hint"))
