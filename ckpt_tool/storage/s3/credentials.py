"""Who asks S3: credentials, region and endpoint from the places where every AWS tool looks, and from nowhere else.

In order: ``AWS_ACCESS_KEY_ID`` and its fellows; a web identity token (EKS); the profile in ``~/.aws``; the container's
service (ECS, EKS pods); the instance's (EC2, IMDSv2). A profile that logs in through SSO, assumes a role or runs a
process is left to botocore, where that is installed. Nothing is written, logged or shown.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from urllib.parse import urlencode, urlsplit
from xml.etree import ElementTree as ET

from ckpt_tool.errors import StorageError, UsageError
from ckpt_tool.records import dataclass
from ckpt_tool.storage.remote.http_client import HttpClient, Response, server_of
from ckpt_tool.storage.remote.retry import retried
from ckpt_tool.storage.s3.signing import Credentials

__all__ = ["S3Settings", "SettingsSource", "read_settings"]

_DEFAULT_REGION = "us-east-1"
_RENEWED_BEFORE_S = 300.0
_INSTANCE = "http://169.254.169.254"
_CONTAINER = "http://169.254.170.2"
_BY_BOTOCORE = ("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session")
_YES = frozenset({"1", "true", "yes"})
_VIRTUAL = re.compile(r"^\s*addressing_style\s*=\s*virtual\s*$", re.MULTILINE)
"""In the lines below ``s3 =`` of a profile."""
_HINT = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for public data"


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where requests go and in which region; the rest of what is needed to sign one."""

    endpoint: str
    region: str
    ca_file: str | None
    is_signed: bool
    """False: requests are anonymous."""
    is_virtual: bool = False
    """Whether the bucket is part of the host's name (`virtual-hosted style`), not of the path."""

    def address(self, bucket: str) -> tuple[str, str]:
        """Scheme and host that requests of a bucket go to, and the path in front of its keys, without a last slash."""
        parts = urlsplit(self.endpoint)
        if self.is_virtual:
            return f"{parts.scheme}://{bucket}.{parts.netloc}", parts.path
        return f"{parts.scheme}://{parts.netloc}", f"{parts.path}/{bucket}"


@dataclass(frozen=True, slots=True)
class _Granted:
    credentials: Credentials
    ends: float | None
    """Seconds since 1970, None for ever."""


def read_settings() -> tuple[S3Settings, SettingsSource]:
    """Settings of this process, and the source of its credentials; no request is made.

    Raises:
        UsageError: ``AWS_PROFILE`` names a profile that is not there, or ``AWS_ENDPOINT_URL`` no address.
    """
    profile = _profile()
    region = _first(os.environ.get("AWS_REGION"), os.environ.get("AWS_DEFAULT_REGION"), profile.get("region"))
    endpoint = _first(
        os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"), profile.get("endpoint_url")
    )
    if endpoint:
        try:
            server_of(endpoint)
        except UsageError as error:
            raise UsageError(f"{error.message}, got {endpoint!r}", where="AWS_ENDPOINT_URL") from error
    if region and not _is_plain(region):
        raise UsageError(f"is no region: {region!r}", where="AWS_REGION")
    settings = S3Settings(
        endpoint=(endpoint or f"https://s3.{region or _DEFAULT_REGION}.amazonaws.com").rstrip("/"),
        region=region or _DEFAULT_REGION,
        ca_file=_first(os.environ.get("AWS_CA_BUNDLE"), profile.get("ca_bundle")),
        is_signed=os.environ.get("AWS_SKIP_SIGNATURE", "").lower() not in _YES,
        is_virtual=os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in _YES
        or _VIRTUAL.search(profile.get("s3", "")) is not None,
    )
    return settings, SettingsSource(profile, settings.region)


class SettingsSource:
    """Credentials, asked for when they are first needed and again before they end. Safe to use from several threads."""

    def __init__(self, profile: Mapping[str, str], region: str) -> None:
        self._profile = profile
        self._region = region
        self._lock = threading.Lock()
        self._granted: _Granted | None = None

    def credentials(self) -> Credentials:
        """What to sign with now.

        Raises:
            StorageError: nobody grants any.
        """
        return self.granted()[0]

    def granted(self) -> tuple[Credentials, float | None]:
        """What to sign with now, and when it ends in seconds since 1970, None for never; raises as ``credentials``."""
        with self._lock:
            granted = self._granted
            if granted is None or (granted.ends is not None and granted.ends - time.time() < _RENEWED_BEFORE_S):
                granted = self._granted = self._find()
            return granted.credentials, granted.ends

    def renew(self) -> bool:
        """Look for credentials anew, those that were granted last being over; whether there are others now."""
        with self._lock:
            before, self._granted = self._granted, None
            self._profile = _profile()
        return before is None or self.credentials() != before.credentials

    def _find(self) -> _Granted:
        places: tuple[Callable[[], _Granted | None], ...] = (
            _of_environment,
            lambda: _of_web_identity(self._region),
            lambda: _of_profile(self._profile),
            _of_container,
            _of_instance,
        )
        for place in places:
            granted = place()
            if granted is not None:
                found = granted.credentials
                if not _is_plain(found.access_key + (found.token or "")):
                    text = "the access key or the token has letters in it that no key has"
                    raise StorageError(text, where="AWS_ACCESS_KEY_ID, AWS_SESSION_TOKEN or their profile")
                return granted
        raise StorageError("no credentials for S3 are found", where="environment, ~/.aws", hint=_HINT)


