"""Signature Version 4 of a request to S3 (AWS General Reference, "Signing AWS API requests").

S3's own rules: the path is percent-encoded once and never normalised, so that ``a//b`` is another key than ``a/b``, and
the SHA-256 of the body is part of what is signed, so that a body that arrives changed is refused. Knows no network.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import quote

from ckpt_tool.records import dataclass

__all__ = ["EMPTY_SHA256", "Credentials", "encoded_path", "encoded_query", "signed_headers"]

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """A key with its secret, and the token of a session."""

    access_key: str
    secret_key: str
    token: str | None = None


def encoded_path(path: str) -> str:
    """``path`` as it stands in the request line and in the signature.

    >>> encoded_path("/b//a b+c")
    '/b//a%20b%2Bc'
    """
    return quote(path, safe="/-_.~")


def encoded_query(query: Mapping[str, str]) -> str:
    """Parameters sorted and encoded as the signature wants them.

    >>> encoded_query({"uploads": "", "prefix": "a/b"})
    'prefix=a%2Fb&uploads='
    """
    return "&".join(f"{quote(key, safe='-_.~')}={quote(value, safe='-_.~')}" for key, value in sorted(query.items()))


def signed_headers(  # noqa: PLR0913 - the parts of a request
    credentials: Credentials,
    *,
    region: str,
    method: str,
    host: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    body_sha256: str = EMPTY_SHA256,
    seconds: float | None = None,
) -> dict[str, str]:
    """``headers`` with those that authorise the request.

    Args:
        credentials: whose request it is.
        region: of the bucket.
        method: ``GET``, ``PUT`` and so on.
        host: as in the ``Host`` header, with a port that is not the usual one.
        path: encoded.
        query: encoded.
        headers: signed too, so that nobody on the way can change a condition.
        body_sha256: in hexadecimal.
        seconds: since 1970; the time of the request, now by default.
    """
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(seconds))
    sent = {key.lower(): value for key, value in headers.items()}
    sent |= {"host": host, "x-amz-content-sha256": body_sha256, "x-amz-date": moment}
    if credentials.token is not None:
        sent["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(sent))
    lines = "".join(f"{name}:{sent[name].strip()}\n" for name in sorted(sent))
    request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{body_sha256}"
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = _signing_key(credentials.secret_key, moment[:8], region)
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    sent["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return sent


@lru_cache(maxsize=8)
def _signing_key(secret: str, day: str, region: str) -> bytes:
    """The key of one day and region."""
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
