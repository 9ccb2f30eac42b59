"""Every store passes the same tests."""

from __future__ import annotations

import sys
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from ckpt_tool.manifest.model import FileEntry, FileRange
from ckpt_tool.manifest.tables import FileTable
from ckpt_tool.storage.hdfs.store import HdfsStore
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.remembering import RememberingStore
from ckpt_tool.storage.remote.store import FsspecStore
from ckpt_tool.storage.s3.store import S3Store
from ckpt_tool.storage.store import Listing, Store
from ckpt_tool.storage.virtual.decode import open_files
from tests.storage.conformance import FILES, StoreTests
from tests.storage.hdfs_fake import Cluster, fake_module
from tests.storage.recording import RecordingStore
from tests.storage.s3_server import BUCKET, s3_environment, s3_server


class TestMemoryStore(StoreTests):
    """Files of a dict."""

    @pytest.fixture
    def store(self) -> Store:
        """A dict."""
        return MemoryStore(FILES)


class TestRecordingStore(StoreTests):
    """A store that records is a store."""

    @pytest.fixture
    def store(self) -> Store:
        """Around a dict."""
        return RecordingStore(MemoryStore(FILES))


class TestRememberingStore(StoreTests):
    """A store that remembers is a store, also where it knows all already."""

    @pytest.fixture(params=[False, True], ids=["new", "knowing"])
    def store(self, request: pytest.FixtureRequest) -> Store:
        """Around a dict."""
        store = RememberingStore(MemoryStore(FILES))
        if request.param:
            store.fetch([FileRange(path, 0, len(data)) for path, data in FILES.items()])
        return store


class TestLocalStore(StoreTests):
    """Files of a folder."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """Written by pathlib."""
        for path, data in FILES.items():
            (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "root" / path).write_bytes(data)
        (tmp_path / "outside").write_bytes(b"secret")
        store = LocalStore(str(tmp_path / "root"))
        yield store
        store.close()


class TestLocalStoreWithoutPositionalReads(TestLocalStore):
    """The same with seek and readinto, as on Windows."""

    @pytest.fixture(autouse=True)
    def _windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("os.preadv")
        monkeypatch.delattr("os.pread")


class TestFsspecStore(StoreTests):
    """Files of an fsspec file system."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """Written by fsspec."""
        fs = fsspec.filesystem("memory")
        root = f"/{uuid.uuid4().hex}"
        for path, data in FILES.items():
            fs.pipe_file(f"{root}/{path}", data)
        yield FsspecStore(f"memory:/{root}")
        fs.rm(root, recursive=True)


class TestS3Store(StoreTests):
    """Objects of a bucket, under a key that only the own client spells right."""

    folder = "a//b c"

    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        """Put into the server directly."""
        with s3_server() as (endpoint, bucket):
            for name, value in s3_environment(endpoint).items():
                monkeypatch.setenv(name, value)
            bucket.objects |= {f"{self.folder}/{path}": data for path, data in FILES.items()}
            bucket.objects[f"{self.folder}/"] = bucket.objects[f"{self.folder}d"] = b"no file of this folder"
            store = S3Store(f"s3://{BUCKET}/{self.folder}")
            store.listing()
            yield store
            store.close()


class TestS3StoreByObstore(TestS3Store):
    """The same through the faster client."""

    folder = "a/b"


class TestS3StoreWithoutObstore(TestS3Store):
    """The same where that is not installed."""

    folder = "a/b"

    @pytest.fixture(autouse=True)
    def _missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "obstore", None)


class TestHdfsStore(StoreTests):
    """Files of a name node."""

    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> Store:
        """Put into the cluster directly."""
        cluster = Cluster({f"/a/b c/{path}": data for path, data in FILES.items()})
        for path in [*cluster.files, "/a/b cd/x"]:
            cluster.make(path.rpartition("/")[0])
        monkeypatch.setitem(sys.modules, "hdfs_native", fake_module(cluster))
        return HdfsStore("hdfs://lab/a/b c")


class _PartsHidden(MemoryStore):
    """A memory store whose listing leaves out what begins with a dot, so that only decoded files count."""

    def listing(self, *, anew: bool = False) -> Listing:
        inner = super().listing(anew=anew)
        return Listing(inner.url, {path: size for path, size in inner.sizes.items() if not path.startswith(".")})


def deflate(data: bytes) -> bytes:
    """A raw deflate stream."""
    encoder = zlib.compressobj(wbits=-15)
    return encoder.compress(data) + encoder.flush()


class TestDecodedStore(StoreTests):
    """Files decoded from parts of another, all kept in memory."""

    memory_budget_bytes = 1 << 20

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """One plain file, the others compressed: two with deflate, one with zstd."""
        container, entries = b"", []
        for path, data in FILES.items():
            if path == "a.bin":
                continue
            is_zstd = path == "sub/b.bin"
            part = pa.compress(data, "zstd", asbytes=True) if is_zstd else deflate(data)
            codec = "zstd" if is_zstd else "deflate"
            entries.append(FileEntry(path, len(data), codec, FileRange(".container", len(container), len(part))))
            container += part
        inner = _PartsHidden({"a.bin": FILES["a.bin"], ".container": container})
        store = open_files(inner, FileTable((FileEntry("a.bin", 10_240), *entries)), self.memory_budget_bytes)
        yield store
        store.close()


class TestSpooledStore(TestDecodedStore):
    """The same through a temporary file."""

    memory_budget_bytes = 0
