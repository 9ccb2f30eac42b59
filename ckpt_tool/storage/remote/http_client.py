"""Persistent HTTP connections to one server, as many as threads use at once. Knows no storage protocol and tries once.

Bytes of an answer go straight into the caller's buffer where there is one.
"""

from __future__ import annotations

import base64
import errno
import http.client
import os
import re
import threading
import urllib.request
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from ckpt_tool.errors import UsageError
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

if TYPE_CHECKING:
    import ssl  # 10 ms of start-up, for those who speak https

__all__ = ["TIMEOUT_S", "HttpClient", "HttpStatusError", "Response", "ShortAnswerError", "server_of", "silence_s"]

TIMEOUT_S = 60.0
"""A server that neither takes nor sends a byte for so long is given up. ``CKPT_TIMEOUT_S`` says otherwise."""
_MAX_IDLE = 64
_HOST = re.compile(r"[^\s/?#]+")
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

    def __init__(
        self, status: int, code: str, text: str, *, headers: Mapping[str, str], hint: str | None = None
    ) -> None:
        super().__init__(f"{status} {code}: {text}" if text else f"{status} {code}")
        self.status = status
        self.hint = hint
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


@dataclass(frozen=True, slots=True, repr=False)
class _Proxy:
    """Where requests go instead of to the server itself."""

    name: str
    port: int
    password: str | None = None
    """What it wants to hear of who asks, as a header has it."""


class HttpClient:
    """Connections to the server of ``url`` (scheme, host and port). Safe to use from several threads."""

    def __init__(self, url: str, *, ca_file: str | None = None, timeout_s: float | None = None) -> None:
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        scheme, self._name, self._port = server_of(url)
        self.is_secure = scheme == "https"
        usual = 443 if self.is_secure else 80
        named = f"[{self._name}]" if ":" in self._name else self._name
        self.host = named if self._port == usual else f"{named}:{self._port}"
        self._proxy = _proxy_of(scheme, self.host)
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
        if not is_direct and self._proxy is not None and self._proxy.password is not None:
            connection.putheader("proxy-authorization", self._proxy.password)
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
        proxy = self._proxy
        name, port = (self._name, self._port) if proxy is None else (proxy.name, proxy.port)
        if not self.is_secure:
            return http.client.HTTPConnection(name, port, timeout=self._timeout_s, blocksize=1 << 20)
        secure = http.client.HTTPSConnection(
            name, port, timeout=self._timeout_s, context=self._context, blocksize=1 << 20
        )
        if proxy is not None:
            headers = {} if proxy.password is None else {"proxy-authorization": proxy.password}
            secure.set_tunnel(self._name, self._port, headers)
        return secure

    @cached_property
    def _context(self) -> ssl.SSLContext:
        """Whose certificates are trusted; made once, for it takes longer than a request."""
        import ssl

        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:
            hint = "AWS_CA_BUNDLE, or ca_bundle of a profile, names a file of certificates in PEM"
            reason = error.strerror or str(error)
            raise UsageError(f"no certificates can be read: {reason}", where=self._ca_file, hint=hint) from error

    def _give_back(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


def server_of(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of an address.

    Raises:
        UsageError: it is none.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # a port that is no number, brackets that do not close
        raise UsageError(f"is no address: {error}", where=url) from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or not _HOST.fullmatch(parts.hostname):
        raise UsageError("expected an http:// or https:// address", where=url)
    return parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80)


def _proxy_of(scheme: str, host: str) -> _Proxy | None:
    """The proxy that the environment names for this server, None where it names none.

    Raises:
        UsageError: what it names is no address, or a proxy of another kind.
    """
    url = urllib.request.getproxies().get(scheme)
    if not url or urllib.request.proxy_bypass(host):
        return None
    where = f"{scheme}_proxy"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        name, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"names no proxy: {error}", where=where) from error
    if parts.scheme != "http" or not name:
        hint = "NO_PROXY=HOST goes there without one"
        raise UsageError(f"expected a proxy that speaks http://, got {parts.scheme}://", where=where, hint=hint)
    if parts.username is None:
        return _Proxy(name, port or 80)
    words = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return _Proxy(name, port or 80, "Basic " + base64.b64encode(words.encode()).decode())


def _lower(answer: http.client.HTTPResponse) -> dict[str, str]:
    """Headers by their names in lower case."""
    return {name.lower(): value for name, value in answer.getheaders()}
