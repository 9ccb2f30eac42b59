"""A proxy in front of an S3 server that spoils requests and answers as it is told."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

FAULTS = ("503", "refused body", "reset", "lost answer", "stall", "truncated", "cut off")
"""What a request that is sent again survives. Besides there are ``flip`` and ``flip up``: a wrong byte down or up."""

Choose = Callable[[int, str, str], "str | None"]
"""Number of the request, method, path: the fault, None for none."""


class Faults:
    """Which requests go wrong, and how many did."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.done: Counter[str] = Counter()
        self.n_requests = 0
        self.lock = threading.Lock()
        self.is_over = threading.Event()

    def next(self, method: str, path: str) -> str | None:
        """The fault of the next request."""
        with self.lock:
            self.n_requests += 1
            fault = self.choose(self.n_requests, method, path)
            if fault is not None:
                self.done[fault] += 1
            return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: str
    faults: Faults

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def _handle(self) -> None:
        body = bytearray(self.rfile.read(int(self.headers.get("content-length") or 0)))
        fault = self.faults.next(self.command, self.path)
        if fault == "503":
            data = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
            self._send(503, [("Content-Length", str(len(data)))], data)
            return
        if fault == "refused body":
            self._send(500, [("Content-Length", "12")], b"out of order")
            return
        if fault == "reset":
            self._reset()
            return
        if fault == "stall":
            self.faults.is_over.wait(60)
            self.close_connection = True
            return
        if fault == "flip up" and body:
            body[len(body) // 2] ^= 1
        status, headers, data = self._forwarded(bytes(body))
        if fault == "lost answer":
            self._reset()
        elif fault in {"truncated", "cut off"} and data:
            self._send(status, headers, data[: len(data) // 2])
            if fault == "cut off":
                self._reset()
            self.close_connection = True
        else:
            if fault == "flip" and data:
                at = len(data) * 2 // 5
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            self._send(status, headers, data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815 - the interface of http.server

    def _forwarded(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body or None)
        answer = connection.getresponse()
        data = answer.read()
        headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in {"connection", "transfer-encoding"}]
        if not any(k.lower() == "content-length" for k, _ in headers):
            headers.append(("Content-Length", str(len(data))))
        connection.close()
        return answer.status, headers, data

    def _send(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()

    def _reset(self) -> None:
        """End the connection with RST, whatever was sent."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Nothing: torn connections are what it is for."""


@contextmanager
def fault_proxy(upstream: str, choose: Choose) -> Iterator[tuple[str, Faults]]:
    """Address of a proxy in front of ``upstream`` (an address too), and what it did."""
    faults = Faults(choose)
    handler = type("Handler", (_Handler,), {"upstream": urlsplit(upstream).netloc, "faults": faults})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", faults
    finally:
        faults.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
