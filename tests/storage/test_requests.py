"""What commands ask of S3, counted by the server and by the commands themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import ckpt_tool
from ckpt_tool.api.cat import cat
from ckpt_tool.cli.app import main
from tests.storage.checkpoints import make_dcp, make_safetensors, objects_of
from tests.storage.s3_server import BUCKET, Bucket, s3_environment, s3_server

ROOT = Path(__file__).parents[2]
SOURCE, TARGET = f"s3://{BUCKET}/source", f"s3://{BUCKET}/target"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket that this process and its children talk to."""
    with s3_server() as (endpoint, bucket):
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        yield bucket


def counted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, int]:
    """The traffic that a command tells with --json."""
    assert main([*arguments, "--json"]) == 0
    traffic: dict[str, int] = json.loads(capsys.readouterr().out)["traffic"]
    return traffic


def test_inspect_of_a_thousand_files(bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pages of a listing, and one read of the metadata; the thousand files themselves are not asked for."""
    folder = make_dcp(tmp_path, n_ranks=1000, n_tensors=1, rows=1000, columns=4)
    bucket.objects |= objects_of(folder, "source")
    assert len(bucket.objects) == 1001
    traffic = counted(capsys, "inspect", SOURCE)
    payload = [path for method, path, _ in bucket.requests if method == "GET" and "list-type" not in path]
    assert payload == [f"/{BUCKET}/source/.metadata"]
    assert (bucket.count("GET", "list-type"), len(bucket.requests)) == (2, 3)
    assert (traffic["n_requests"], traffic["n_listings"], traffic["n_retries"]) == (3, 2, 0)
    assert traffic["received_nbytes"] == len(bucket.objects["source/.metadata"])


def test_each_byte_is_received_once(bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reshard, export, diff and a full check receive the payload once, and the heads of the items besides."""
    folder = make_dcp(tmp_path, n_ranks=4, n_tensors=3, rows=4400)
    bucket.objects |= objects_of(folder, "source")
    nbytes = 3 * 4400 * 257 * 4
    for arguments, n_sides in (
        (["reshard", SOURCE, TARGET, "--tp", "2", "--default", "shard0"], 1),
        (["export", SOURCE, f"s3://{BUCKET}/exported/model.safetensors"], 1),
        (["diff", SOURCE, TARGET], 2),
        (["verify", SOURCE, "--full"], 1),
    ):
        traffic = counted(capsys, *arguments)
        assert traffic["received_nbytes"] <= n_sides * nbytes * 1.01, arguments
        assert traffic["n_requests"] <= 90, arguments
    assert len(bucket.objects["exported/model.safetensors"]) > nbytes


def test_neighbours_are_received_together(bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 400 small boxes in two files not each costs a request, for gaps cost less; no byte comes more than twice."""
    folder = make_dcp(tmp_path, n_ranks=2, n_tensors=200, rows=40, columns=50)
    bucket.objects |= objects_of(folder, "source")
    traffic = counted(capsys, "reshard", SOURCE, TARGET, "--tp", "2", "--default", "shard0")
    assert traffic["n_requests"] <= 40
    assert traffic["received_nbytes"] <= 2 * sum(len(data) for data in bucket.objects.values() if data)


def make_shards(folder: Path, kind: str) -> dict[str, np.ndarray]:
    """Ten files and their index, with two tensors each."""
    tensors = {f"layers.{n}.{part}": np.full((3, 4), n, np.float32) for n in range(10) for part in ("q", "k")}
    stem = {"safetensors": "model", "bin": "pytorch_model"}[kind]
    weight_map = {fqn: f"{stem}-{n // 2 + 1:05d}-of-00010.{kind}" for n, fqn in enumerate(tensors)}
    folder.mkdir()
    for file in set(weight_map.values()):
        held = {fqn: tensors[fqn] for fqn, home in weight_map.items() if home == file}
        if kind == "bin":
            torch.save({fqn: torch.from_numpy(array) for fqn, array in held.items()}, folder / file)
        else:
            save_file(held, folder / file)
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return tensors


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_one_tensor_of_many_files(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    """An index tells its file: only that one is opened, once however much of it is asked for; lies are seen through."""
    tensors = make_shards(tmp_path / kind, kind)
    bucket.objects |= objects_of(tmp_path / kind, "source")

    def files_read() -> list[str]:
        read = {
            path.rpartition("/")[2] for method, path, _ in bucket.requests if method == "GET" and "list" not in path
        }
        bucket.requests.clear()
        return sorted(name for name in read if "-of-" in name)

    assert cat(SOURCE, "layers.7.q[1, 2:]").array.tolist() == [7.0, 7.0]
    assert [name.partition("-")[2][:5] for name in files_read()] == ["00008"]
    [(fqn, array)] = ckpt_tool.stream(SOURCE, include=["layers.3.k"])
    assert (fqn, array.tolist(), len(files_read())) == ("layers.3.k", tensors[fqn].tolist(), 1)
    with ckpt_tool.open(SOURCE) as checkpoint:
        assert files_read() == []
        assert [checkpoint[f"layers.2.{part}"][0, 0] for part in "qk"] == [2.0, 2.0]
        n_reads = bucket.count("GET", "00003-of")
        assert len(files_read()) == 1
        assert n_reads == 1  # such a small file is read as a whole
        assert "layers.99.q" not in checkpoint
        assert (len(checkpoint), len(files_read())) == (20, 9)
    index = next(key for key in bucket.objects if key.endswith("index.json"))
    bucket.objects[index] = bucket.objects[index].replace(b"00004-of", b"00005-of")
    assert cat(SOURCE, "layers.3.k").array.tolist() == tensors["layers.3.k"].tolist()


@pytest.mark.parametrize("level", ["--quick", "--full"])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_check_reads_what_it_needs_once(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, level: str
) -> None:
    """A listing, the index, the config and ten files, however many parts of it look at their heads and directories.

    Where every byte was read there is another listing, which says that all are still of one version.
    """
    make_shards(tmp_path / kind, kind)
    bucket.objects |= objects_of(tmp_path / kind, "source")
    traffic = counted(capsys, "verify", SOURCE, level)
    n_listings = 1 + (level == "--full")
    assert (traffic["n_requests"], traffic["n_listings"]) == (12 + n_listings, n_listings)
    assert traffic["received_nbytes"] == sum(map(len, bucket.objects.values()))


def test_no_checkpoint_is_replaced_by_a_side_file(bucket: Bucket, tmp_path: Path) -> None:
    """As on this machine: what is there and is of another kind stays; one of its own is replaced, in two requests."""
    one, out = f"{SOURCE}/model.safetensors", f"s3://{BUCKET}/out"
    bucket.objects["source/model.safetensors"] = make_safetensors(tmp_path / "x", n_tensors=1).read_bytes()
    before = dict(bucket.objects)
    plan = ["plan", one, "--default", "shard0", "--plan-json"]
    for words in (["verify", one, "--write-manifest"], ["inspect", one, "--parquet"], plan):
        assert main([*words, one]) == 2
        assert bucket.objects == before
        for _ in range(2):
            assert main([*words, out]) == 0
            asked = [(method, status) for method, path, status in bucket.requests if path.endswith("/out")]
        n_looks = 1 + (words[0] == "verify")  # which looks before its work too
        assert asked == [*[("GET", 404)] * n_looks, ("PUT", 200), *[("GET", 206)] * n_looks, ("PUT", 200)]
        if words[0] == "verify":
            bucket.requests.clear()
            bucket.objects["out.json"] = bucket.objects["out"]
            assert main(["diff", f"{out}.json", f"{out}.json"]) == 0
            assert len(bucket.requests) == 4  # a head and all of each
            del bucket.objects["out.json"]
        del bucket.objects["out"]
        bucket.requests.clear()
    assert main(["cat", one, "layer.0.w[0]", "--out", one]) == 2
    assert main(["cat", one, "layer.0.w[0]", "--out", out]) == 0
    assert set(bucket.objects) == {*before, "out"}


_WATCHED = """
import os, sys
from ckpt_tool.cli.app import main
def watch(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        print("WROTE", args[0], file=sys.stderr)
    elif event in {"os.mkdir", "os.rename", "tempfile.mkstemp"}:
        print("WROTE", event, args, file=sys.stderr)
sys.addaudithook(watch)
sys.exit(main(sys.argv[1:]))
"""


def test_s3_to_s3_never_touches_the_disk(bucket: Bucket, tmp_path: Path) -> None:
    """Nothing is opened for writing here, on the whole way from objects to objects."""
    bucket.objects |= objects_of(make_dcp(tmp_path, n_ranks=2, n_tensors=3), "source")
    argv = [sys.executable, "-c", _WATCHED, "reshard", SOURCE, TARGET, "--tp", "2", "--default", "shard0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "WROTE" not in done.stderr.replace("WROTE /dev/null", "")
    assert "target/.metadata" in bucket.objects


def test_local_commands_tell_no_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of this machine are not counted."""
    folder = make_dcp(tmp_path, n_ranks=2, n_tensors=1)
    assert main(["inspect", str(folder), "--json"]) == 0
    assert "traffic" not in json.loads(capsys.readouterr().out)
    assert main(["inspect", str(folder)]) == 0
    assert "storage:" not in capsys.readouterr().err
