"""Persistent HTTP connections to one server, as many as threads use at once. Knows no storage protocol and tries once.

Bytes of an answer go straight into the caller's buffer where there is one.
"""

from __future__ import annotations

import errno
import http.client
import os
import threading
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from ckpt_tool.errors import UsageError
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["TIMEOUT_S", "HttpClient", "HttpStatusError", "Response", "ShortAnswerError", "silence_s"]

TIMEOUT_S = 60.0
"""A server that neither takes nor sends a byte for so long is given up. ``CKPT_TIMEOUT_S`` says otherwise."""
_MAX_IDLE = 64
_NO_TLS = {
    "CERTIFICATE_VERIFY_FAILED": "name the certificates to trust in AWS_CA_BUNDLE or SSL_CERT_FILE",
    "WRONG_VERSION_NUMBER": "this port may speak http://, not https://",
}
"""What a handshake fails with however often one tries, and what helps."""


def silence_s() -> float:
    """Seconds of silence after which a request has failed.

    Raises:
        UsageError: the environment has no number.
    """
    text = os.environ.get("CKPT_TIMEOUT_S")
    if text is None:
        return TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"expected a number of seconds, got {text!r}", where="CKPT_TIMEOUT_S")
    return seconds


class HttpStatusError(OSError):
    """The server answered with an error."""

    def __init__(self, status: int, code: str, text: str, *, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status} {code}: {text}" if text else f"{status} {code}")
        self.status = status
        self.code = code
        """The name that the protocol has for it, or the reason phrase."""
        self.headers = headers


class TlsError(OSError):
    """The server and we do not come to a secure connection."""

    def __init__(self, text: str, *, hint: str) -> None:
        super().__init__(text)
        self.hint = hint
        self.errno = errno.EINVAL  # trying again does not help


class ShortAnswerError(OSError):
    """The server sent another number of bytes than was asked for."""

    def __init__(self, text: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.headers = headers or {}


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; ``data`` is empty where the body went into a buffer."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class HttpClient:
    """Connections to the server of ``url`` (scheme, host and port). Safe to use from several threads."""

    def __init__(self, url: str, *, ca_file: str | None = None, timeout_s: float | None = None) -> None:
        parts = urlsplit(url)
        self.is_secure = parts.scheme == "https"
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError("expected an http:// or https:// address", where=url)
        usual = 443 if self.is_secure else 80
        self._name, self._port = parts.hostname, parts.port or usual
        named = f"[{self._name}]" if ":" in self._name else self._name
        self.host = named if self._port == usual else f"{named}:{self._port}"
        self._proxy = _proxy_of(parts.scheme, self.host)
        self._ca_file = ca_file
        self._timeout_s = silence_s() if timeout_s is None else timeout_s

    def request(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        body: bytes | bytearray | memoryview = b"",
        into: memoryview | None = None,
    ) -> Response:
        """Send one request and read its answer.

        Args:
            method: ``GET``, ``PUT`` and so on.
            target: encoded path and query.
            headers: all but ``Content-Length``.
            body: sent as it is.
            into: filled by the body of a successful answer, which must be exactly as long.

        Raises:
            OSError: no connection, a reset, silence for too long, or another length than ``into`` has.
            http.client.HTTPException: an answer that is not HTTP.
        """
        connection = self._borrow()
        try:
            if connection.sock is None:
                self._connect(connection)
            answer = self._exchange(connection, method, target, headers, body)
            data = self._body(answer, into)
        except BaseException as error:
            connection.close()
            self.close()  # idle ones may be as dead as this one, and the next attempt wants one that is not
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no answer within {self._timeout_s:g} s") from error
            raise
        if answer.will_close:
            connection.close()
        else:
            self._give_back(connection)
        return Response(answer.status, _lower(answer), data)

    def __del__(self) -> None:
        """Close what is left."""
        self.close()

    def close(self) -> None:
        """Close idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        """Connect; what goes wrong names the server."""
        try:
            connection.connect()
        except OSError as error:
            where = f"{connection.host}:{connection.port}"
            reason = error.strerror or str(error) or type(error).__name__
            hint = _NO_TLS.get(getattr(error, "reason", ""))
            if hint is not None:
                raise TlsError(f"no secure connection to {where}: {reason}", hint=hint) from error
            raise ConnectionError(f"{where} does not answer: {reason}") from error

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | bytearray | memoryview,
    ) -> http.client.HTTPResponse:
        is_direct = self._proxy is None or self.is_secure
        full = target if is_direct else f"http://{self.host}{target}"
        connection.putrequest(method, full, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if "host" not in headers:
            connection.putheader("host", self.host)
        if len(body) or method in {"PUT", "POST"}:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders()
        if len(body):
            connection.send(body)
        return connection.getresponse()

    def _body(self, answer: http.client.HTTPResponse, into: memoryview | None) -> bytes:
        is_fine = 200 <= answer.status < 300
        if into is None or not is_fine:
            data = answer.read()
            if answer.length:
                raise ShortAnswerError(f"{counted(answer.length, 'byte of the answer', 'are')} missing")
            return data
        announced = answer.length
        if announced is not None and announced != into.nbytes:
            raise ShortAnswerError(
                f"expected {counted(into.nbytes, 'byte')}, the server announces {announced:,}", headers=_lower(answer)
            )
        view, done = into.cast("B"), 0
        while done < len(view):
            n = answer.readinto(view[done:])
            if not n:
                raise ShortAnswerError(f"expected {counted(into.nbytes, 'byte')}, got {done:,}")
            done += n
        if answer.read(1):
            raise ShortAnswerError(f"expected {counted(into.nbytes, 'byte')}, got more")
        return b""

    def _borrow(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        name, port = self._proxy or (self._name, self._port)
        if not self.is_secure:
            return http.client.HTTPConnection(name, port, timeout=self._timeout_s, blocksize=1 << 20)
        import ssl

        context = ssl.create_default_context(cafile=self._ca_file)
        secure = http.client.HTTPSConnection(name, port, timeout=self._timeout_s, context=context, blocksize=1 << 20)
        if self._proxy is not None:
            secure.set_tunnel(self._name, self._port)
        return secure

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def _proxy_of(scheme: str, host: str) -> tuple[str, int] | None:
    """Host and port of the proxy that the environment names for this server, None where it names none."""
    url = urllib.request.getproxies().get(scheme)
    if url is None or urllib.request.proxy_bypass(host):
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return (parts.hostname, parts.port or 80) if parts.hostname else None


def _lower(answer: http.client.HTTPResponse) -> dict[str, str]:
    """Headers by their names in lower case."""
    return {name.lower(): value for name, value in answer.getheaders()}