def _first(*values: str | None) -> str | None:
    """The first that says anything, without the line's end that a file or a secret store has put behind it."""
    return next((value.strip() for value in values if value and value.strip()), None)


def _is_plain(text: str) -> bool:
    """Whether a header may have it."""
    return text.isascii() and text.isprintable()


def _profile() -> dict[str, str]:
    """What ``~/.aws/config`` and ``~/.aws/credentials`` say of the profile; the latter goes before the former."""
    name = _first(os.environ.get("AWS_PROFILE"), os.environ.get("AWS_DEFAULT_PROFILE")) or "default"
    found: dict[str, str] = {}
    is_there = name == "default"
    for variable, usual, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        path = os.path.expanduser(os.environ.get(variable) or usual)
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except configparser.Error as error:
            raise UsageError(f"not a file of AWS settings: {error.message}", where=path) from error
        if parser.has_section(section):
            found |= dict(parser.items(section))
            is_there = True
    if not is_there:
        raise UsageError(
            f"no profile {name!r} in ~/.aws", where="AWS_PROFILE", hint='see "aws configure list-profiles"'
        )
    return found


def _of_environment() -> _Granted | None:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    key, secret, token = (_first(os.environ.get(name)) for name in names)
    if not key or not secret:
        return None
    return _Granted(Credentials(key, secret, token), None)


def _of_profile(profile: Mapping[str, str]) -> _Granted | None:
    key, secret = profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")
    if key and secret and "role_arn" not in profile:
        return _Granted(Credentials(key, secret, profile.get("aws_session_token")), None)
    wanted = next((name for name in _BY_BOTOCORE if name in profile), None)
    if wanted is None:
        return None
    try:
        from botocore.session import Session
    except ImportError as error:
        raise UsageError(
            f"the profile's {wanted} needs botocore", where="~/.aws/config", hint='pip install "ckpt-tool[sso]"'
        ) from error
    try:
        found = Session().get_credentials().get_frozen_credentials()
    except Exception as error:
        raise StorageError(f"botocore gives no credentials: {error}", where="~/.aws/config", hint=_HINT) from error
    return _Granted(Credentials(found.access_key, found.secret_key, found.token), time.time() + 2 * _RENEWED_BEFORE_S)


def _of_container() -> _Granted | None:
    relative = os.environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    url = _CONTAINER + relative if relative else os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if not url:
        return None
    token_file = os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
    token = _text_of(token_file) if token_file else os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN")
    answer = _asked("GET", url, {"authorization": token.strip()} if token else {})
    return _granted(json.loads(answer.data), url)


def _of_instance() -> _Granted | None:
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    try:
        client = HttpClient(_INSTANCE, timeout_s=1.0)
        token = client.request("PUT", "/latest/api/token", headers={"x-aws-ec2-metadata-token-ttl-seconds": "21600"})
        headers = {"x-aws-ec2-metadata-token": token.data.decode()} if token.status == 200 else {}
        place = "/latest/meta-data/iam/security-credentials/"
        role = client.request("GET", place, headers=headers)
        if role.status != 200 or not role.data.strip():
            return None
        answer = client.request("GET", place + role.data.decode().split("\n", maxsplit=1)[0].strip(), headers=headers)
    except OSError:  # this is no instance
        return None
    return _granted(json.loads(answer.data), _INSTANCE) if answer.status == 200 else None


def _of_web_identity(region: str) -> _Granted | None:
    path, role = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"), os.environ.get("AWS_ROLE_ARN")
    if not path or not role:
        return None
    query = {
        "Action": "AssumeRoleWithWebIdentity", "Version": "2011-06-15", "RoleArn": role,
        "RoleSessionName": os.environ.get("AWS_ROLE_SESSION_NAME") or f"ckpt-{os.getpid()}",
        "WebIdentityToken": _text_of(path).strip(),
    }  # fmt: skip
    url = os.environ.get("AWS_ENDPOINT_URL_STS") or f"https://sts.{region}.amazonaws.com"
    headers = {"content-type": "application/x-www-form-urlencoded"}
    answer = _asked("POST", f"{url.rstrip('/')}/", headers, urlencode(query).encode())
    found = {node.tag.rpartition("}")[2]: node.text or "" for node in ET.fromstring(answer.data).iter()}  # noqa: S314
    names = {"AccessKeyId": "AccessKeyId", "SecretAccessKey": "SecretAccessKey", "SessionToken": "Token"}
    return _granted({names.get(name, name): text for name, text in found.items()}, url)


def _granted(found: Mapping[str, str], where: str) -> _Granted:
    """The answer of a service that hands out keys."""
    try:
        credentials = Credentials(found["AccessKeyId"], found["SecretAccessKey"], found.get("Token"))
        ends = found.get("Expiration")
        return _Granted(credentials, datetime.fromisoformat(ends.replace("Z", "+00:00")).timestamp() if ends else None)
    except (KeyError, ValueError) as error:
        raise StorageError("the answer holds no credentials", where=where, hint=_HINT) from error


def _asked(method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> Response:
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    client = HttpClient(url)
    answer = retried(lambda: client.request(method, target, headers=headers, body=body), where=url)
    client.close()
    if answer.status != 200:
        raise StorageError(f"no credentials are granted, status {answer.status}", where=url, hint=_HINT)
    return answer


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise StorageError(f"the token cannot be read: {error.strerror}", where=path) from error
