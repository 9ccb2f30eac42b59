"""A message is a kind, JSON fields and bytes behind them, sent over a stream socket; descriptors may travel along.

Nothing in it is ever executed. Used between a rank and its writer process, and between writer processes.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.records import dataclass, field

__all__ = ["Connection", "Message", "described", "rebuilt"]

_HEAD = struct.Struct("<IQ")
_MAX_HEADER_NBYTES = 1 << 30
_MAX_FDS = 4
_KINDS: dict[str, type[CkptError]] = {
    kind.__name__: kind for child in CkptError.__subclasses__() for kind in (child, *child.__subclasses__())
}


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes | bytearray | memoryview = b""


class Connection:
    """One end of a stream socket, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send all of a message; ``fds`` go with its first byte.

        Raises:
            OSError: the other end has gone.
        """
        header = json.dumps([message.kind, message.fields]).encode()
        body = memoryview(message.body).cast("B")
        head = _HEAD.pack(len(header), len(body)) + header
        if fds:
            n = socket.send_fds(self._socket, [head], list(fds))
            head = head[n:]
        self._socket.sendall(head)
        if body:
            self._socket.sendall(body)

    def tell(self, message: Message) -> None:
        """Send a message to whoever is there; where nobody is any more, `receive` says so."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.send(message)

    def receive(self) -> list[Message] | None:
        """All messages that are complete after one read, which blocks when nothing is there; None at the end."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 1 << 20, _MAX_FDS)
        except ConnectionError:
            data, fds = b"", []
        if not data:
            return None
        self._fds.extend(fds)
        self._buffer += data
        return list(self._complete())

    def take_fd(self) -> int:
        """The next descriptor that came along."""
        return self._fds.popleft()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _complete(self) -> Iterator[Message]:
        while len(self._buffer) >= _HEAD.size:
            header_nbytes, body_nbytes = _HEAD.unpack_from(self._buffer)
            if header_nbytes > _MAX_HEADER_NBYTES:
                raise StorageError("what came over a socket of a save is no message of one")
            start = _HEAD.size + header_nbytes
            end = start + body_nbytes
            if len(self._buffer) < end:
                return
            kind, fields = json.loads(self._buffer[_HEAD.size : start])
            body = bytes(memoryview(self._buffer)[start:end])
            del self._buffer[:end]
            yield Message(kind, fields, body)


def described(error: BaseException) -> dict[str, str | None]:
    """An error as JSON that another process can make one of."""
    fields: dict[str, str | None] = {"kind": type(error).__name__, "message": str(error) or repr(error)}
    if isinstance(error, CkptError):
        fields |= {"message": error.message, "where": error.where, "hint": error.hint}
    return fields


def rebuilt(fields: dict[str, Any]) -> CkptError:
    """The error that ``described`` told of; one that is not of ours keeps its class in the message."""
    kind = _KINDS.get(fields["kind"])
    name = "" if kind is not None or fields["kind"] == "CkptError" else f"{fields['kind']}: "
    return (kind or CkptError)(name + fields["message"], where=fields.get("where"), hint=fields.get("hint"))
