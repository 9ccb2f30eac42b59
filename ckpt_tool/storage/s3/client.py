"""Requests to one bucket: signed, counted, tried again. Knows keys and bytes, no folders and no checkpoints.

Written against the S3 API reference of 2006-03-01 (ListObjectsV2, GetObject, PutObject, multipart uploads). Buckets are
addressed by path, which most servers understand, or by host where settings say so. Keys are never normalised.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from email.utils import parsedate_to_datetime
from typing import Literal

from ckpt_tool.errors import NotFound, StorageError, UsageError
from ckpt_tool.sizes import counted
from ckpt_tool.storage.remote.http_client import HttpClient, HttpStatusError, Response, ShortAnswerError
from ckpt_tool.storage.remote.retry import retried
from ckpt_tool.storage.s3.answers import Page, S3Object, check_range, failure_of, is_whole, page_of, total_of
from ckpt_tool.storage.s3.credentials import read_settings
from ckpt_tool.storage.s3.fast_reads import FastReads, fast_reads, takes_key
from ckpt_tool.storage.s3.signing import EMPTY_SHA256, encoded_path, encoded_query, signed_headers
from ckpt_tool.storage.traffic import current_traffic

__all__ = ["S3Client", "split_s3_url"]

_NO_STATUS: frozenset[int] = frozenset()
_ENDED = frozenset({"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"})
_MAX_SKEW_S = 600.0
"""S3 refuses what is signed a quarter of an hour before its own time or behind it."""


def split_s3_url(url: str) -> tuple[str, str]:
    """Bucket and key, the latter as it is written.

    >>> split_s3_url("s3://bucket//a/b"), split_s3_url("s3://bucket")
    (('bucket', '/a/b'), ('bucket', ''))

    Raises:
        UsageError: no text that could be the name of an object.
    """
    try:
        url.encode()
    except UnicodeEncodeError as error:
        raise UsageError("is not UTF-8, as names of objects are", where=url) from error
    bucket, _, key = url.partition("://")[2].partition("/")
    return bucket, key


class S3Client:
    """One bucket. Safe to use from several threads.

    Raises:
        UsageError: no bucket, or settings that say nothing.
    """

    def __init__(self, bucket: str) -> None:
        if not bucket:
            raise UsageError("names no bucket", where="s3://", hint="s3://BUCKET/PATH")
        self.bucket = bucket
        self.traffic = current_traffic()
        self._settings, self._source = read_settings()
        self._lock = threading.Lock()
        self._fast: FastReads | Literal[False] | None = False
        """False until the first read, None where there is none."""
        self._ahead_s = 0.0
        """How far the server's clock is before that of this machine, where that is too far for signatures."""
        self._connect()

    def pages(self, prefix: str, *, delimiter: str = "") -> Iterator[Page]:
        """All objects whose key begins with ``prefix``, a request for each thousand.

        Raises:
            NotFound: no such bucket.
            StorageError: refused, or it failed for good.
        """
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        if delimiter:
            query["delimiter"] = delimiter
        while True:
            page = self._listed(query)
            yield page
            token = page.next_token
            if token is None:
                return
            if token == query.get("continuation-token"):
                raise StorageError("the listing does not end: its pages repeat", where=self.url_of(prefix))
            query["continuation-token"] = token

    def head(self, key: str) -> S3Object | None:
        """The object, None where there is none."""
        answer = self.request("HEAD", key, allowed=frozenset({404}))
        if answer.status == 404:
            return None
        length = answer.headers.get("content-length", "")
        if not length.isdecimal():
            raise StorageError("the server does not tell the size", where=self.url_of(key))
        return S3Object(key, int(length), None, answer.headers.get("etag", ""))

    def read_into(self, key: str, offset: int, buffer: memoryview, *, where: str) -> None:
        """Fill ``buffer``, which is not empty, from byte ``offset``: one request.

        Raises:
            NotFound: no such object.
            StorageError: it ends before the range does, or it failed for good.
        """
        last = offset + buffer.nbytes - 1
        fast = self._fast_reads() if takes_key(key) else None
        if fast is not None:
            self.traffic.note()
            data = fast.read(key, offset, buffer.nbytes)
            if data is not None:
                buffer[:] = memoryview(data)
                self.traffic.note(requests=0, received=buffer.nbytes)
                return
            self.traffic.note_retry()

        def ask() -> None:
            try:
                answer = self._send("GET", key, headers={"range": f"bytes={offset}-{last}"}, into=buffer)
            except (ShortAnswerError, HttpStatusError) as error:
                size = total_of(error.headers)
                if size is not None and size < offset + buffer.nbytes:
                    raise _ends_early(where, offset, buffer.nbytes, size) from error
                if isinstance(error, ShortAnswerError) and is_whole(error.headers, buffer.nbytes):
                    raise _serves_no_ranges(where) from error
                raise
            if answer.status == 200 and offset:
                raise _serves_no_ranges(where)
            check_range(answer.headers, offset, buffer.nbytes)
            self.traffic.note(requests=0, received=buffer.nbytes)

        retried(ask, where=where, on_retry=self.traffic.note_retry)

    @property
    def reads_many(self) -> bool:
        """Whether ``read_many`` may succeed."""
        return self._fast_reads() is not None

    def read_many(self, key: str, starts: Sequence[int], lengths: Sequence[int]) -> list[bytes] | None:
        """Non-empty ranges of one object; None where they must be asked for one by one, to see what is wrong."""
        fast = self._fast_reads() if takes_key(key) else None
        if fast is None:
            return None
        self.traffic.note(requests=len(starts))
        found = fast.read_many(key, starts, lengths)
        if found is None:
            self.traffic.note(requests=0, retries=1)
            return None
        self.traffic.note(requests=0, received=sum(lengths))
        return [bytes(data) for data in found]

    def put(self, key: str, data: bytes | bytearray | memoryview, *, is_new: bool = False) -> bool:
        """Store one object; with ``is_new`` only where none is, and False tells that one is there."""
        headers = {"if-none-match": "*"} if is_new else {}
        allowed = frozenset({412}) if is_new else _NO_STATUS
        return self.request("PUT", key, headers=headers, body=data, allowed=allowed).status < 300

    def get(self, key: str, length: int | None = None) -> bytes | None:
        """A whole object, for small ones, or at most its first ``length`` bytes; None where there is none."""
        headers = {} if length is None else {"range": f"bytes=0-{length - 1}"}
        answer = self.request("GET", key, headers=headers, allowed=frozenset({404, 416}))
        if answer.status not in {200, 206}:
            return None if answer.status == 404 else b""  # an empty object has no such range
        self.traffic.note(requests=0, received=len(answer.data))
        return answer.data

    def delete(self, key: str) -> None:
        """Remove an object, whether it is there or not."""
        self.request("DELETE", key, allowed=frozenset({404}))

    def request(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | bytearray | memoryview = b"",
        allowed: frozenset[int] = _NO_STATUS,
        checks_body: bool = False,
    ) -> Response:
        """One request, tried again while that may help.

        With ``checks_body`` a success whose body is an error counts as that error: S3 begins to answer some requests
        before it knows how they end.

        Raises:
            NotFound: no such key, upload or bucket, unless 404 is ``allowed``.
            StorageError: another status than a success or one of ``allowed``.
        """

        def ask() -> Response:
            answer = self._send(method, key, query=query, headers=headers, body=body, allowed=allowed)
            if checks_body and answer.status == 200 and b"<Error>" in answer.data:
                raise failure_of(replace(answer, status=500), self.url_of(key))
            return answer

        return retried(ask, where=self.url_of(key), on_retry=self.traffic.note_retry)

    def url_of(self, key: str) -> str:
        """How messages name a key."""
        return f"s3://{self.bucket}/{key}"

    def close(self) -> None:
        """Close idle connections."""
        self._http.close()

    def _fast_reads(self) -> FastReads | None:
        """Made at the first read: a listing has shown by then in which region the bucket lies."""
        with self._lock:
            if self._fast is False:
                self._fast = fast_reads(self.bucket, self._settings, self._source)
            return self._fast or None

    def _listed(self, query: Mapping[str, str]) -> Page:
        where = self.url_of(query["prefix"])

        def ask() -> Page:
            return page_of(self._send("GET", "", query=query).data, query["prefix"], where)

        self.traffic.note(requests=0, listings=1)
        return retried(ask, where=where, on_retry=self.traffic.note_retry)

    def _send(
        self,
        method: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | bytearray | memoryview = b"",
        into: memoryview | None = None,
        allowed: frozenset[int] = _NO_STATUS,
    ) -> Response:
        """One attempt, or two where the first tells what was wrong with how it was asked."""
        answer = self._sent_once(method, key, query or {}, headers or {}, body, into)
        if answer.status in {301, 307, 400, 403} and self._has_learned(answer):
            answer = self._sent_once(method, key, query or {}, headers or {}, body, into)
        if answer.status < 300 or answer.status in allowed:
            return answer
        failure = failure_of(answer, f"s3://{self.bucket}")
        if isinstance(failure, NotFound):
            failure.hint = f"{self._settings.endpoint} was asked: check the name, or AWS_ENDPOINT_URL and AWS_PROFILE"
        raise failure

    def _has_learned(self, answer: Response) -> bool:
        """Whether a refusal tells of another region or another time, or keys that have ended can be had anew."""
        failure = failure_of(answer, "")
        region = answer.headers.get("x-amz-bucket-region")
        if answer.status != 403 and region and region != self._settings.region:
            self._move_to(region)
            return True
        if not self._settings.is_signed:
            return False
        if isinstance(failure, HttpStatusError) and failure.code in _ENDED:
            has_others = self._source.renew()
            if has_others:
                with self._lock:
                    self._fast = False
            return has_others
        ahead_s = _ahead(answer.headers.get("date", ""))
        if answer.status == 403 and ahead_s is not None and abs(ahead_s - self._ahead_s) > _MAX_SKEW_S:
            with self._lock:
                self._ahead_s, self._fast = ahead_s, None  # which would sign by the clock of this machine
            return True
        return False

    def _sent_once(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes | bytearray | memoryview,
        into: memoryview | None,
    ) -> Response:
        settings, client = self._settings, self._http
        if len(body) and not client.is_secure:
            # TLS protects a body on its way; without it many servers check this sum alone, not the one that is signed.
            digest = hashlib.md5(body, usedforsecurity=False).digest()
            headers = {**headers, "content-md5": base64.b64encode(digest).decode()}
        path = encoded_path(f"{self._path}/{key}" if key else self._path or "/")
        text = encoded_query(query)
        if settings.is_signed:
            headers = signed_headers(
                self._source.credentials(), region=settings.region, method=method, host=client.host, path=path,
                query=text, headers=headers,
                body_sha256=hashlib.sha256(body).hexdigest() if len(body) else EMPTY_SHA256,
                seconds=time.time() + self._ahead_s,
            )  # fmt: skip
        self.traffic.note(sent=len(body))
        try:
            return client.request(method, f"{path}?{text}" if text else path, headers=headers, body=body, into=into)
        except http.client.HTTPException as error:
            raise ConnectionError(f"no HTTP answer: {type(error).__name__}") from error

    def _move_to(self, region: str) -> None:
        before = self._settings
        usual = f"https://s3.{before.region}.amazonaws.com"
        endpoint = f"https://s3.{region}.amazonaws.com" if before.endpoint == usual else before.endpoint
        self._settings = replace(before, region=region, endpoint=endpoint)
        self._http.close()
        self._connect()

    def _connect(self) -> None:
        address, self._path = self._settings.address(self.bucket)
        self._http = HttpClient(address, ca_file=self._settings.ca_file)


def _serves_no_ranges(where: str) -> StorageError:
    return StorageError("the server does not serve byte ranges", where=where, hint="copy the files, and open the copy")


def _ends_early(where: str, offset: int, length: int, size: int) -> StorageError:
    got = max(size - offset, 0)
    return StorageError(
        f"expected {counted(length, 'byte')}, got {got:,} before the end of the file ({length - got:,} missing)",
        where=f"{where}:{offset}",
    )


def _ahead(date: str) -> float | None:
    """Seconds by which the time that a server tells is before that of this machine; None where it tells none."""
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except ValueError:
        return None
