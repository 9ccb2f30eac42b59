"""Commands on S3 behind a server that fails: they come through, or end with one error and nothing that looks whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tool.cli.app import main
from ckpt_tool.storage.parts.place import PartLimits
from ckpt_tool.storage.remote import retry
from ckpt_tool.storage.s3 import place
from tests.storage.checkpoints import make_dcp, objects_of
from tests.storage.fault_proxy import FAULTS, Choose, fault_proxy
from tests.storage.s3_server import BUCKET, Bucket, s3_environment, s3_server

SOURCE, TARGET = f"s3://{BUCKET}/source", f"s3://{BUCKET}/target"
PART = 64 << 10
NO_PATIENCE = "0.5"
"""With a server that stalls; else a machine that others use makes more faults than are meant."""
QUICK = {"503", "lost answer", "stall", "cut off", "flip up"}
"""Kinds of faults that are always tested; the others differ little."""
RESHARD = ["reshard", SOURCE, TARGET, "--tp", "2", "--default", "shard0", "--memory", "1MiB"]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A checkpoint of two ranks."""
    return objects_of(make_dcp(tmp_path_factory.mktemp("faults"), n_ranks=2, n_tensors=8), "source")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, objects: dict[str, bytes]) -> Iterator[tuple[str, Bucket]]:
    """A server with the checkpoint, and small parts."""
    monkeypatch.setattr(place, "PART_LIMITS", PartLimits(PART, PART, 1000))
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    with s3_server() as (endpoint, bucket):
        bucket.min_part_bytes = PART
        bucket.objects |= objects
        for name, value in {**s3_environment(endpoint), "CKPT_TIMEOUT_S": "20"}.items():
            monkeypatch.setenv(name, value)
        yield endpoint, bucket


def target(bucket: Bucket) -> dict[str, bytes]:
    """What is under the target's name."""
    return {key: data for key, data in bucket.objects.items() if key.startswith("target/")}


def whole(bucket: Bucket) -> dict[str, bytes]:
    """What the target is where nothing fails."""
    assert main(RESHARD) == 0
    found = target(bucket)
    for key in [*found, "target.digests.json"]:
        bucket.objects.pop(key, None)
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.storage) for kind in (*FAULTS, "flip up")]
)
def test_commands_come_through(
    bucket: tuple[str, Bucket], monkeypatch: pytest.MonkeyPatch, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every fourth request goes wrong (fewer where that takes time), and all commands end as if none had."""
    endpoint, held = bucket
    expected = whole(held)
    step = 9 if kind == "stall" else 4
    if kind == "stall":
        monkeypatch.setenv("CKPT_TIMEOUT_S", NO_PATIENCE)
    with fault_proxy(endpoint, lambda number, _method, _path: kind if number % step == 2 else None) as (url, faults):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert main(["inspect", SOURCE]) == 0
        assert main(["verify", SOURCE, "--full"]) == 0
        assert main(RESHARD) == 0
        assert main(["diff", SOURCE, TARGET]) == 0
        assert faults.done[kind] >= 6
    assert target(held) == expected
    assert held.uploads == {}
    assert re.search(r"storage: .* repeated", capsys.readouterr().err)


LASTING: dict[str, Choose] = {
    "listing": lambda _, method, path: "503" if "list-type" in path else None,
    "metadata": lambda _, method, path: "truncated" if path.endswith(".metadata") and method == "GET" else None,
    "payload": lambda _, method, path: "reset" if ".distcp" in path and method == "GET" else None,
    "marker": lambda _, method, path: "503" if path.endswith("CKPT_UNFINISHED") and method == "PUT" else None,
    "begin": lambda _, method, path: "503" if path.endswith("uploads=") and method == "POST" else None,
    "part": lambda _, method, path: "stall" if "partNumber=2" in path else None,
    "flipped part": lambda _, method, path: "flip up" if "partNumber=1&" in path else None,
    "join": lambda _, method, path: "refused body" if "?uploadId" in path and method == "POST" else None,
    "commit": lambda _, method, path: "reset" if path.endswith("target/.metadata") and method == "PUT" else None,
}


@pytest.mark.parametrize("name", LASTING)
def test_what_lasts_is_one_error(
    bucket: tuple[str, Bucket], monkeypatch: pytest.MonkeyPatch, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 4, one error that says where and what, no checkpoint; with the server well again --resume completes it."""
    endpoint, held = bucket
    expected = whole(held)
    capsys.readouterr()
    monkeypatch.setenv("CKPT_TIMEOUT_S", NO_PATIENCE if name == "part" else "20")
    with fault_proxy(endpoint, LASTING[name]) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert main(RESHARD) == 4
    errors = capsys.readouterr().err
    assert len(re.findall("^error: ", errors, re.MULTILINE)) == 1
    assert re.search(r"^error: s3://bucket/(source|target).*: .*\(after 5 attempts\)$", errors, re.MULTILINE)
    assert "target/.metadata" not in held.objects
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("CKPT_TIMEOUT_S", "20")
    if target(held):
        assert re.search("^hint: .*--resume", errors, re.MULTILINE)
        assert main(["inspect", TARGET]) == 3
        assert "unfinished" in capsys.readouterr().err.lower()
    assert main([*RESHARD, "--resume"]) == 0
    assert target(held) == expected
    assert held.uploads == {}


def test_wrong_byte_is_caught(bucket: tuple[str, Bucket], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A byte that changes on its way out is no error of the protocol: checksums and digests are what finds it."""
    endpoint, _ = bucket
    digests = str(tmp_path / "digests.json")
    assert main(["verify", SOURCE, "--write-manifest", digests]) == 0

    def flipped(_: int, method: str, path: str) -> str | None:
        return "flip" if ".distcp" in path and method == "GET" else None

    with fault_proxy(endpoint, flipped) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert main(["verify", SOURCE, "--full"]) == 1
        assert main(["diff", SOURCE, SOURCE]) == 0  # wrong in the same way
        assert main(RESHARD) == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert main(["verify", TARGET, "--manifest", digests]) == 1
    assert main(["diff", SOURCE, TARGET]) == 1


def test_server_without_ranges(bucket: tuple[str, Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole objects instead of ranges are refused, not taken for the range."""
    from tests.storage import s3_server as server

    monkeypatch.setattr(server._Handler, "_object", lambda self, data: self._answer(200, data))
    assert main(["verify", SOURCE, "--full"]) in {3, 4}
