"""From what the user typed to a store."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ckpt_tool.errors import NotFound, StorageError, UsageError
from ckpt_tool.storage.open import open_store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with two steps."""
    for path in ("step_100/a.pt", "step_100/deep/b.pt", "step_200/a.pt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(path.encode())
    return tmp_path


@pytest.mark.parametrize("spell", [str, Path, lambda p: f"{p}/", lambda p: f"file://{p}", lambda p: p.as_uri()])
def test_folder(run: Path, spell: object) -> None:
    """A folder is listed with all below it, however it is spelled."""
    store, listing = open_store(spell(run))  # type: ignore[operator]
    assert listing.paths == ("step_100/a.pt", "step_100/deep/b.pt", "step_200/a.pt")
    assert store.read("step_100/a.pt", 0, 4) == b"step"


def test_file(run: Path) -> None:
    """A file is opened in its folder: it alone is the path, its siblings are known, what is deeper is not."""
    (run / "step_100/c.json").write_bytes(b"{}")
    store, listing = open_store(run / "step_100" / "a.pt")
    assert listing.entry == "a.pt"
    assert listing.paths == ("a.pt",)
    assert listing.sizes == {"a.pt": 13, "c.json": 2}
    assert store.read("c.json", 0, 2) == b"{}"


def test_relative(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths count from the working folder at the time of opening, and messages keep their spelling."""
    monkeypatch.chdir(run / "step_100")
    here, listing = open_store(".")
    assert listing.sizes.keys() == {"a.pt", "deep/b.pt"}
    store, listing = open_store("a.pt")
    assert (listing.url, listing.entry) == (".", "a.pt")
    with pytest.raises(UsageError, match="the path is empty"):  # a variable of a shell without a value
        open_store("")
    monkeypatch.chdir("/")
    assert store.read("a.pt", 0, 8) == here.read("a.pt", 0, 8) == b"step_100"


def test_missing(run: Path) -> None:
    """A typing error gets the nearest name; so does one further up."""
    with pytest.raises(NotFound, match="step_10: no such file or folder") as caught:
        open_store(run / "step_10")
    assert caught.value.hint == "did you mean step_100 or step_200?"
    with pytest.raises(NotFound) as caught:
        open_store(run / "stp_200" / "a.pt")
    assert caught.value.hint == "did you mean step_200 or step_100?"
    with pytest.raises(NotFound) as caught:
        open_store(run / "zzz")
    assert caught.value.hint == "beside it are: step_100, step_200"


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_file(run: Path, kind: str) -> None:
    """It is there, but who read it might wait for ever; a link to it is no better."""
    path = run / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))
    else:
        path = Path(os.devnull)
    (run / "link").symlink_to(path)
    for each in (path, run / "link"):
        with pytest.raises(UsageError, match=f"is a {kind}, expected a file or a folder"):
            open_store(each)


def test_links_in_a_circle(run: Path) -> None:
    """What they lead to does exist."""
    (run / "one").symlink_to("other")
    (run / "other").symlink_to("one")
    with pytest.raises(NotFound, match="no such file or folder") as caught:
        open_store(run / "one")
    assert caught.value.hint == "it is a link to 'other', which leads back to it"


@pytest.mark.parametrize(("number", "hint"), [(errno.EACCES, "look at the rights"), (errno.ESTALE, None)])
def test_what_the_system_does_not_tell(
    run: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str | None
) -> None:
    """A folder that one must not look into is not one that has no such file."""
    real = os.stat

    def failing(path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("step_100"):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(StorageError, match=f"step_100: cannot be looked at: {os.strerror(number)}") as caught:
        open_store(run / "step_100")
    assert (caught.value.hint or "").startswith(hint or "")
    assert (caught.value.hint is None) == (hint is None)
    with pytest.raises(UsageError, match="is no path"):
        open_store("a\0b")


def test_missing_behind_a_link(run: Path) -> None:
    """A link to nothing says so."""
    (run / "latest").symlink_to("step_300")
    with pytest.raises(NotFound) as caught:
        open_store(run / "latest")
    assert caught.value.hint == "it is a link to 'step_300', which does not exist"


def test_url_that_went_through_pathlib() -> None:
    """A URL that lost a slash is recognised."""
    with pytest.raises(NotFound) as caught:
        open_store(Path("s3://bucket/run"))
    assert caught.value.hint == "a URL has two slashes: s3://bucket/run"


def test_remote_folder_and_file() -> None:
    """Both work for any fsspec URL."""
    root = uuid.uuid4().hex
    fs = fsspec.filesystem("memory")
    for path in ("a.pt", "b.json", "deep/c.pt"):
        fs.pipe_file(f"/{root}/{path}", path.encode())
    _, listing = open_store(f"memory://{root}")
    assert listing.sizes == {"a.pt": 4, "b.json": 6, "deep/c.pt": 9}
    store, listing = open_store(f"memory://{root}/a.pt")
    assert (listing.url, listing.entry, listing.sizes) == (f"memory://{root}", "a.pt", {"a.pt": 4, "b.json": 6})
    assert store.read("a.pt", 0, 4) == b"a.pt"
    with pytest.raises(NotFound, match=r"a\.pd: no such file or folder") as caught:
        open_store(f"memory://{root}/a.pd")
    assert caught.value.hint == "did you mean a.pt?"


def test_unknown_scheme() -> None:
    """A scheme that nobody knows is the caller's error."""
    with pytest.raises(UsageError, match="nope:// cannot be opened"):
        open_store("nope://x/y")


def test_client_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the client for Google storage the hint is what to type."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "gs", raising=False)
    with pytest.raises(UsageError, match="the client for gs:// is not installed") as caught:
        open_store("gs://bucket/run")
    assert caught.value.hint == 'pip install "ckpt-tool[gs]"'


def test_local_paths_do_not_import_fsspec(tmp_path: Path) -> None:
    """Opening a folder needs no fsspec, which is a third of the start-up time."""
    code = (
        "import sys; from ckpt_tool.storage.open import open_store; from ckpt_tool.storage.target import open_target; "
        "open_store(sys.argv[1]); "
        "print(sorted({'fsspec', 'numpy', 'pyarrow', 'concurrent.futures.process'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True, env=env, cwd=root
    )
    assert done.stdout == "[]\n"
