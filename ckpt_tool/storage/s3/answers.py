"""What S3 answers: pages of listings, and what its errors mean. Knows XML and codes, and sends nothing."""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping
from datetime import datetime
from urllib.parse import unquote_plus
from xml.etree import ElementTree as ET

from ckpt_tool.errors import NotFound, StorageError
from ckpt_tool.records import dataclass
from ckpt_tool.storage.remote.http_client import HttpStatusError, Response, ShortAnswerError

__all__ = [
    "Page",
    "S3Object",
    "check_range",
    "failure_of",
    "is_whole",
    "page_of",
    "total_of",
    "tree_of",
    "xml_text",
    "xml_time",
]

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)$")
_TOTAL = re.compile(r"bytes (?:\d+-\d+|\*)/(\d+)$")
_ENDED = frozenset({"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"})
_NO_SERVICE = "check AWS_ENDPOINT_URL: it may be the address of a console or of a proxy, not of the storage"


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object as it is listed."""

    key: str
    nbytes: int
    modified: float | None
    """Seconds since 1970."""
    tag: str = ""
    """The server's name for the content, an ETag; empty where it tells none."""


@dataclass(frozen=True, slots=True)
class Page:
    """One answer of a listing."""

    objects: tuple[S3Object, ...]
    folders: tuple[str, ...]
    """Common prefixes, each with its ``/``, where a delimiter was asked for."""
    next_token: str | None = None
    """What asks for the page after it; None behind the last one."""


def page_of(data: bytes, prefix: str, where: str) -> Page:
    """The page of a listing of ``prefix`` that an answer is.

    Raises:
        ShortAnswerError: it was cut.
        HttpStatusError: it tells of an error, though the status did not.
        StorageError: it is no listing, or not that one.
    """
    try:
        tree = _parsed(data)
    except ET.ParseError as error:
        if data.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
            raise StorageError("the answer is a web page, not a listing", where=where, hint=_NO_SERVICE) from error
        raise ShortAnswerError(f"the listing is no XML: {error}") from error  # where nobody said how long it is
    if tree.tag == "Error":
        raise HttpStatusError(500, xml_text(tree, "Code"), xml_text(tree, "Message"), headers={})
    if tree.tag != "ListBucketResult":
        raise StorageError(f"the answer is <{tree.tag[:40]}>, not a listing", where=where, hint=_NO_SERVICE)
    # A server that does not know how to encode keys says so by not saying that it did.
    is_encoded = xml_text(tree, "EncodingType") == "url"
    objects = tuple(_object(node, where, is_encoded=is_encoded) for node in tree.iter("Contents"))
    folders = tuple(_key(node, "Prefix", is_encoded=is_encoded) for node in tree.iter("CommonPrefixes"))
    stray = next((key for key in (*(o.key for o in objects), *folders) if not key.startswith(prefix)), None)
    if stray is not None:
        text = f"the server lists {stray!r}, which does not begin with {prefix!r}"
        raise StorageError(text, where=where, hint="check the slashes of the URL")
    token = xml_text(tree, "NextContinuationToken") or None
    if xml_text(tree, "IsTruncated") != "true":
        return Page(objects, folders)
    if token is None:
        raise StorageError("the listing is cut, and the server does not say how to go on", where=where)
    return Page(objects, folders, token)


def failure_of(answer: Response, bucket_url: str) -> NotFound | HttpStatusError:
    """What an answer that is no success means."""
    code, message, place = answer.headers.get("x-amz-error-code", ""), "", answer.headers.get("location", "")
    if answer.data.lstrip()[:1] == b"<":
        try:
            tree = _parsed(answer.data)
            code, message = xml_text(tree, "Code"), xml_text(tree, "Message")
            place = xml_text(tree, "Endpoint") or place
        except ET.ParseError:  # a page of some proxy
            pass
    if code == "NoSuchBucket":
        return NotFound("no such bucket", where=bucket_url)
    text = code or http.client.responses.get(answer.status, "")
    return HttpStatusError(
        answer.status, text, message, headers=answer.headers, hint=_hint(answer, code, place.partition("?")[0])
    )


def _hint(answer: Response, code: str, place: str) -> str | None:
    """What helps against an error, where more can be told than its kind does."""
    if code in _ENDED:
        return "the credentials of this session have ended: log in again, or renew AWS_SESSION_TOKEN"
    if code == "RequestTimeTooSkewed":
        return f"set the clock of this machine: the server's says {answer.headers.get('date', 'another time')}"
    if code == "InvalidObjectState":
        return "the object lies in an archive: restore it first (aws s3api restore-object)"
    if answer.status in {301, 302, 303, 307, 308}:
        return f"the bucket is served elsewhere{f', at {place}' if place else ''}: set AWS_REGION or AWS_ENDPOINT_URL"
    return None


def check_range(headers: Mapping[str, str], offset: int, length: int) -> None:
    """See that an answer says of itself that it is the range which was asked for, where it says anything.

    Raises:
        ShortAnswerError: it is another one, as that of a cache which mixes up what it keeps.
    """
    said = headers.get("content-range", "")
    match = _RANGE.match(said)
    if match is not None and (int(match[1]), int(match[2])) != (offset, offset + length - 1):
        raise ShortAnswerError(f"expected bytes {offset}-{offset + length - 1}, the server sent {said!r}")


def is_whole(headers: Mapping[str, str], length: int) -> bool:
    """Whether a success has more in it than the ``length`` bytes that were asked for, and does not say which."""
    announced = headers.get("content-length", "")
    return "content-range" not in headers and announced.isdecimal() and int(announced) > length


def total_of(headers: Mapping[str, str]) -> int | None:
    """Size of the whole object, where the answer to a range tells it."""
    match = _TOTAL.match(headers.get("content-range", ""))
    return int(match[1]) if match else None


def tree_of(data: bytes, where: str) -> ET.Element:
    """The XML document that an answer is, its names without namespaces, which servers spell differently.

    Raises:
        StorageError: it is none.
    """
    try:
        return _parsed(data)
    except ET.ParseError as error:
        raise StorageError(f"the answer is no XML: {error}", where=where, hint=_NO_SERVICE) from error


def _parsed(data: bytes) -> ET.Element:
    tree = ET.fromstring(data)  # noqa: S314 - the parser has limits of its own against entities that grow
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


def _object(node: ET.Element, where: str, *, is_encoded: bool) -> S3Object:
    key, size = _key(node, "Key", is_encoded=is_encoded), xml_text(node, "Size")
    if size and not size.isdecimal():
        raise StorageError(f"the server says that {key!r} has {size[:40]!r} bytes", where=where)
    return S3Object(key, int(size or 0), xml_time(node, "LastModified"), xml_text(node, "ETag"))


def _key(node: ET.Element, name: str, *, is_encoded: bool) -> str:
    return unquote_plus(xml_text(node, name)) if is_encoded else xml_text(node, name)
