"""URLs and paths as text."""

from __future__ import annotations

import pytest

from ckpt_tool.errors import FormatError, UsageError
from ckpt_tool.storage.urls import check_path, is_local, join_url, local_path, scheme_of, split_url


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("run/step_5", None),
        ("/abs/run", None),
        ("C:\\runs\\x", None),
        ("C:/runs/x", None),
        ("c://runs", None),
        ("\\\\?\\C:\\x", None),
        ("\\\\server\\share\\x", None),
        ("s3:/b/x", None),
        ("a:b", None),
        ("s3://b/x", "s3"),
        ("S3://b/x", "s3"),
        ("memory://x", "memory"),
        ("file:///C:/x", "file"),
        ("simplecache::s3://b/x", "simplecache"),
        ("zip://a.pt::s3://b/x.zip", "zip"),
        ("a::b", None),
    ],
)
def test_scheme(url: str, scheme: str | None) -> None:
    """A drive letter is no scheme, and a scheme needs its two slashes."""
    assert scheme_of(url) == scheme
    assert is_local(url) == (scheme in {None, "file"})


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("x/y", "x/y"),
        ("file:///x/y", "/x/y"),
        ("file://localhost/x", "/x"),
        ("file:///C:/x%20y", "C:/x y"),
        ("local:///x", "/x"),
        ("C:\\x%20y", "C:\\x%20y"),
    ],
)
def test_local_path(url: str, path: str) -> None:
    """File URLs are decoded; plain paths are not."""
    assert local_path(url) == path


def test_local_path_of_remote_url() -> None:
    """A remote URL has no local path."""
    with pytest.raises(UsageError, match="got a s3 URL"):
        local_path("s3://b/x")


@pytest.mark.parametrize("url", ["gs://b//x", "s3://b/x", "run", "memory://a/b//c"])
def test_split_and_join(url: str) -> None:
    """Joining what was split restores every slash."""
    joined = join_url(url, "sub/a.pt")
    assert joined == url + "/sub/a.pt"
    assert join_url(*split_url(joined)) == joined


@pytest.mark.parametrize("path", ["a", "a/b", "a//b", "..a/b..", ".metadata", "ab:c", "a b%20"])
def test_harmless_paths(path: str) -> None:
    """Dots and colons inside names are names."""
    assert check_path(path, root="r") == path


@pytest.mark.parametrize("path", ["..", "../a", "a/..", "a\\..\\..\\b", "/a", "\\a", "C:a", "c:/a", "", "\0"])
def test_harmful_paths(path: str) -> None:
    """Whatever leaves the root on POSIX or on Windows is refused, with the root in front."""
    with pytest.raises(FormatError, match=r"^run: "):
        check_path(path, root="run")
