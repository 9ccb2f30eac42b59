"""The rank's end of its writer process: starts it, tells it what to save, and hears how saves ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ckpt_tool.engine.save.arena import Arena
from ckpt_tool.engine.save.assignment import Assigned
from ckpt_tool.engine.save.columns import HeldState
from ckpt_tool.engine.save.commands import SaveCommand, Structure
from ckpt_tool.engine.save.links import Place
from ckpt_tool.engine.save.shares import shares_of
from ckpt_tool.engine.save.wire import Connection, Message, described
from ckpt_tool.errors import StorageError

__all__ = ["WriterClient"]

_PACKAGE = __name__.partition(".")[0]
_LOOK_S = 0.05  # between two looks whether another thread has taken up what one waits for


class WriterClient:
    """A running writer process. Safe to use from several threads."""

    def __init__(self, place: Place, listener: socket.socket | None) -> None:
        self._place = place
        own, other = socket.socketpair()
        fds = (other.fileno(), -1 if listener is None else listener.fileno())
        module = f"{_PACKAGE}.engine.save.process"
        self._process = subprocess.Popen(  # noqa: S603 - this package's own module
            [sys.executable, "-m", module, *map(str, fds)],
            cwd=_home(),
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[fd for fd in fds if fd >= 0],
            stdin=subprocess.DEVNULL,
        )
        other.close()
        self._connection = Connection(own)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._known: dict[str, HeldState] = {}
        self._verdicts: dict[int, dict[str, Any]] = {}
        self._awaited: dict[int, int] = {}
        self.assigned: dict[str, Assigned] = {}
        """By structure: what this rank writes of it."""
        self._send(Message("place", asdict(place)))

    @property
    def pid(self) -> int:
        """Of the writer process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process can still be told something."""
        self.look()
        return self._process.poll() is None

    def share(self, number: int, arena: Arena) -> None:
        """Let the process see an arena, in the place of the one of that number."""
        self._send(Message("arena", {"arena": number, "nbytes": arena.nbytes}), [arena.fd])

    def tell(self, structure: Structure) -> None:
        """Make a structure known, once."""
        if structure.key not in self._known:
            self._known[structure.key] = structure.held
            self._send(structure.to_message())

    def save(self, command: SaveCommand) -> None:
        """Hand over a save."""
        self._awaited[command.number] = command.arena
        self._send(command.to_message())

    def hurry(self, number: int) -> None:
        """Somebody waits for a save."""
        with suppress(StorageError):
            self._send(Message("hurry", {"save": number}))

    def look(self) -> None:
        """Take up what the process has said, without waiting."""
        with self._receiving:
            while self._is_readable(0.0) and self._take_some():
                pass

    def verdict(self, number: int, timeout_s: float) -> dict[str, Any] | None:
        """How a save ended, awaited; None when it has not within ``timeout_s``. Forgotten afterwards."""
        found: dict[str, Any] | None = self._await(lambda: self._verdicts.pop(number, None), timeout_s)
        return found

    def has_verdict(self, number: int) -> bool:
        """Whether a save has ended."""
        self.look()
        return number in self._verdicts

    def await_arena(self, number: int, timeout_s: float) -> bool:
        """Wait until nothing of an arena is still to be read."""
        return self._await(lambda: number not in self._awaited.values() or None, timeout_s) is not None

    def close(self) -> None:
        """End the process; saves under way are given up."""
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)

    def abandon(self) -> None:
        """Leave the process to whom it belongs."""
        self._connection.close()

    def _await(self, found: Any, timeout_s: float) -> Any:
        """What ``found`` gives once it is not None; None when that takes too long. Others may look meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._receiving:
                result = found()
                while result is None and self._is_readable(0.0):
                    is_open = self._take_some()
                    result = found()
                    if not is_open:
                        return result
            left = deadline - time.monotonic()
            if result is not None or left <= 0 or self._connection.fileno() < 0:
                return result
            self._is_readable(min(left, _LOOK_S))

    def _is_readable(self, timeout_s: float) -> bool:
        import select

        if self._connection.fileno() < 0:
            return False
        with suppress(OSError, ValueError):  # closed by another thread since a moment ago
            readable, _, _ = select.select([self._connection.fileno()], [], [], timeout_s)
            return bool(readable)
        return False

    def _take_some(self) -> bool:
        """Take up one read; False at the end, when all that was awaited has failed."""
        messages = self._connection.receive()
        if messages is None:
            self._connection.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            text = f"rank {self._place.rank} of {self._place.size}: the process that writes for it has ended"
            error = described(StorageError(f"{text} ({_ending(self._process.returncode)})"))
            for number in list(self._awaited):
                self._verdicts.setdefault(number, {"error": error, "forget": False})
            self._awaited.clear()
            return False
        for message in messages:
            fields = message.fields
            if message.kind == "assigned":
                share = shares_of(message)[self._place.rank]
                self.assigned[fields["key"]] = share.of(self._known[fields["key"]])
            elif message.kind == "free":
                number = min(n for n, arena in self._awaited.items() if arena == fields["arena"])
                del self._awaited[number]
            elif message.kind == "verdict":
                if fields["forget"]:
                    self.assigned.clear()
                self._verdicts[int(fields["save"])] = fields
        return True

    def _send(self, message: Message, fds: list[int] | None = None) -> None:
        try:
            with self._sending:
                self._connection.send(message, fds or [])
        except OSError as error:
            text = f"rank {self._place.rank} of {self._place.size}: the process that writes for it has ended"
            raise StorageError(f"{text} ({_ending(self._process.poll())})") from error


def _home() -> str:
    """The folder that the package lies in, so that the process imports this one and no other."""
    return str(Path(__file__).resolve().parents[3])


def _ending(code: int | None) -> str:
    if code is None:
        return "still running"
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"
