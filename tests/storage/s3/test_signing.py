"""Signatures against the examples that AWS publishes."""

from __future__ import annotations

import hashlib
from calendar import timegm

from ckpt_tool.storage.s3.signing import Credentials, encoded_query, signed_headers

# Amazon S3 API Reference, "Signature Calculations for the Authorization Header", payload in a single chunk.
KEYS = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
WHEN = timegm((2013, 5, 24, 0, 0, 0))
HOST = "examplebucket.s3.amazonaws.com"


def signature(method: str, path: str, query: str = "", body: bytes = b"", **headers: str) -> str:
    """The last part of the header."""
    sent = signed_headers(
        KEYS, region="us-east-1", method=method, host=HOST, path=path, query=query, seconds=WHEN,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        body_sha256=hashlib.sha256(body).hexdigest(),
    )  # fmt: skip
    return sent["authorization"].rpartition("=")[2]


def test_range() -> None:
    """GET of the first ten bytes."""
    expected = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    assert signature("GET", "/test.txt", range="bytes=0-9") == expected


def test_put() -> None:
    """PUT with a body and a class of storage."""
    expected = "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"
    found = signature(
        "PUT", "/test%24file.text", body=b"Welcome to Amazon S3.", date="Fri, 24 May 2013 00:00:00 GMT",
        x_amz_storage_class="REDUCED_REDUNDANCY",
    )  # fmt: skip
    assert found == expected


def test_listing() -> None:
    """A query is sorted, and signed."""
    expected = "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    assert signature("GET", "/", encoded_query({"prefix": "J", "max-keys": "2"})) == expected


def test_secrets_are_not_shown() -> None:
    """Credentials in a traceback tell nothing."""
    assert "wJalr" not in repr(KEYS)
