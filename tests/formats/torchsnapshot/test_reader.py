"""The reader of torchsnapshot on snapshots of two ranks, and on manifests that lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CkptError, FormatError, NotFound, Unsupported
from ckpt_tool.formats.torchsnapshot.entries import parse_metadata
from ckpt_tool.formats.torchsnapshot.reader import READER
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import ReaderTests, source_of
from tests.formats.zoo import CHECKPOINTS, case
from tests.reports.made import as_bytes

SLABS = CHECKPOINTS / "torchsnapshot_slabs/ckpt"


class TestTorchSnapshot(ReaderTests):
    """In slabs, and in files of their own; complex numbers are torch files in both."""

    reader = READER
    reader_import = "ckpt_tool.formats.torchsnapshot.reader:READER"
    cases = (
        case("torchsnapshot_slabs", max_read_requests=8),
        case("torchsnapshot_files", max_read_requests=8),
    )


def test_objects_and_keys() -> None:
    """Numbers, text and bytes stand in the manifest; other objects are torch files, read as data."""
    with open_checkpoint(SLABS) as checkpoint:
        found = checkpoint.objects()
        assert {key: found[key] for key in found if key.startswith("mine.") and key != "mine.rank"} == {
            "mine.step": 3,
            "mine.note": "x/y",
            "mine.f": 1.5,
            "mine.flag": True,
            "mine.raw": b"ab",
            "mine.lst.0": 1,
            "mine.empty": {},
            "mine.none": None,
        }
        own = [blob for blob in checkpoint.manifest.blobs if blob.fqn == "mine.rank"]
        assert [(blob.rank, blob.value) for blob in own] == [(0, 0), (1, 1)]
        assert found["optim.param_groups.0.betas"] == (0.9, 0.999)
        assert checkpoint.manifest.tensor("mine.odd.3").path == ("mine", "odd", 3)
        assert checkpoint.manifest.tensor("mine.odd.a/b").path == ("mine", "odd", "a/b")
        assert checkpoint.manifest.tensor("optim.state.0.exp_avg").path == ("optim", "state", 0, "exp_avg")


def test_copies_of_ranks_are_compared(tmp_path: Path) -> None:
    """What no rank declared as replicated may be anything: the bytes are compared."""
    folder = shutil.copytree(CHECKPOINTS / "torchsnapshot_files/ckpt", tmp_path / "ckpt")
    (folder / "1/mine/same").write_bytes(bytes(24))
    errors = {(f.kind, f.fqn) for f in verify(folder).findings if f.severity.name == "ERROR"}
    assert errors == {("different-replicas", "mine.same")}


def test_a_reshard_of_it(tmp_path: Path) -> None:
    """Into DCP, and back through the same names."""
    reshard(SLABS, tmp_path / "dcp", dp=3, default="replicate", rank_state="drop", durable=False)
    ours, truth = as_bytes(tmp_path / "dcp"), as_bytes(SLABS)
    assert {fqn: ours[fqn] for fqn in truth if "@rank" not in fqn} == {
        fqn: tensor for fqn, tensor in truth.items() if "@rank" not in fqn
    }


def test_missing_files_are_listed(tmp_path: Path) -> None:
    """A snapshot copied in part can be looked at; verify names what is gone."""
    folder = shutil.copytree(CHECKPOINTS / "torchsnapshot_files/ckpt", tmp_path / "ckpt")
    (folder / "replicated/model/1.weight").unlink()
    report = verify(folder)
    assert any("replicated/model/1.weight" in f.message for f in report.findings if f.severity.name == "ERROR")
    (folder / ".snapshot_metadata").unlink()
    with pytest.raises(NotFound):
        open_checkpoint(folder)


TENSOR = {
    "type": "Tensor", "location": "f", "serializer": "buffer_protocol", "dtype": "torch.float32", "shape": [2],
    "replicated": False, "byte_range": [0, 8],
}  # fmt: skip


def snapshot(**rows: Any) -> MemoryStore:
    """A snapshot with these entries of rank 0, and a file ``f`` of 8 bytes."""
    manifest = {f"0/{key}": row for key, row in rows.items()}
    document = {"version": "0.1.0", "world_size": 1, "manifest": manifest}
    return MemoryStore({".snapshot_metadata": json.dumps(document).encode(), "f": bytes(8)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"location": "../f"}, "leaves"),
        ({"location": "/etc/passwd"}, "leaves"),
        ({"shape": [3]}, "takes 12 bytes"),
        ({"shape": [1 << 59, 1 << 59]}, "takes|sizes"),
        ({"shape": [-2]}, "no sizes"),
        ({"byte_range": [8, 0]}, "bytes 8 to 0"),
        ({"byte_range": [0, 1 << 70]}, "no sizes"),
        ({"dtype": "torch.nothing"}, "known dtype"),
        ({"type": "Something", "serialized_value": "1"}, "unknown type"),
        ({"serializer": "torch_save"}, "torch.save"),
    ],
)
def test_lies(change: dict[str, Any], message: str) -> None:
    """One clear error for each."""
    with pytest.raises(CkptError, match=message):
        READER.read(source_of(snapshot(x={**TENSOR, **change})))


def test_parts_that_contradict() -> None:
    """Parts of other types or dimensions, and parts beyond their whole."""
    part = {"offsets": [0], "sizes": [2], "tensor": TENSOR}
    wrong = {"offsets": [0], "sizes": [3], "tensor": TENSOR}
    beyond = {"offsets": [1], "sizes": [2], "tensor": TENSOR}
    for row, message in (
        ({"type": "ShardedTensor", "shards": [part, wrong]}, "holds"),
        ({"type": "ChunkedTensor", "shape": [2], "dtype": "", "replicated": False, "chunks": [beyond]}, "not lie in"),
    ):
        with pytest.raises(FormatError, match=message):
            READER.read(source_of(snapshot(x=row)))


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"[" * 100_000, b'{"manifest": {"x": {"type": "int"}}}'])
def test_damaged_manifests(text: bytes) -> None:
    """No JSON, other JSON, paths without a rank."""
    with pytest.raises(FormatError):
        parse_metadata(text, "m")


def test_a_manifest_in_yaml_is_named() -> None:
    """Before 0.1.0 it was YAML that is no JSON."""
    with pytest.raises(Unsupported, match="YAML"):
        parse_metadata(b"manifest:\n  0/x:\n    type: dict\n", "m")
