"""Requests to S3: pages, conditions, regions, credentials, failures."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.errors import NotFound, StorageError, UsageError
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.remote.http_client import HttpClient, Response
from ckpt_tool.storage.s3.client import S3Client
from ckpt_tool.storage.s3.credentials import read_settings
from ckpt_tool.storage.traffic import counting
from tests.storage.s3_server import BUCKET, Bucket, s3_environment, s3_server


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """The one bucket of a server that this process talks to."""
    with s3_server() as (endpoint, bucket):
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        yield bucket


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)


def test_all_pages(bucket: Bucket) -> None:
    """Five objects in pages of two are five files, and three requests."""
    bucket.page_size = 2
    bucket.objects |= {f"run/{i} +&%.pt": bytes(i) for i in range(5)} | {"running/x": b"", "run": b""}
    with counting() as traffic:
        _, listing = open_store(f"s3://{BUCKET}/run")
    assert listing.sizes == {f"{i} +&%.pt": i for i in range(5)}
    assert (bucket.count("GET"), traffic.n_requests, traffic.n_listings) == (3, 3, 3)


def test_one_object(bucket: Bucket) -> None:
    """The URL of an object opens its folder with it as the entry; deeper objects are not listed."""
    bucket.objects |= {"run/a.pt": b"a", "run/b.pt": b"bb", "run/deep/c.pt": b"ccc"}
    store, listing = open_store(f"s3://{BUCKET}/run/a.pt")
    assert (listing.entry, listing.sizes, store.url) == ("a.pt", {"a.pt": 1, "b.pt": 2}, f"s3://{BUCKET}/run")
    assert store.read("b.pt", 0, 2) == b"bb"


def test_nothing_there(bucket: Bucket) -> None:
    """The hint names what is nearby; a bucket that is not there is told apart."""
    bucket.objects["run/step_100/x"] = b""
    with pytest.raises(NotFound, match="no such file or folder") as caught:
        open_store(f"s3://{BUCKET}/run/step_10")
    assert caught.value.hint == "did you mean step_100?"
    with pytest.raises(NotFound, match="no such bucket") as caught:
        open_store("s3://other/run")
    assert os.environ["AWS_ENDPOINT_URL"] in (caught.value.hint or "")
    bucket.objects["run/made/"] = b""
    with pytest.raises(NotFound, match="is a folder with nothing in it"):
        open_store(f"s3://{BUCKET}/run/made")


def test_a_server_that_folds_slashes(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SeaweedFS does: its keys are not those that were asked for, and are not cut to fit."""
    bucket.objects["run/step_1/x"] = b""
    real = S3Client._send

    def folding(client: S3Client, method: str, key: str, *, query: Any = None, **others: Any) -> Response:
        return real(client, method, key, query=query and {**query, "prefix": "run/step_1/"}, **others)

    monkeypatch.setattr(S3Client, "_send", folding)
    with pytest.raises(StorageError, match="which does not begin with 'run/step_1//'"):
        open_store(f"s3://{BUCKET}/run/step_1//")


