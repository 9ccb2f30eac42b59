"""Answers of S3 that are wrong, odd or refuse: each ends in what was asked for, or in one error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any

import pytest

from ckpt_tool.errors import CkptError, StorageError, UsageError
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.remote import retry
from ckpt_tool.storage.s3.client import S3Client
from ckpt_tool.storage.s3.credentials import read_settings
from ckpt_tool.storage.traffic import counting
from tests.storage.s3_server import BUCKET, Bucket, s3_environment, s3_server

RUN = f"s3://{BUCKET}/run"
DATA = bytes(range(200))


@pytest.fixture(params=["by obstore", "alone"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The one bucket of a server that this process talks to, with a file in it; through either client."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    if request.param == "alone":
        monkeypatch.setattr("ckpt_tool.storage.s3.client.fast_reads", lambda *_: None)
    with s3_server() as (endpoint, bucket):
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        bucket.objects["run/x"] = DATA
        yield bucket


def is_list(handler: Any) -> bool:
    """Whether a request asks for a listing."""
    return "list-type" in handler.path


def is_read(handler: Any) -> bool:
    """Whether it asks for bytes."""
    return handler.command == "GET" and not is_list(handler)


def error(which: Callable[[Any], bool], status: int, code: str, **headers: str) -> Callable[[Any], bool]:
    """What answers some requests with an error."""

    def answer(handler: Any) -> bool:
        if not which(handler):
            return False
        handler._error(status, code, {name.replace("_", "-"): text for name, text in headers.items()})
        return True

    return answer


def text(data: str | bytes) -> Callable[[Any], bool]:
    """What answers listings with something."""

    def answer(handler: Any) -> bool:
        if is_list(handler):
            handler._answer(200, data.encode() if isinstance(data, str) else data)
            return True
        return False

    return answer


def first_byte() -> bytes:
    """What a program does: a listing, and a read."""
    store, _ = open_store(RUN)
    try:
        return store.read("x", 3, 1)
    finally:
        store.close()


REFUSALS = {
    "ended": (error(lambda _: True, 400, "ExpiredToken"), "400 ExpiredToken", "log in again"),
    "archived": (error(is_read, 403, "InvalidObjectState"), "InvalidObjectState", "restore it first"),
    "moved": (error(is_list, 301, "PermanentRedirect"), "301 PermanentRedirect", "AWS_REGION or AWS_ENDPOINT_URL"),
    "sent on": (
        error(is_list, 307, "TemporaryRedirect", location="http://there/x?secret"), "307", "at http://there/x: set",
    ),
    "no list": (error(is_list, 403, "AccessDenied"), "access is refused", "s3:ListBucket"),
    "no such thing": (error(is_list, 501, "NotImplemented"), r"501 NotImplemented: as asked$", None),
    "an hour": (error(is_list, 503, "SlowDown", retry_after="3600"), "503 SlowDown", "come again in 3,600 s"),
    "console": (text("<!DOCTYPE html><html>..."), "is a web page, not a listing", "AWS_ENDPOINT_URL"),
    "other XML": (text("<html></html>"), "is <html>, not a listing", "AWS_ENDPOINT_URL"),
    "error": (text("<Error><Code>InternalError</Code></Error>"), r"500 InternalError .after 5 attempts", None),
    "torn": (text("<ListBucketResult><Contents>"), r"the listing is no XML.*after 5 attempts", None),
    "size": (
        text("<ListBucketResult><Contents><Key>run/x</Key><Size>-5</Size></Contents></ListBucketResult>"),
        "the server says that 'run/x' has '-5' bytes", None,
    ),
    "cut": (
        text("<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"), "does not say how to go on", None,
    ),
    "endless": (
        text(
            "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>a</NextContinuationToken>"
            "</ListBucketResult>"
        ), "its pages repeat", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_no_answer_is_one_error(bucket: Bucket, name: str) -> None:
    """It says what came, and what helps where anything does; half a listing is none, and no listing is endless."""
    bucket.answers, message, hint = REFUSALS[name]
    with pytest.raises(StorageError, match=message) as caught:
        first_byte()
    said = caught.value.hint
    assert said is None if hint is None else said is not None and hint in said
    assert said is None or "secret" not in said


def test_a_server_that_asks_for_a_pause_gets_it(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """``Retry-After`` goes before the own pauses, which are shorter here."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    left = [error(is_list, 503, "SlowDown", retry_after="7"), error(is_list, 429, "TooManyRequests", retry_after="2")]
    bucket.answers = lambda handler: is_list(handler) and bool(left) and left.pop(0)(handler)
    assert first_byte() == b"\x03"
    assert slept[:2] == [7.0, 2.0]


