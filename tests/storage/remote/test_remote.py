"""Failures of remote storage: what is tried again, what is not, and what they become."""

from __future__ import annotations

import asyncio
import errno
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.errors import CkptError, NotFound, StorageError, Unsupported, UsageError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.local.store import MAX_DEPTH
from ckpt_tool.storage.remote import file_system, retry
from ckpt_tool.storage.remote.store import FsspecStore, open_fsspec
from ckpt_tool.storage.target import open_target

DATA = bytes(range(100))


class ClientError(Exception):
    """As the HTTP client raises it: no OSError, with a status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status} of https://host/x?X-Amz-Signature=secret")
        self.status = status


ClientError.__module__ = "aiohttp.client_exceptions"


class FlakyFs:
    """A file system with one file ``/root/x``, whose answers fail as listed before they are right."""

    async_impl = False

    def __init__(self, *answers: Exception | bytes) -> None:
        self.answers = list(answers)
        self.n_reads = 0

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """One answer of the list, then the true one."""
        self.n_reads += 1
        answer = self.answers.pop(0) if self.answers else DATA[start:end]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], **_: Any) -> list[Any]:
        """Answers with errors among them, as fsspec returns them."""
        return [self._answer(*item) for item in zip(paths, starts, ends, strict=True)]

    def _answer(self, path: str, start: int, end: int) -> Any:
        try:
            return self.cat_file(path, start, end)
        except Exception as error:  # noqa: BLE001 - the interface of fsspec
            return error

    def info(self, path: str) -> dict[str, Any]:
        """Of the one file."""
        if not path.endswith("/x"):
            raise FileNotFoundError(path)
        return {"name": path, "type": "file", "size": len(DATA)}

    def ls(self, path: str, *, detail: bool) -> list[Any]:
        """The one file."""
        return [self.info(path + "/x")] if detail else [path + "/x"]

    def find(self, path: str, *, detail: bool) -> dict[str, Any]:
        """The one file, and what no store should take for one."""
        return {
            f"{path}/x": self.info(f"{path}/x"),
            f"{path}/": {"name": f"{path}/", "type": "directory", "size": 0},
            f"{path}/sub/": {"name": f"{path}/sub/", "type": "file", "size": 0},
        }

    def invalidate_cache(self) -> None:
        """Nothing is kept."""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that would have been slept."""
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


def store_of(fs: FlakyFs, monkeypatch: pytest.MonkeyPatch, root: str = "/root") -> FsspecStore:
    """A store on ``fs``."""
    monkeypatch.setattr("ckpt_tool.storage.remote.store.open_remote", lambda _url: (fs, root))
    return FsspecStore("s3://me:pw@root")


TRANSIENT = [
    OSError("reset"), ConnectionResetError(errno.ECONNRESET, "reset"), TimeoutError(), ClientError(503),
    ClientError(429), b"", b"12345",
]  # fmt: skip
PERMANENT = [PermissionError("denied"), OSError(errno.EINVAL, "bad bucket"), ClientError(403), ClientError(400)]


