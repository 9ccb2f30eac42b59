"""Requests to one bucket: signed, counted, tried again. Knows keys and bytes, no folders and no checkpoints.

Written against the S3 API reference of 2006-03-01 (ListObjectsV2, GetObject, PutObject, multipart uploads). Buckets are
addressed by path, which most servers understand, or by host where settings say so. Keys are never normalised.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Literal
from urllib.parse import unquote
from xml.etree import ElementTree as ET

from ckpt_tool.errors import NotFound, StorageError, UsageError
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.remote.http_client import HttpClient, HttpStatusError, Response, ShortAnswerError
from ckpt_tool.storage.remote.retry import retried
from ckpt_tool.storage.s3.credentials import read_settings
from ckpt_tool.storage.s3.fast_reads import FastReads, fast_reads, takes_key
from ckpt_tool.storage.s3.signing import EMPTY_SHA256, encoded_path, encoded_query, signed_headers
from ckpt_tool.storage.traffic import current_traffic

__all__ = ["Page", "S3Client", "S3Object", "parsed_xml", "split_s3_url", "xml_text", "xml_time"]

_NO_STATUS: frozenset[int] = frozenset()
_TOTAL = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)$")


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object as it is listed."""

    key: str
    nbytes: int
    modified: float | None
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Page:
    """One answer of a listing."""

    objects: tuple[S3Object, ...]
    folders: tuple[str, ...]
    """Common prefixes, each with its ``/``, where a delimiter was asked for."""


def split_s3_url(url: str) -> tuple[str, str]:
    """Bucket and key, the latter as it is written.

    >>> split_s3_url("s3://bucket//a/b"), split_s3_url("s3://bucket")
    (('bucket', '/a/b'), ('bucket', ''))
    """
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
            tree = self._listed(query)
            page = Page(
                tuple(_object(node) for node in tree.iter("Contents")),
                tuple(unquote(xml_text(node, "Prefix").replace("+", " ")) for node in tree.iter("CommonPrefixes")),
            )
            stray = next(
                (key for key in (*(o.key for o in page.objects), *page.folders) if not key.startswith(prefix)), None
            )
            if stray is not None:
                text = f"the server lists {stray!r}, which does not begin with {prefix!r}"
                raise StorageError(text, where=self.url_of(prefix), hint="check the slashes of the URL")
            yield page
            token = xml_text(tree, "NextContinuationToken")
            if xml_text(tree, "IsTruncated") != "true" or not token:
                return
            query["continuation-token"] = token

    def head(self, key: str) -> S3Object | None:
        """The object, None where there is none."""
        answer = self.request("HEAD", key, allowed=frozenset({404}))
        return None if answer.status == 404 else S3Object(key, int(answer.headers.get("content-length", "0")), None)

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
                size = _total(error.headers)
                if size is not None and size < offset + buffer.nbytes:
                    raise _ends_early(where, offset, buffer.nbytes, size) from error
                raise
            if answer.status == 200 and offset:
                raise StorageError("the server does not serve byte ranges", where=where)
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
        allowed = frozenset({409, 412}) if is_new else _NO_STATUS
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
                raise _failure(replace(answer, status=500), self.url_of(key))
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

    def _listed(self, query: Mapping[str, str]) -> ET.Element:
        def ask() -> ET.Element:
            answer = self._send("GET", "", query=query)
            try:
                return parsed_xml(answer.data)
            except ET.ParseError as error:  # an answer that was cut, where nobody said how long it is
                raise ShortAnswerError(f"the listing is no XML: {error}") from error

        self.traffic.note(requests=0, listings=1)
        return retried(ask, where=self.url_of(query["prefix"]), on_retry=self.traffic.note_retry)

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
        """One attempt, or two where the bucket turns out to lie in another region."""
        answer = self._sent_once(method, key, query or {}, headers or {}, body, into)
        region = answer.headers.get("x-amz-bucket-region")
        if answer.status in {301, 307, 400} and region and region != self._settings.region:
            self._move_to(region)
            answer = self._sent_once(method, key, query or {}, headers or {}, body, into)
        if answer.status < 300 or answer.status in allowed:
            return answer
        failure = _failure(answer, f"s3://{self.bucket}")
        if isinstance(failure, NotFound):
            failure.hint = f"{self._settings.endpoint} was asked: check the name, or AWS_ENDPOINT_URL and AWS_PROFILE"
        raise failure

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
        self._connect()

    def _connect(self) -> None:
        address, self._path = self._settings.address(self.bucket)
        self._http = HttpClient(address, ca_file=self._settings.ca_file)


def _failure(answer: Response, bucket_url: str) -> Exception:
    """What an answer that is no success means."""
    code, message = answer.headers.get("x-amz-error-code", ""), ""
    if answer.data.lstrip()[:1] == b"<":
        try:
            tree = parsed_xml(answer.data)
            code, message = xml_text(tree, "Code"), xml_text(tree, "Message")
        except ET.ParseError:  # a page of some proxy
            pass
    if code == "NoSuchBucket":
        return NotFound("no such bucket", where=bucket_url)
    return HttpStatusError(
        answer.status, code or http.client.responses.get(answer.status, ""), message, headers=answer.headers
    )


def _ends_early(where: str, offset: int, length: int, size: int) -> StorageError:
    got = max(size - offset, 0)
    return StorageError(
        f"expected {counted(length, 'byte')}, got {got:,} before the end of the file ({length - got:,} missing)",
        where=f"{where}:{offset}",
    )


def _total(headers: Mapping[str, str]) -> int | None:
    """Size of the whole object, where the answer to a range tells it."""
    match = _TOTAL.match(headers.get("content-range", ""))
    return int(match[1]) if match else None


def parsed_xml(data: bytes) -> ET.Element:
    """An XML document with its namespaces taken off, which servers spell differently."""
    tree = ET.fromstring(data)  # noqa: S314 - see the import
    for node in tree.iter():
        node.tag = node.tag.rpartition("}")[2]
    return tree


def xml_text(node: ET.Element, name: str) -> str:
    """Text of a child, empty where there is none."""
    return node.findtext(name) or ""


def xml_time(node: ET.Element, name: str) -> float | None:
    """A time in seconds since 1970, None where there is none."""
    when = xml_text(node, name)
    try:
        return datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp() if when else None
    except ValueError:
        return None


def _object(node: ET.Element) -> S3Object:
    key = unquote(xml_text(node, "Key").replace("+", " "))
    return S3Object(key, int(xml_text(node, "Size") or 0), xml_time(node, "LastModified"))