@pytest.mark.parametrize("length", [5, 30])
def test_another_range_is_not_taken_for_the_one_that_was_asked_for(bucket: Bucket, length: int) -> None:
    """A cache may mix up what it keeps; as many bytes as were asked for tell nothing."""
    wrong = [0]

    def shifted(handler: Any) -> bool:
        if not is_read(handler):
            return False
        wrong[0] += 1
        handler._answer(206, DATA[:length], {"Content-Range": f"bytes 0-{length - 1}/{len(DATA)}"})
        return True

    store, _ = open_store(RUN)
    bucket.answers = shifted
    with pytest.raises(
        StorageError, match=rf"expected bytes 7-{6 + length}, the server sent 'bytes 0-{length - 1}/200"
    ):
        store.read_into("x", 7, memoryview(bytearray(length)))
    assert wrong[0] >= 5
    bucket.answers = None
    assert store.read("x", 7, length) == DATA[7 : 7 + length]
    store.close()


@pytest.mark.parametrize("offset", [0, 7])
def test_a_server_that_sends_whole_objects(bucket: Bucket, offset: int) -> None:
    """It is asked once: there is nothing to wait for."""
    store, _ = open_store(RUN)

    def whole(handler: Any) -> bool:
        if is_read(handler):
            handler._answer(200, DATA)
            return True
        return False

    bucket.answers = whole
    with counting() as traffic, pytest.raises(StorageError, match="does not serve byte ranges"):
        open_store(RUN)[0].read_into("x", offset, memoryview(bytearray(5)))
    assert traffic.n_retries <= 1  # obstore's
    store.close()


def test_a_clock_that_is_wrong_is_set_by_that_of_the_server(bucket: Bucket) -> None:
    """What is signed an hour before the server's time is refused; the second time it is signed by that time."""
    now = time.time() + 3600
    signed: list[str] = []

    def late(handler: Any) -> bool:
        signed.append(handler.headers["x-amz-date"])
        if signed[-1] < time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now - 900)):
            handler.date_time_string = lambda *_: formatdate(now, usegmt=True)
            handler._error(403, "" if handler.command == "HEAD" else "RequestTimeTooSkewed")
            return True
        return False

    bucket.answers = late
    with counting() as traffic:
        assert first_byte() == b"\x03"
    assert S3Client(BUCKET).head("run/x") is not None
    assert (traffic.n_requests, len(signed)) == (3, 5)


