"""The writer process of one rank: writes what the rank has staged, and agrees with the others that a save has ended.

Started as ``python -m ckpt_tool.engine.save.process CONTROL_FD LISTENER_FD`` once per rank; it imports no torch and
ends when its rank does. Saves are worked off one after another; a verdict of the root ends each on all ranks.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.engine.save.arena import Arena
from ckpt_tool.engine.save.assignment import Assigned
from ckpt_tool.engine.save.commands import SaveCommand, Structure
from ckpt_tool.engine.save.coordinator import Coordinator, Stale
from ckpt_tool.engine.save.jobs import Jobs
from ckpt_tool.engine.save.links import Links, Place
from ckpt_tool.engine.save.rounds import PlanEntry, Report, Round
from ckpt_tool.engine.save.shares import Share, shares_message, shares_of, told
from ckpt_tool.engine.save.wire import Connection, Message, described
from ckpt_tool.engine.save.work import Layouts, Work
from ckpt_tool.errors import StorageError
from ckpt_tool.formats.registry import joint_writer
from ckpt_tool.records import dataclass, field

__all__ = ["WriterProcess", "main"]

_ROOT_S = 1.0  # how much longer than the ranks below it, which know better who is late, the root waits
_GRACE_S = 10.0  # how long a verdict is awaited after a failure, and a process in the place of one that has ended
_IDLE_S = 3600.0


@dataclass
class _Save:
    """The save that is under way."""

    command: SaveCommand
    round: Round
    work: Work
    deadline: float
    failure: dict[str, Any] | None = None
    """What this rank has told of; the verdict is awaited until ``deadline``."""
    is_patient: bool = False
    """This rank and those below have done all; the time is up, and the root's word on it is awaited."""
    is_writing: bool = False
    """A job of this save reads the arena, or has read it."""
    operations: list[list[Any]] = field(default_factory=list)
    payload_nbytes: int = 0
    nbytes: int = 0