def test_object_that_is_there_stays(bucket: Bucket) -> None:
    """A conditional put stores nothing over what is there, and says so."""
    client = S3Client(BUCKET)
    assert client.put("x", b"1", is_new=True)
    assert not client.put("x", b"2", is_new=True)
    assert (bucket.objects["x"], client.get("x"), client.get("y"), client.head("y")) == (b"1", b"1", None, None)
    client.delete("x")
    client.delete("x")
    assert bucket.objects == {}


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_timeout_is_a_number(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The environment's word is checked."""
    monkeypatch.setenv("CKPT_TIMEOUT_S", text)
    with pytest.raises(UsageError, match="expected a number of seconds"):
        S3Client(BUCKET)


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize(
    ("endpoint", "style", "host", "target"),
    [
        ("http://s3.lab:9000", "", "s3.lab:9000", "/bkt"),
        ("http://s3.lab/storage/v1/", "", "s3.lab", "/storage/v1/bkt"),
        ("https://oss.lab", "true", "bkt.oss.lab", ""),
    ],
)
def test_addresses(monkeypatch: pytest.MonkeyPatch, endpoint: str, style: str, host: str, target: str) -> None:
    """A bucket is part of the path, behind that of the endpoint, or of the host where settings say so."""
    asked: list[tuple[str, str]] = []

    def request(client: HttpClient, _: str, path: str, **__: Any) -> Response:
        asked.append((client.host, path))
        return Response(200, {}, b"<ListBucketResult/>")

    monkeypatch.setattr(HttpClient, "request", request)
    for name, value in {**s3_environment(endpoint), "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": style}.items():
        monkeypatch.setenv(name, value)
    client = S3Client("bkt")
    client.get("a b")
    list(client.pages("x"))
    assert asked == [(host, f"{target}/a%20b"), (host, f"{target or '/'}?encoding-type=url&list-type=2&prefix=x")]


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not there is one storage error, after all attempts."""
    for name, value in s3_environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    with (
        counting() as traffic,
        pytest.raises(StorageError, match=r"127\.0\.0\.1:9 does not answer: Connection refused .after 5 attempts"),
    ):
        open_store(f"s3://{BUCKET}/run")
    assert (traffic.n_requests, traffic.n_retries) == (5, 4)


class Elsewhere(BaseHTTPRequestHandler):
    """A server that takes only requests signed for another region, then one that hands out keys."""

    def do_GET(self) -> None:
        """Region, or keys for the right token."""
        text = self.headers.get("authorization", "")
        if self.path == "/keys?x=1":
            found = {
                "AccessKeyId": "granted",
                "SecretAccessKey": "s",
                "Token": "t",
                "Expiration": "2100-01-01T00:00:00Z",
            }
            data = json.dumps(found).encode() if text == "password" else b""
            self._answer(200 if data else 401, data)
        elif "/eu-west-1/s3/" not in text:
            self._answer(400, b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>")
        elif "Credential=granted/" in text and self.headers["x-amz-security-token"] == "t":
            self._answer(200, b"0123")
        else:
            self._answer(403, b"<Error><Code>InvalidAccessKeyId</Code></Error>")

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("x-amz-bucket-region", "eu-west-1")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its address; the environment names it, and holds no keys."""
    server = HTTPServer(("127.0.0.1", 0), Elsewhere)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    for name, value in s3_environment(url).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    yield url
    server.shutdown()
    server.server_close()
    thread.join()


def test_container_keys_and_the_region_of_the_bucket(
    elsewhere: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keys come from the container's service, and a bucket that says where it lies is asked there."""
    (tmp_path / "token").write_text("password\n")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{elsewhere}/keys?x=1")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    assert S3Client(BUCKET).get("x") == b"0123"


def test_no_keys(elsewhere: str) -> None:
    """Without keys nothing is asked, and the hint says where they are looked for."""
    with pytest.raises(StorageError, match="no credentials for S3") as caught:
        S3Client(BUCKET).get("x")
    assert "AWS_ACCESS_KEY_ID" in (caught.value.hint or "")


def test_refused(elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong keys are a storage error that talks of credentials, asked once."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    with (
        counting() as traffic,
        pytest.raises(StorageError, match="access is refused: 403 InvalidAccessKeyId") as caught,
    ):
        S3Client(BUCKET).get("x")
    assert "credentials" in (caught.value.hint or "")
    assert traffic.n_requests == 2  # the first told the region


def test_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keys, region and endpoint of a profile; what the environment says goes before."""
    (tmp_path / "config").write_text(
        "[profile lab]\nregion = eu-north-1\nendpoint_url = http://store:9000/\ns3 =\n  addressing_style = virtual\n"
    )
    (tmp_path / "credentials").write_text(
        "[lab]\naws_access_key_id = K\naws_secret_access_key = S\naws_session_token=T\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    settings, source = read_settings()
    assert (settings.endpoint, settings.region, settings.is_signed) == ("http://store:9000", "eu-north-1", True)
    assert settings.address("bkt") == ("http://bkt.store:9000", "")
    found = source.credentials()
    assert (found.access_key, found.secret_key, found.token) == ("K", "S", "T")
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert (read_settings()[0].region, read_settings()[0].is_signed) == ("us-west-2", False)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(UsageError, match="no profile 'nobody'"):
        read_settings()