@pytest.mark.parametrize("answer", TRANSIENT, ids=repr)
def test_transient(answer: Any, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """What may pass is tried again, with growing pauses, until it is right."""
    fs = FlakyFs(answer, answer)
    assert store_of(fs, monkeypatch).read("x", 10, 10) == DATA[10:20]
    assert fs.n_reads == 3
    assert len(pauses) == 2
    assert 0.1 <= pauses[0] <= 0.3
    assert 0.2 <= pauses[1] <= 0.6


@pytest.mark.parametrize("answer", TRANSIENT, ids=repr)
def test_transient_for_ever(answer: Any, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried a bounded number of times; then the last error is chained, and no secret is told."""
    fs = FlakyFs(*[answer] * 99)
    with pytest.raises(StorageError, match=r"^s3://root/x: .*\(after 5 attempts\)$") as caught:
        store_of(fs, monkeypatch).read("x", 10, 10)
    assert fs.n_reads == retry.ATTEMPTS == 5
    assert caught.value.__cause__ is not None
    assert "secret" not in str(caught.value)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("answer", PERMANENT, ids=repr)
def test_permanent(answer: Any, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """What will not pass is not tried again."""
    fs = FlakyFs(answer)
    with pytest.raises(StorageError):
        store_of(fs, monkeypatch).read("x", 10, 10)
    assert (fs.n_reads, pauses) == (1, [])


def test_refused_access_has_a_hint(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is refused should look at credentials."""
    with pytest.raises(StorageError, match="access is refused") as caught:
        store_of(FlakyFs(PermissionError("denied")), monkeypatch).read("x", 0, 1)
    assert "credentials" in (caught.value.hint or "")


def test_bug_is_not_dressed_up(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is not the storage's passes unchanged."""
    with pytest.raises(KeyError):
        store_of(FlakyFs(KeyError("bug")), monkeypatch).read("x", 0, 1)


def test_beyond_the_end_is_not_tried_again(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Object stores answer a range behind the end with EINVAL or a short body; one look at the size tells."""
    for answer in (OSError(errno.EINVAL, "InvalidRange"), b"1"):
        fs = FlakyFs(answer)
        with pytest.raises(StorageError, match="expected 10 bytes, got 1 before the end"):
            store_of(fs, monkeypatch).read("x", 99, 10)
        assert (fs.n_reads, pauses) == (1, [])


def test_server_without_ranges(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends the whole file instead is found out."""
    with pytest.raises(StorageError, match="expected 10 bytes, got 100: the server does not serve byte ranges"):
        store_of(FlakyFs(DATA), monkeypatch).read("x", 0, 10)


@pytest.mark.parametrize("async_impl", [True, False])
def test_fetch_repairs_single_ranges(async_impl: bool, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many ranges only those that failed are asked for again."""
    fs = FlakyFs(b"xx", OSError("reset"), b"s")
    fs.async_impl = async_impl
    ranges = [FileRange("x", i * 2, 2) for i in range(10)] + [FileRange("x", 5, 0)]
    assert store_of(fs, monkeypatch).fetch(ranges) == [b"xx", *[DATA[i * 2 : i * 2 + 2] for i in range(1, 10)], b""]
    assert fs.n_reads == 12


def test_fetch_of_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file is not asked for again."""
    fs = FlakyFs(DATA[:2], FileNotFoundError("x"))
    fs.async_impl = True
    with pytest.raises(NotFound, match="s3://root/x: no such file"):
        store_of(fs, monkeypatch).fetch([FileRange("x", 0, 2)] * 2)
    assert fs.n_reads == 2


@pytest.mark.parametrize("root", ["/root", "b//x", "b/x/"])
def test_listing_leaves_out_markers(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders, and the empty objects that stand for them, are no files; slashes of the root do not matter."""
    assert store_of(FlakyFs(), monkeypatch, root).listing().sizes == {"x": 100}


def test_listing_of_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that folds slashes lists keys that are not below the root; they are not cut into wrong names."""

    class FoldingFs(FlakyFs):
        def find(self, path: str, *, detail: bool) -> dict[str, Any]:
            return super().find(path.replace("//", "/"), detail=detail)

    with pytest.raises(StorageError, match="the server lists 'b/root/x', which is not below"):
        store_of(FoldingFs(), monkeypatch, "b//root").listing()


def test_query_belongs_to_the_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A web URL with a query opens the file by its name; the query goes with requests and into no message."""
    asked: list[str] = []

    class WebFs(FlakyFs):
        def info(self, path: str) -> dict[str, Any]:
            asked.append(path)
            return {"name": path, "type": "file", "size": len(DATA)}

    monkeypatch.setattr("ckpt_tool.storage.remote.store.open_remote", lambda url: (WebFs(FileNotFoundError()), url))
    store = open_fsspec("https://host/m/x.safetensors?sig=a/b")
    listing = store.listing()
    assert (listing.url, listing.entry, listing.sizes) == ("https://host/m", "x.safetensors", {"x.safetensors": 100})
    assert set(asked) == {"https://host/m/x.safetensors?sig=a/b"}
    with pytest.raises(CkptError, match=r"^https://host/m/x\.safetensors: no such file$"):
        store.read("x.safetensors", 0, 1)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the client of web servers is made with, which need not be installed."""
    made: dict[str, Any] = {}

    def filesystem(scheme: str, **options: Any) -> FlakyFs:
        made.update(scheme=scheme, **options["client_kwargs"])
        return FlakyFs()

    monkeypatch.setitem(sys.modules, "aiohttp", SimpleNamespace(ClientTimeout=lambda **limits: limits))
    monkeypatch.setattr(file_system, "filesystem", filesystem)
    return made


@pytest.mark.parametrize("url", ["http://host/x", "https://[::1]:8/x"])
def test_web_servers_that_are_silent_are_given_up(
    web: dict[str, Any], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """After the same seconds as any other; a proxy of the environment is used, and IPv6 is no chain of URLs."""
    monkeypatch.setenv("CKPT_TIMEOUT_S", "7")
    assert file_system.open_remote(url)[1] == url
    assert web["timeout"] == {"total": None, "sock_connect": 7.0, "sock_read": 7.0}
    assert (web["scheme"], web["trust_env"]) == (url.partition(":")[0], True)


@pytest.mark.parametrize("url", ["http://host:port/x?secret", "http://me:secret@[::1/x", "http://ho st/x"])
@pytest.mark.usefixtures("web")
def test_web_addresses_that_are_none(url: str) -> None:
    """They are not files that are missing."""
    with pytest.raises(UsageError, match=r"is no address|expected an http") as caught:
        file_system.open_remote(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "told", "is_right"), [("7-9", "7-9/20", 1), ("7-", "7-8/9", 1), ("7-9", "0-2/20", 0)]
)
def test_web_servers_that_send_another_range(web: dict[str, Any], asked: str, told: str, is_right: int) -> None:
    """As many bytes as were asked for tell nothing of where they come from."""
    file_system.open_remote("http://host/x")
    request = SimpleNamespace(headers={"Range": f"bytes={asked}"})
    answer = SimpleNamespace(status=206, headers={"Content-Range": f"bytes {told}"}, request_info=request)
    if is_right:
        asyncio.run(web["raise_for_status"](answer))
    else:
        with pytest.raises(OSError, match="expected bytes from 7 on, the server sent 'bytes 0-2/20'"):
            asyncio.run(web["raise_for_status"](answer))


@pytest.mark.parametrize(
    ("url", "kind", "is_folder"),
    [
        ("https://host", "text/plain", True), ("https://host/", "text/plain", True),
        ("https://host/run", "text/html", True), ("https://host/run", "text/plain", False),
        ("https://host/x.pt", "text/html", False), ("https://host/run?sig=1", "text/html", False),
    ],
)  # fmt: skip
def test_folders_of_web_servers(monkeypatch: pytest.MonkeyPatch, url: str, kind: str, is_folder: bool) -> None:
    """A page under a name without an ending is the list of a folder, whether or not a slash follows the name."""
    found: list[dict[str, Any]] = []

    class WebFs(FlakyFs):
        def info(self, path: str) -> dict[str, Any]:
            return {"name": path, "type": "file", "size": len(DATA), "mimetype": kind}

        def find(self, path: str, **options: Any) -> dict[str, Any]:
            found.append(options)
            names = [f"{path}/x", f"{path}/./x", f"{path}/a/../x"]
            return {name: {"name": name, "type": "file", "size": 1} for name in names}

    monkeypatch.setattr("ckpt_tool.storage.remote.store.open_remote", lambda url: (WebFs(), url))
    store = open_fsspec(url)
    assert (store.listing().entry is None) is is_folder
    assert not is_folder or store.listing().sizes == {"x": 1}
    assert found == ([{"detail": True, "maxdepth": MAX_DEPTH}] if is_folder else [])


def test_what_is_only_read_from() -> None:
    """Before anything is read; a client that cannot write otherwise says so in the end."""
    options: dict[str, Any] = {"overwrite": False, "resume": False, "durable": False, "single_file": False}
    with pytest.raises(UsageError, match=r"^https://host/out: is only read from"):
        open_target("https://me:secret@host/out?sig", **options)
    module: dict[str, Any] = {"__name__": "fsspec.implementations.any"}
    exec("def call(): raise NotImplementedError", module)
    with pytest.raises(Unsupported, match="files are not written to this kind of storage"):
        retry.retried(module["call"], where="x")


def test_a_checkpoint_tells_no_secret() -> None:
    """Its URL may be signed; a copy in another process is opened by all of it."""
    nothing: Any = None
    checkpoint = Checkpoint("https://me:pw@host/x?sig", nothing, nothing, nothing, 1)
    assert checkpoint.url == "https://host/x"
    assert checkpoint.__reduce__()[1] == ("https://me:pw@host/x?sig", 1)


def disguised(cause: Exception) -> FileNotFoundError:
    """As the HTTP client of fsspec reports whatever went wrong."""
    error = FileNotFoundError("https://host/x")
    error.__cause__ = cause
    return error


def test_disguised_failures(pauses: list[float]) -> None:
    """A server that does not answer is not a missing file; a missing one is."""

    def failing(status: int) -> None:
        raise disguised(ClientError(status))

    with pytest.raises(StorageError, match=r"ClientError: status 503 of https://host/x \(after 5 attempts\)"):
        retry.retried(lambda: failing(503), where="x")
    pauses.clear()
    with pytest.raises(NotFound):
        retry.retried(lambda: failing(404), where="x")
    assert pauses == []


def test_retries_are_not_multiplied(pauses: list[float]) -> None:
    """Boto tries again by itself; after that it is not tried again here. Only the first line of an error is told."""

    class EndpointConnectionError(Exception):
        """As boto raises it."""

    EndpointConnectionError.__module__ = "botocore.exceptions"

    def failing() -> None:
        raise EndpointConnectionError("no endpoint\nand a page of text")

    with pytest.raises(StorageError, match=r"^x: EndpointConnectionError: no endpoint$"):
        retry.retried(failing, where="x")
    assert pauses == []


@pytest.mark.parametrize(("package", "expected"), [("hdfs_native", StorageError), ("ckpt_tool", RuntimeError)])
def test_errors_of_native_clients(pauses: list[float], package: str, expected: type[Exception]) -> None:
    """A client in Rust raises RuntimeError for everything; the same from elsewhere is a bug."""
    module: dict[str, Any] = {"__name__": f"{package}.fsspec"}
    exec("def call(): raise RuntimeError('No NameNode')", module)
    with pytest.raises(expected, match="No NameNode"):
        retry.retried(module["call"], where="x")


def test_pauses_are_bounded(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many attempts there are, a pause stays within seconds."""
    monkeypatch.setattr(retry, "ATTEMPTS", 12)

    def failing() -> None:
        raise OSError("again")

    with pytest.raises(StorageError, match="after 12 attempts"):
        retry.retried(failing, where="x")
    assert max(pauses) <= 7.5