class WriterProcess:
    """Everything that one writer process knows."""

    def __init__(self, control: Connection, links: Links) -> None:
        self._control = control
        self._links = links
        self._place = links.place
        self._coordinator = Coordinator(self._place.size)
        self._jobs = Jobs()
        self._structures: dict[str, Structure] = {}
        self._assigned: dict[str, Assigned] = {}
        self._arenas: dict[int, Arena] = {}
        self._layouts: Layouts = {}
        self._waiting: deque[SaveCommand] = deque()
        self._save: _Save | None = None
        self._early: dict[int, list[tuple[int, Report]]] = {}
        self._verdicts: dict[int, Message] = {}
        self._lost: dict[int, float] = {}
        self._last = self._urgent = -1
        links.selector.register(control, selectors.EVENT_READ, ("control", None))
        links.selector.register(self._jobs, selectors.EVENT_READ, ("jobs", None))

    @property
    def _is_root(self) -> bool:
        return self._place.parent is None

    def run(self) -> None:
        """Work until the rank ends."""
        while True:
            self._begin()
            for key, _ in self._links.selector.select(self._patience()):
                role, who = key.data
                if role == "control":
                    messages = self._control.receive()
                    if messages is None:
                        return
                    self.obey(messages)
                elif role == "jobs":
                    self._jobs.run_finished()
                else:
                    for neighbour, message in self._links.events(key.fileobj, role, who):
                        self._hear(neighbour, message)
            for child in self._links.take_lost():
                self._hear(child, None)
            self._look_at_clock()

    # --------------------------------------------------------------------------------------------------- from the rank

    def obey(self, messages: Sequence[Message]) -> None:
        """Take up what the rank says."""
        for message in messages:
            if message.kind == "arena":
                number = int(message.fields["arena"])
                if number in self._arenas:
                    self._arenas.pop(number).close()
                self._arenas[number] = Arena(self._control.take_fd(), int(message.fields["nbytes"]))
            elif message.kind == "structure":
                structure = Structure.from_message(message)
                self._structures[structure.key] = structure
            elif message.kind == "save":
                self._waiting.append(SaveCommand.from_message(message))
            elif message.kind == "hurry":
                self._urgent = max(self._urgent, int(message.fields["save"]))
                if self._save is not None and self._save.command.number <= self._urgent:
                    self._save.work.hurry()

    def _begin(self) -> None:
        if self._save is not None or not self._waiting:
            return
        command = self._waiting.popleft()
        number = command.number
        save = _Save(
            command,
            Round([self._place.rank, *self._place.children]),
            Work(command, self._place, self._token(number), self._arenas.get(command.arena), self._layouts),
            time.monotonic() + command.timeout_s + (_ROOT_S if self._is_root else 0.0),
        )
        self._save = save
        if number <= self._urgent:
            save.work.hurry()
        verdict = self._verdicts.pop(number, None)
        if verdict is not None:
            self._pass_on(verdict)
            return
        now = time.monotonic()
        self._lost = {child: min(_GRACE_S, command.timeout_s) + now for child in self._lost}
        for source, report in self._early.pop(number, []):
            self._take(source, report)
        if self._save is save:
            self._take_own(save)

    def _take_own(self, save: _Save) -> None:
        command = save.command
        if command.error is not None:
            self._fail(save, command.error)
            return
        if command.key in self._assigned:
            self._write(save, self._assigned[command.key])
            return
        structure = self._structures[command.key]
        digest = hashlib.blake2b(structure.names, digest_size=16).hexdigest()
        entry = PlanEntry(command.key, digest, structure.held.encoded())
        self._take(self._place.rank, Report(plans={self._place.rank: entry}, names={digest: structure.names}))

    def _write(self, save: _Save, assigned: Assigned) -> None:
        structure = self._structures[save.command.key]
        save.is_writing = True
        self._jobs.start(
            lambda: save.work.write(structure, assigned),
            lambda result: self._written(save, result),
            lambda error: self._not_written(save, error),
        )

    def _not_written(self, save: _Save, error: BaseException) -> None:
        self._control.tell(Message("free", {"arena": save.command.arena}))
        self._fail(save, described(error))

    def _written(self, save: _Save, entry: dict[str, Any]) -> None:
        self._control.tell(Message("free", {"arena": save.command.arena}))
        save.operations += entry.pop("operations")
        save.payload_nbytes = int(entry.pop("payload_nbytes"))
        if self._save is save:
            self._take(self._place.rank, Report(done=[{"rank": self._place.rank, **entry}]))

    # -------------------------------------------------------------------------------------------- from the neighbours

    def _hear(self, neighbour: int, message: Message | None) -> None:
        if message is None:
            self._lose(neighbour)
            return
        number = int(message.fields["save"])
        self._lost.pop(neighbour, None)
        save = self._save
        if save is None or number != save.command.number:
            if message.kind == "report" and number > self._last:
                self._early.setdefault(number, []).append((neighbour, Report.from_message(message)))
            elif message.kind == "verdict" and number > self._last:
                self._verdicts[number] = message
        elif message.kind == "report":
            self._take(neighbour, Report.from_message(message))
        elif message.kind == "assign":
            self._follow(save, shares_of(message))
        elif message.kind == "verdict":
            self._pass_on(message)

    def _lose(self, neighbour: int) -> None:
        self._lost[neighbour] = time.monotonic() + _GRACE_S
        save = self._save
        if save is not None:
            self._fail(save, described(self._gone(neighbour)))
            if neighbour == self._place.parent:  # nobody above will give a verdict
                self._end(save, described(self._gone(neighbour)))

    def _gone(self, rank: int) -> StorageError:
        text = f"rank {rank} of {self._place.size} has gone: it, or the process that writes for it, has ended"
        return StorageError(text, hint="look for the first error in that rank's output")

    def _take(self, source: int, report: Report) -> None:
        save = self._save
        if save is None:
            return
        joint = save.round.add(source, report)
        if joint is None:
            return
        if not self._is_root:
            try:
                self._links.send_up(joint.to_message(save.command.number))
            except StorageError as error:
                self._end(save, described(error))
        elif joint.error is not None:
            self._end(save, joint.error)
        elif joint.plans:
            self._plan(save, joint)
        else:
            self._commit(save, joint)

    # -------------------------------------------------------------------------------------------------------- planning

    def _plan(self, save: _Save, joint: Report) -> None:
        begun = time.time()
        try:
            assigned = self._coordinator.plan(joint, joint_writer(save.command.format))
        except Exception as error:  # noqa: BLE001 - told to every rank
            self._fail(save, described(error))
            return
        save.operations.append(["plan", sum(each.nbytes for each in assigned.values()), begun, time.time() - begun])
        self._follow(save, {rank: told(each) for rank, each in assigned.items()})

    def _follow(self, save: _Save, shares: Mapping[int, Share]) -> None:
        """Take up what this rank is to write, and tell the ranks below theirs."""
        number = save.command.number
        below = {child: save.round.told_by(child) & shares.keys() for child in self._place.children}
        save.round.reopen(shares)
        for child, ranks in below.items():
            if ranks:
                self._links.send_down(child, shares_message(number, shares, sorted(ranks)))
        share = shares.get(self._place.rank)
        if share is not None:
            structure = self._structures[save.command.key]
            assigned = self._assigned[structure.key] = share.of(structure.held)
            own = shares_message(number, shares, [self._place.rank])
            self._control.tell(Message("assigned", {**own.fields, "key": structure.key}, own.body))
            self._write(save, assigned)

    # ----------------------------------------------------------------------------------------------------------- ends

    def _commit(self, save: _Save, joint: Report) -> None:
        self._jobs.start(
            lambda: save.work.commit(self._coordinator, joint),
            lambda result: self._committed(save, result),
            lambda error: self._fail(save, described(error), forget=isinstance(error, Stale)),
        )

    def _committed(self, save: _Save, result: Mapping[str, Any]) -> None:
        save.operations += result["operations"]
        save.nbytes = int(result["nbytes"])
        self._end(save, None)

    def _fail(self, save: _Save, error: dict[str, Any], *, forget: bool = False) -> None:
        """The save cannot succeed: tell the root, or as the root end it."""
        if self._save is not save or save.failure is not None:
            return
        save.failure = error
        number = save.command.number
        if self._is_root:
            self._end(save, error, forget=forget)
            return
        save.deadline = time.monotonic() + _GRACE_S
        try:
            self._links.send_up(Report(error=self._named(error)).to_message(number))
        except StorageError as lost:
            self._end(save, described(lost))

    def _named(self, error: dict[str, Any]) -> dict[str, Any]:
        """An error with the rank that it befell in front, once."""
        if error["message"].startswith("rank "):
            return error
        return {**error, "message": f"rank {self._place.rank} of {self._place.size}: {error['message']}"}

    def _pass_on(self, verdict: Message) -> None:
        if self._save is not None:
            self._end(self._save, verdict.fields["error"], forget=bool(verdict.fields["forget"]))

    def _end(self, save: _Save, error: dict[str, Any] | None, *, forget: bool = False) -> None:
        """The verdict: to the ranks below, then to this one."""
        if error is not None:
            error = self._named(error) if self._place.size > 1 else error
            save.work.give_up()
        last = save.work.close if error is None else save.work.discard
        self._jobs.start(last, lambda _: None, lambda _: None)
        if forget:
            self._coordinator.forget()
            self._assigned.clear()
            self._layouts.clear()
        number = save.command.number
        message = Message("verdict", {"save": number, "error": error, "forget": forget})
        self._links.send_down_all(message)
        fields = {
            "save": number, "error": error, "forget": forget, "operations": save.operations,
            "payload_nbytes": save.payload_nbytes, "nbytes": save.nbytes,
        }  # fmt: skip
        self._control.tell(Message("verdict", fields))
        if not save.is_writing:
            self._control.tell(Message("free", {"arena": save.command.arena}))
        self._last = number
        self._save = None

    # ----------------------------------------------------------------------------------------------------------- clock

    def _patience(self) -> float:
        if self._save is None:
            return _IDLE_S
        ends = [self._save.deadline, *self._lost.values()]
        return max(0.0, min(ends) - time.monotonic())

    def _look_at_clock(self) -> None:
        save, now = self._save, time.monotonic()
        if save is None:
            return
        for neighbour in [who for who, end in self._lost.items() if end <= now]:
            if neighbour in self._links.linked:
                del self._lost[neighbour]
            elif neighbour in save.round.waiting:
                self._fail(save, described(self._gone(neighbour)))
        save = self._save
        if save is None or save.deadline > now:
            return
        if save.failure is not None:
            hint = "whether the save was completed by the others is not known here"
            told = StorageError(f"no word from rank {self._place.parent} after a failure", hint=hint)
            self._end(save, save.failure or described(told))
            return
        waiting = save.round.waiting
        if not waiting and not self._is_root and not save.is_patient:
            save.is_patient = True  # the root knows better than this rank what is missing
            save.deadline += 2 * _GRACE_S
            return
        if self._place.rank in waiting:
            text = f"not written within {save.command.timeout_s:,.0f} s"
        elif waiting:
            listed = ", ".join(map(str, waiting[:5]))
            text = f"no word from rank {listed} within {save.command.timeout_s:,.0f} s"
        else:
            text = f"no verdict from the ranks above within {save.command.timeout_s:,.0f} s"
        self._fail(save, described(StorageError(text, where=save.command.url)))

    def _token(self, number: int) -> str:
        return hashlib.blake2b(f"{self._place.token}/{number}".encode(), digest_size=4).hexdigest()


def main(argv: list[str]) -> None:
    """Run the writer process on inherited descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the rank, whose end ends this process
    control_fd, listener_fd = int(argv[0]), int(argv[1])
    control = Connection(socket.socket(fileno=control_fd))
    listener = socket.socket(fileno=listener_fd) if listener_fd >= 0 else None
    first: list[Message] = []
    while not first:
        messages = control.receive()
        if messages is None:
            return
        first = messages
    fields = first[0].fields
    address = fields["parent_address"]
    place = Place(
        fields["rank"], fields["size"], fields["parent"], None if address is None else (address[0], address[1]),
        tuple(fields["children"]), fields["token"],
    )  # fmt: skip
    process = WriterProcess(control, Links(place, listener))
    process.obey(first[1:])
    process.run()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BaseException:  # noqa: BLE001 - the rank hears of the end, and its output tells why
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # threads may still be writing what nobody wants any more
