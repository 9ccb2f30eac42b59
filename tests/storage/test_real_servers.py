"""Commands on real servers: SeaweedFS as S3, a NameNode and a DataNode as HDFS."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ckpt_tool.cli.app import main
from ckpt_tool.errors import StorageError
from ckpt_tool.storage.hdfs import place as hdfs_place
from ckpt_tool.storage.hdfs.client import HdfsClient
from ckpt_tool.storage.hdfs.store import HdfsStore
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.parts.place import Part
from ckpt_tool.storage.remote import retry
from ckpt_tool.storage.s3.client import S3Client
from ckpt_tool.storage.s3.place import S3Place
from ckpt_tool.storage.s3.store import S3Store
from ckpt_tool.storage.store import Store
from tests.storage.checkpoints import make_dcp, objects_of
from tests.storage.conformance import FILES, StoreTests
from tests.storage.fault_proxy import FAULTS, fault_proxy
from tests.storage.real_hdfs import RealHdfs, real_hdfs
from tests.storage.real_servers import seaweedfs
from tests.storage.s3_server import BUCKET, s3_environment


@pytest.fixture(scope="module")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a SeaweedFS."""
    with seaweedfs(tmp_path_factory.mktemp("weed") / "server") as endpoint:
        yield endpoint


@pytest.fixture
def s3(weed: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket that this process talks to."""
    for name, value in s3_environment(weed).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealHdfs]:
    """A name node and a data node."""
    with real_hdfs(tmp_path_factory.mktemp("hdfs")) as found:
        yield found


@pytest.fixture
def hdfs(cluster: RealHdfs, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where its files are."""
    monkeypatch.setenv("CKPT_WEBHDFS", cluster.webhdfs)
    return cluster.url


@pytest.mark.storage
class TestSeaweedStore(StoreTests):
    """Objects of a real server."""

    @pytest.fixture
    def store(self, s3: str) -> Iterator[Store]:
        """Put by single requests."""
        client = S3Client(BUCKET)
        for path, data in FILES.items():
            client.put(f"store x/{path}", data)
        store = S3Store(f"{s3}/store x")
        yield store
        store.close()


@pytest.mark.hdfs
class TestRealHdfsStore(StoreTests):
    """Files of a real cluster."""

    @pytest.fixture
    def store(self, hdfs: str) -> Store:
        """Written by the client itself."""
        client = HdfsClient(hdfs)
        for path, data in FILES.items():
            client.write_pieces(f"/store/{path}", partial(list, [data]))
        return HdfsStore(f"{hdfs}/store")


def round_trip(base: str, source: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reshard from here to there, there, and back; export; all commands; the content is the same throughout."""
    first, second = f"{base}/one", f"{base}/two"
    options = ["--default", "shard0"]
    assert main(["reshard", source, first, "--tp", "2", *options]) == 0
    assert main(["reshard", first, second, "--dp", "3", *options, "--to", "rank-files"]) == 0
    assert main(["reshard", second, str(folder / "back"), "--dp", "2", *options]) == 0
    assert main(["export", first, f"{base}/x.safetensors", "--names", "source"]) == 0
    for url in (first, second, str(folder / "back"), f"{base}/x.safetensors"):
        assert main(["diff", source, url]) == 0
        assert main(["verify", url, "--full"]) == 0
    assert main(["reshard", source, first, "--tp", "2", *options]) == 2
    assert main(["reshard", source, first, "--dp", "2", *options, "--overwrite"]) == 0
    capsys.readouterr()
    assert main(["ls", base, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["steps"]) >= 1


@pytest.mark.storage
def test_commands_on_seaweedfs(s3: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S3 by the whole way."""
    round_trip(f"{s3}/trip", str(make_dcp(tmp_path, n_ranks=2, n_tensors=30, rows=1024)), tmp_path, capsys)


@pytest.mark.hdfs
def test_commands_on_hdfs(hdfs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """HDFS by the whole way."""
    round_trip(f"{hdfs}/trip", str(make_dcp(tmp_path, n_ranks=2, n_tensors=30, rows=1024)), tmp_path, capsys)


@pytest.mark.storage
def test_uploads_of_seaweedfs(s3: str) -> None:
    """Conditions and multipart uploads mean there what they mean here."""
    place = S3Place(f"{s3}/uploads/x", single_file=False)
    assert place.put("a", b"1", is_new=True)
    assert not place.put("a", b"2", is_new=True)
    big = os.urandom(5 << 20)
    token = place.begin("b")
    tags = {1: place.put_part("b", token, 1, big), 2: place.put_part("b", token, 2, b"end")}
    begun = place.begun()
    assert (begun["b"].token, {n: p.nbytes for n, p in begun["b"].parts.items()}) == (token, {1: 5 << 20, 2: 3})
    assert set(place.files()) == {"a"}
    parts = {1: Part(5 << 20, tags[1]), 2: Part(3, tags[2])}
    assert place.join("b", token, parts, is_new=True)
    assert place.join("b", token, parts, is_new=True)  # as if the answer had been lost
    assert place.get("b") == big + b"end"
    other = place.begin("b")
    tag = place.put_part("b", other, 1, b"1")
    assert not place.join("b", other, {1: Part(1, tag)}, is_new=True)
    place.drop("b", other)
    place.drop("b", other)
    assert place.begun() == {}


@pytest.mark.storage
@pytest.mark.parametrize("kind", [*FAULTS, "flip up"])
def test_faults_before_seaweedfs(
    s3: str, weed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """The proxy of faults in front of the real server: all commands come through."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    client = S3Client(BUCKET)
    name = kind.replace(" ", "-")
    for key, data in objects_of(make_dcp(tmp_path, n_ranks=2, n_tensors=8), f"faults/{name}/source").items():
        client.put(key, data)
    source, target = f"{s3}/faults/{name}/source", f"{s3}/faults/{name}/target"
    monkeypatch.setenv("CKPT_TIMEOUT_S", "2")
    with fault_proxy(weed, lambda number, _method, _path: kind if number % 5 == 2 else None) as (url, faults):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert main(["reshard", source, target, "--tp", "2", "--default", "shard0"]) == 0
        assert main(["diff", source, target]) == 0
        assert faults.done[kind] >= 4
    monkeypatch.setenv("AWS_ENDPOINT_URL", weed)
    assert main(["diff", source, target]) == 0
    assert S3Place(target, single_file=False).begun() == {}


@pytest.mark.hdfs
@pytest.mark.parametrize("webhdfs", ["there", "missing"])
def test_parts_of_hdfs(hdfs: str, monkeypatch: pytest.MonkeyPatch, webhdfs: str) -> None:
    """Parts are joined by CONCAT, without a byte sent again; where there is no WebHDFS they are copied."""
    if webhdfs == "missing":
        monkeypatch.setenv("CKPT_WEBHDFS", "127.0.0.1:9")
    monkeypatch.setattr(hdfs_place, "_SOURCES_CHARACTERS", 200)
    place = hdfs_place.HdfsPlace(f"{hdfs}/parts/{webhdfs}", single_file=False)
    token = place.begin("sub/a b.bin")
    contents = [os.urandom(1 << 20) for _ in range(6)] + [b"end"]
    tags = {n: place.put_part("sub/a b.bin", token, n, data) for n, data in enumerate(contents, 1)}
    sent = place._client.traffic.sent_nbytes
    parts = {n: Part(len(contents[n - 1]), tag) for n, tag in tags.items()}
    assert {n: p.nbytes for n, p in place.begun()["sub/a b.bin"].parts.items()} == {
        n: p.nbytes for n, p in parts.items()
    }
    assert place.join("sub/a b.bin", token, parts, is_new=True)
    assert (place._client.traffic.sent_nbytes == sent) == (webhdfs == "there")
    place.finish(replace=False)
    store, listing = open_store(f"{hdfs}/parts/{webhdfs}")
    assert listing.sizes == {"sub/a b.bin": (6 << 20) + 3}
    assert store.read("sub/a b.bin", 0, (6 << 20) + 3) == b"".join(contents)


@pytest.mark.hdfs
def test_exclusive_create_of_hdfs(hdfs: str) -> None:
    """Of many that begin at once, one may."""
    client = HdfsClient(hdfs)
    client.make_folder("/first")
    won: list[bool] = []

    def begin(number: int) -> None:
        won.append(client.write_new("/first/marker", str(number).encode(), scratch="/first/scratch"))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won.count(True) == 1


@pytest.mark.hdfs
def test_no_name_node() -> None:
    """Nobody listens: said at once, not after minutes."""
    with pytest.raises(StorageError, match="the name node does not answer"):
        open_store("hdfs://127.0.0.1:9/x")
