"""The links of one node of the control tree: one to its parent, one from each child, made when they are needed.

A link that breaks is told of once; a process that starts again in the place of one that died links itself anew.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ckpt_tool.engine.save.wire import Connection, Message
from ckpt_tool.errors import StorageError
from ckpt_tool.records import dataclass

__all__ = ["Links", "Place"]

_CONNECT_S = 10.0
_SEND_S = 120.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node stands in the tree."""

    rank: int
    size: int
    parent: int | None
    parent_address: tuple[str, int] | None
    children: tuple[int, ...]
    token: str
    """What only the processes of this job know."""


class Links:
    """Connections to neighbours in the tree, multiplexed with others that the caller registers."""

    def __init__(self, place: Place, listener: socket.socket | None) -> None:
        self.place = place
        self.selector = selectors.DefaultSelector()
        self._listener = listener
        self._parent: Connection | None = None
        self._children: dict[int, Connection] = {}
        self._queued: dict[int, list[Message]] = {}
        self._lost: list[int] = []
        if listener is not None:
            listener.setblocking(False)  # noqa: FBT003 - named by the method
            self.selector.register(listener, selectors.EVENT_READ, ("listener", None))

    @property
    def linked(self) -> set[int]:
        """Children whose link stands."""
        return set(self._children)

    def send_up(self, message: Message) -> None:
        """To the parent; connects first where there is no link.

        Raises:
            StorageError: the parent cannot be reached.
        """
        place = self.place
        try:
            self._parent = self._parent or self._connect()
            with suppress(BrokenPipeError, ConnectionError):
                self._parent.send(message)
                return
            self._drop_parent()  # it was another process, which has ended: one may have started in its place
            self._parent = self._connect()
            self._parent.send(message)
        except OSError as error:
            self._drop_parent()
            raise StorageError(
                f"rank {place.rank} of {place.size}: rank {place.parent} has gone: it cannot be reached "
                f"at {place.parent_address} ({error.strerror or error})"
            ) from error

    def send_down(self, child: int, message: Message) -> None:
        """To a child; kept for it while there is no link."""
        connection = self._children.get(child)
        if connection is None:
            self._queued.setdefault(child, []).append(message)
            return
        try:
            connection.send(message)
        except OSError:
            self._drop_child(child)
            self._lost.append(child)
            self._queued.setdefault(child, []).append(message)

    def send_down_all(self, message: Message) -> None:
        """To every child."""
        for child in self.place.children:
            self.send_down(child, message)

    def take_lost(self) -> list[int]:
        """Children whose link was found broken when something was sent to them, each told once."""
        lost, self._lost = self._lost, []
        return lost

    def events(self, key: object, role: str, who: int | None) -> Iterator[tuple[int, Message | None]]:
        """``(neighbour, message)`` of what has become readable; None for a message when the link is broken."""
        if role == "listener":
            self._accept()
            return
        connection: Connection = key  # type: ignore[assignment]
        try:
            messages = connection.receive()
        except (OSError, StorageError, ValueError):
            messages = None
        if role == "stranger":
            yield from self._welcome(connection, messages)
            return
        neighbour = self.place.parent if role == "parent" else who
        if neighbour is None:
            return
        if messages is None:
            if role == "parent":
                self._drop_parent()
            elif self._children.get(neighbour) is connection:
                self._drop_child(neighbour)
            else:
                self._forget(connection)
                return
            yield neighbour, None
            return
        for message in messages:
            yield neighbour, message

    def close(self) -> None:
        """Close everything."""
        for connection in (self._parent, *self._children.values()):
            if connection is not None:
                self._forget(connection)
        self.selector.close()

    def _connect(self) -> Connection:
        place = self.place
        if place.parent_address is None:
            raise StorageError("the root of the tree has no parent")
        deadline = time.monotonic() + _CONNECT_S
        while True:
            try:
                sock = socket.create_connection(place.parent_address, timeout=_CONNECT_S)
                break
            except ConnectionRefusedError:
                raise
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        sock.settimeout(_SEND_S)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock)
        connection.send(Message("hello", {"rank": place.rank, "token": place.token}))
        self.selector.register(connection, selectors.EVENT_READ, ("parent", place.parent))
        return connection

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.settimeout(_SEND_S)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.selector.register(Connection(sock), selectors.EVENT_READ, ("stranger", None))

    def _welcome(
        self, connection: Connection, messages: Sequence[Message] | None
    ) -> Iterator[tuple[int, Message | None]]:
        """A stranger becomes a child when it knows the token; what it says after that."""
        if messages == []:
            return
        first = messages[0] if messages else None
        rank = first.fields.get("rank") if first is not None and first.kind == "hello" else None
        if first is None or rank not in self.place.children or first.fields.get("token") != self.place.token:
            self._forget(connection)
            return
        if rank in self._children:
            self._drop_child(rank)
        self._children[rank] = connection
        self.selector.modify(connection, selectors.EVENT_READ, ("child", rank))
        for message in self._queued.pop(rank, []):
            self.send_down(rank, message)
        for message in (messages or [])[1:]:
            yield rank, message

    def _drop_parent(self) -> None:
        if self._parent is not None:
            self._forget(self._parent)
            self._parent = None

    def _drop_child(self, child: int) -> None:
        connection = self._children.pop(child, None)
        if connection is not None:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with suppress(KeyError, ValueError):
            self.selector.unregister(connection)
        connection.close()
