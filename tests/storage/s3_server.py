"""As much of S3 as the client needs, in this process, with its objects in a dict and a record of all requests.

Bodies are checked against the SHA-256 that was signed, conditions and multipart uploads behave as the API reference
says, and listings have pages. Signatures are not computed again: that is what the tests with a real server are for.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
MIN_PART_BYTES = 5 << 20
MODIFIED, INITIATED, PART_CAME = (f"2026-01-01T0{hour}:00:00.000Z" for hour in range(3))
"""When objects were written, uploads begun and parts sent: all at once."""


@dataclass
class Bucket:
    """What the server holds."""

    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    """By upload: its key and its parts."""
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    """Method, path with query, status."""
    page_size: int = 1000
    min_part_bytes: int = MIN_PART_BYTES
    answers: Callable[[_Handler], bool] | None = None
    """Asked before the server does what is usual: True, where it has answered a request by itself."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def count(self, method: str, text: str = "") -> int:
        """Requests whose method begins so and whose path or query has ``text`` in it."""
        return sum(m.startswith(method) and text in path for m, path, _ in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    bucket: Bucket

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = urlsplit(self.path)
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        name, _, key = unquote(parts.path)[1:].partition("/")
        with self.bucket.lock:
            if self.bucket.answers is not None and self.bucket.answers(self):
                return
            if "AWS4-HMAC-SHA256 Credential=" not in self.headers.get("authorization", ""):
                self._error(403, "AccessDenied")
            elif hashlib.sha256(body).hexdigest() != self.headers["x-amz-content-sha256"]:
                self._error(400, "XAmzContentSHA256Mismatch")
            elif name != BUCKET:
                self._error(404, "NoSuchBucket")
            else:
                getattr(self, f"_{self.command.lower()}")(key, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815 - the interface of http.server

    def _get(self, key: str, query: dict[str, str], _: bytes) -> None:
        if "list-type" in query:
            self._list(query)
        elif "uploads" in query:
            self._list_uploads(query)
        elif "uploadId" in query:
            self._list_parts(query["uploadId"], int(query.get("part-number-marker") or 0))
        elif key not in self.bucket.objects:
            self._error(404, "NoSuchKey")
        else:
            self._object(self.bucket.objects[key])

    def _object(self, data: bytes) -> None:
        asked = self.headers.get("range")
        if asked is None:
            self._answer(200, data)
            return
        first, last = (int(text) for text in asked.removeprefix("bytes=").split("-"))
        if first >= len(data):
            self._error(416, "InvalidRange", {"Content-Range": f"bytes */{len(data)}"})
            return
        end = min(last + 1, len(data))
        self._answer(206, data[first:end], {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}"})

    def _head(self, key: str, *_: Any) -> None:
        data = self.bucket.objects.get(key)
        self._answer(404 if data is None else 200, data or b"")

    def _put(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" not in query:
            self._store(key, body)
            return
        upload = self.bucket.uploads.get(query["uploadId"])
        if upload is None:
            self._error(404, "NoSuchUpload")
            return
        upload[1][int(query["partNumber"])] = body
        self._answer(200, b"", {"ETag": _etag(body)})

    def _post(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            number = f"upload-{len(self.bucket.requests)}"
            self.bucket.uploads[number] = (key, {})
            self._xml(f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>")
            return
        upload = self.bucket.uploads.get(query["uploadId"])
        if upload is None:
            self._error(404, "NoSuchUpload")
            return
        named = [int(text.partition("<")[0]) for text in body.decode().split("<PartNumber>")[1:]]
        sizes = [len(upload[1].get(number, b"")) for number in named]
        if not named or named != sorted(upload[1]) or any(size < self.bucket.min_part_bytes for size in sizes[:-1]):
            self._error(400, "EntityTooSmall")
        elif self._store(key, b"".join(upload[1][number] for number in named), is_xml=True):
            del self.bucket.uploads[query["uploadId"]]

    def _delete(self, key: str, query: dict[str, str], _: bytes) -> None:
        if "uploadId" in query:
            self.bucket.uploads.pop(query["uploadId"], None)
        else:
            self.bucket.objects.pop(key, None)
        self._answer(204, b"")

    def _store(self, key: str, data: bytes, *, is_xml: bool = False) -> bool:
        if self.headers.get("if-none-match") == "*" and key in self.bucket.objects:
            self._error(412, "PreconditionFailed")
            return False
        self.bucket.objects[key] = data
        if is_xml:
            self._xml("<CompleteMultipartUploadResult></CompleteMultipartUploadResult>")
        else:
            self._answer(200, b"", {"ETag": _etag(data)})
        return True

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        names: dict[str, bool] = {}
        for key in sorted(k for k in self.bucket.objects if k.startswith(prefix)):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            names.setdefault(key if cut < 0 else key[: cut + 1], cut < 0)
        rows = [name for name in sorted(names) if name > query.get("continuation-token", "")]
        page = rows[: self.bucket.page_size]
        text = "<EncodingType>url</EncodingType>" if query.get("encoding-type") == "url" else ""
        text += f"<IsTruncated>{str(len(rows) > len(page)).lower()}</IsTruncated>"
        if len(rows) > len(page):
            text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        for name in page:
            if names[name]:
                text += (
                    f"<Contents><Key>{quote(name)}</Key><Size>{len(self.bucket.objects[name])}</Size>"
                    f"<LastModified>{MODIFIED}</LastModified><ETag>{_etag(self.bucket.objects[name])}</ETag></Contents>"
                )
            else:
                text += f"<CommonPrefixes><Prefix>{quote(name)}</Prefix></CommonPrefixes>"
        self._xml(f"<ListBucketResult>{text}</ListBucketResult>")

    def _list_uploads(self, query: dict[str, str]) -> None:
        rows = [(number, key) for number, (key, _) in self.bucket.uploads.items() if key.startswith(query["prefix"])]
        text = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{number}</UploadId><Initiated>{INITIATED}</Initiated></Upload>"
            for number, key in rows
        )
        self._xml(f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{text}</ListMultipartUploadsResult>")

    def _list_parts(self, number: str, after: int) -> None:
        if number not in self.bucket.uploads:
            self._error(404, "NoSuchUpload")
            return
        parts = self.bucket.uploads[number][1]
        rows = [part for part in sorted(parts) if part > after]
        page = rows[: self.bucket.page_size]
        text = "".join(
            f"<Part><PartNumber>{part}</PartNumber><ETag>{_etag(parts[part])}</ETag><Size>{len(parts[part])}</Size>"
            f"<LastModified>{PART_CAME}</LastModified></Part>"
            for part in page
        )
        more = f"<IsTruncated>{str(len(rows) > len(page)).lower()}</IsTruncated>"
        if len(rows) > len(page):
            more += f"<NextPartNumberMarker>{page[-1]}</NextPartNumberMarker>"
        self._xml(f"<ListPartsResult>{more}{text}</ListPartsResult>")

    def _xml(self, text: str) -> None:
        self._answer(200, f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode())

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        data = f"<Error><Code>{code}</Code><Message>as asked</Message></Error>".encode()
        self._answer(status, b"" if self.command == "HEAD" else data, headers)

    def _answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.bucket.requests.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Nothing: clients that are killed are what the tests are about."""


def _etag(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@contextmanager
def s3_server() -> Iterator[tuple[str, Bucket]]:
    """Address of a running server, and what it holds in its one bucket."""
    bucket = Bucket()
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def s3_environment(endpoint: str) -> dict[str, str]:
    """Variables with which a process talks to ``endpoint`` and to nothing else."""
    return {
        "AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret", "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1", "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