def test_keys_that_have_ended_are_looked_for_again(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have renewed them; where nobody has, they are not tried again."""

    def ended(handler: Any) -> bool:
        return "Credential=testkey/" in handler.headers["authorization"] and error(lambda _: True, 400, "ExpiredToken")(
            handler
        )

    client = S3Client(BUCKET)
    assert client.get("run/x") == DATA
    bucket.answers = ended
    with counting() as traffic, pytest.raises(StorageError, match="400 ExpiredToken"):
        S3Client(BUCKET).get("run/x")
    assert traffic.n_requests == 1
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "renewed")
    assert client.get("run/x") == DATA
    client.close()


def test_one_object_of_a_bucket_that_must_not_be_listed(bucket: Bucket) -> None:
    """A policy may grant reads alone: then a file is opened, and it alone."""
    bucket.objects["run/y"] = b"beside it"
    bucket.answers = error(is_list, 403, "AccessDenied")
    store, listing = open_store(f"{RUN}/x")
    assert (listing.entry, listing.sizes, set(listing.tags)) == ("x", {"x": 200}, set())
    assert store.read("x", 7, 3) == DATA[7:10]
    assert store.listing(anew=True) == listing
    store.close()
    with pytest.raises(StorageError, match="access is refused"):
        open_store(f"{RUN}/z")


def test_two_puts_at_once_are_no_refusal(bucket: Bucket) -> None:
    """409 tells that another request was under way, not who was first; it is asked again."""
    left = [error(lambda _: True, 409, "ConditionalRequestConflict")]
    bucket.answers = lambda handler: bool(left) and left.pop()(handler)
    assert S3Client(BUCKET).put("new", b"1", is_new=True)
    assert bucket.objects["new"] == b"1"


@pytest.mark.parametrize("is_encoded", [True, False])
def test_keys_are_decoded_where_the_server_has_encoded_them(bucket: Bucket, is_encoded: bool) -> None:
    """One that does not know how says nothing of it, and its keys stay as they are."""
    key = "a%20b+c" if is_encoded else "a b c"
    tag = "<EncodingType>url</EncodingType>" if is_encoded else ""
    listed = "a%2520b%2Bc" if is_encoded else "a b c"
    bucket.answers = text(
        f"<ListBucketResult>{tag}<Contents><Key>run/{listed}</Key><Size>1</Size></Contents></ListBucketResult>"
    )
    assert open_store(RUN)[1].sizes == {key: 1}
    bucket.answers = text(
        "<ListBucketResult><Contents><Key>run/a%20b+c</Key><Size>1</Size></Contents></ListBucketResult>"
    )
    assert open_store(RUN)[1].sizes == {"a%20b+c": 1}


def test_head_without_a_size(bucket: Bucket) -> None:
    """It is not taken for an empty object."""

    def silent(handler: Any) -> bool:
        if handler.command != "HEAD":
            return False
        handler.send_response(200)
        handler.end_headers()
        return True

    bucket.answers = silent
    with pytest.raises(StorageError, match="does not tell the size"):
        S3Client(BUCKET).head("run/x")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:abc", "is no address: Port could not be cast"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:70000", "is no address: Port out of range"),
        ("AWS_ENDPOINT_URL", "http://[::1", "is no address: Invalid IPv6 URL"),
        ("AWS_ENDPOINT_URL", "http://local host", "expected an http:// or https:// address, got 'http://local host'"),
        ("AWS_REGION", "eu\nwest", "is no region: 'eu\\\\nwest'"),
        ("AWS_ACCESS_KEY_ID", "sch\u00fcssel", "has letters in it that no key has"),
        ("AWS_SESSION_TOKEN", "a\nb", "has letters in it that no key has"),
        ("http_proxy", "http://proxy:abc", "names no proxy: Port could not be cast"),
        ("http_proxy", "socks5://proxy:1080", "expected a proxy that speaks http://, got socks5://"),
    ],
)
def test_settings_that_say_nothing(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    """Whatever the environment has, it is named."""
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv(name, value)
    with pytest.raises(CkptError, match=message) as caught:
        first_byte()
    assert name in (caught.value.where or "")


def test_ends_of_lines_behind_settings(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and stores of secrets end their values with one."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "testkey\n")
    found = read_settings()[1].credentials()
    assert (found.access_key, found.secret_key) == ("testkey", "testkey")
    assert first_byte() == b"\x03"


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_certificates_that_cannot_be_read(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, content: bytes | None
) -> None:
    """The file is named, not the object; where nothing is to be trusted it does not matter."""
    path = tmp_path / "trusted.pem"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(path))
    assert first_byte() == b"\x03"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://127.0.0.1:9")
    with pytest.raises(UsageError, match="no certificates can be read") as caught:
        first_byte()
    assert caught.value.where == str(path)


def test_a_url_that_is_no_text(bucket: Bucket) -> None:
    """A shell passes on bytes that are no UTF-8, and keys of S3 are."""
    with pytest.raises(UsageError, match="is not UTF-8"):
        open_store(f"s3://{BUCKET}/\udcff")


def test_a_proxy_that_wants_a_password(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in its address goes there with each request, as the server hears that plays the proxy too."""
    heard: list[tuple[str, str]] = []

    def listening(handler: Any) -> bool:
        heard.append((handler.path.partition("/bucket")[0], handler.headers["proxy-authorization"]))
        return False

    bucket.answers = listening
    server = read_settings()[0].endpoint
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("http_proxy", server.replace("//", "//me:p%40ss@"))
    client = S3Client(BUCKET)
    assert client.get("run/x") == DATA
    assert heard == [(server, "Basic bWU6cEBzcw==")]
    client.close()
