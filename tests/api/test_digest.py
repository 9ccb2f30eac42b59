"""Digests are equal for equal values in any format and layout, and a check against them finds every change."""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.checkpoint import Checkpoint, open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.digest import digests
from ckpt_tool.api.manifest_file import read_manifest, write_manifest
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CoverageError, NotFound, UsageError
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.detect import detect
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.storage.local.store import LocalStore
from tests.reports.made import put
from tests.storage.recording import RecordingStore

FIXTURES = Path(__file__).parents[2] / "fixtures"
FSDP = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
WITH_TRUTH = (
    "torch/dcp_fsdp2_tp_2x2",
    "torch/dcp_zstd",
    "torch/hf_sharded",
    "torch/hf_pytorch_bin",
    "torch/verl_4r_bf16",
    "deepspeed/hf_st_tied",
)


def kinds(url: Path, manifest: Path, **options: Any) -> dict[str, tuple[str, int]]:
    """Severity and number of the findings of each kind that a manifest brings."""
    report = verify(url, manifest=manifest, **options)
    ours = {"digest-mismatch", "not-in-manifest", "not-in-checkpoint", "unreadable", "file-mismatch", "other-files"}
    return {group.kind: (group.severity.name, group.count) for group in report.groups() if group.kind in ours}


@pytest.mark.parametrize("name", WITH_TRUTH)
def test_against_the_bytes(name: str) -> None:
    """Each CRC-32 is that of the tensor's bytes, whatever the tile."""
    with open_checkpoint(FIXTURES / name / "ckpt") as checkpoint:
        found = digests(checkpoint, wide=True, memory_budget_bytes=1 << 17, n_workers=2).tensors
        expected = {fqn: zlib.crc32(np.ascontiguousarray(view.numpy()).tobytes()) for fqn, view in checkpoint.items()}
    assert {fqn: digest.crc32 for fqn, digest in found.items()} == expected
    assert found == digests(FIXTURES / name / "ckpt", wide=True, n_workers=1).tensors


@pytest.mark.parametrize("wide", [False, True])
def test_two_small_files(tmp_path: Path, wide: bool) -> None:
    """A DCP checkpoint, a reshard of it and an export of it are equal by their manifests alone."""
    reshard(FSDP, tmp_path / "tp", tp=2, dp=2, to="rank-files", default="shard0")
    export(FSDP, tmp_path / "hf")
    tables = {}
    for name, url in (("dcp", FSDP), ("tp", tmp_path / "tp"), ("hf", tmp_path / "hf")):
        write_manifest(digests(url, wide=wide, files="crc32"), tmp_path / f"{name}.json")
        tables[name] = read_manifest(tmp_path / f"{name}.json").tensors
    assert tables["tp"] == tables["dcp"]
    model = {fqn.removeprefix("model."): digest for fqn, digest in tables["dcp"].items()}
    assert len(tables["hf"]) > 30
    assert tables["hf"] == {fqn: model.get(fqn, tables["dcp"].get(fqn)) for fqn in tables["hf"]}
    assert kinds(tmp_path / "tp", tmp_path / "dcp.json", require_all=True) == {"other-files": ("INFO", 1)}
    assert kinds(FSDP, tmp_path / "dcp.json", require_all=True) == {}
    assert set(kinds(tmp_path / "hf", tmp_path / "dcp.json")) == {"not-in-checkpoint", "other-files"}


def test_each_byte_is_read_once(tmp_path: Path) -> None:
    """Tensors and files together cost one reading of the files."""
    save_file({"a": np.arange(5000, dtype="f4").reshape(50, 100), "b": np.ones(7, "i8")}, tmp_path / "m.safetensors")
    store = RecordingStore(LocalStore(str(tmp_path)))
    source = Source(store, store.listing())
    reader = detect(source)
    checkpoint = Checkpoint("m", source, reader, reader.read(source), 1 << 20)
    store.clear()
    table = digests(checkpoint, files="crc32", memory_budget_bytes=1 << 16)
    assert table.files[0].crc32 == zlib.crc32((tmp_path / "m.safetensors").read_bytes())
    assert store.nbytes == (tmp_path / "m.safetensors").stat().st_size


def saved(folder: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> Path:
    """A safetensors file, alone in its folder."""
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


@pytest.fixture
def tensors() -> dict[str, npt.NDArray[Any]]:
    """Three tensors, two of one shape."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((8, 16)).astype("f4") for name in ("a", "b")} | {"c": np.arange(5, dtype="i8")}


@pytest.fixture
def manifest(tmp_path: Path, tensors: dict[str, npt.NDArray[Any]]) -> Path:
    """Of the three, without files."""
    write_manifest(digests(saved(tmp_path / "before", tensors)), tmp_path / "m.json")
    return tmp_path / "m.json"


def test_a_flipped_bit(tmp_path: Path, manifest: Path, tensors: dict[str, npt.NDArray[Any]]) -> None:
    """One bit in one tensor is found, and named."""
    tensors["b"].view("u4")[3, 5] ^= 1
    report = verify(saved(tmp_path / "after", tensors), manifest=manifest)
    found = [finding for finding in report.findings if finding.kind == "digest-mismatch"]
    assert [(finding.fqn, finding.severity) for finding in found] == [("b", Severity.ERROR)]
    assert "b has other content than recorded, expected CRC-32 " in found[0].message
    assert not report.is_ok


def test_swapped_tensors(tmp_path: Path, manifest: Path, tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Two tensors of one shape under each other's name: both are found, with whose content they are."""
    tensors["a"], tensors["b"] = tensors["b"], tensors["a"]
    report = verify(saved(tmp_path / "after", tensors), manifest=manifest)
    said = [finding.message for finding in report.findings if finding.kind == "digest-mismatch"]
    assert [text.rpartition("; ")[2] for text in said] == [
        "it is what is recorded for b",
        "it is what is recorded for a",
    ]


def test_other_shape_and_type(tmp_path: Path, manifest: Path, tensors: dict[str, npt.NDArray[Any]]) -> None:
    """The same bytes under another shape or type are not the same."""
    after = {"a": tensors["a"].reshape(16, 8), "b": tensors["b"].view("i4"), "c": tensors["c"]}
    assert kinds(saved(tmp_path / "after", after), manifest) == {"digest-mismatch": ("ERROR", 2)}


def test_missing_and_extra(tmp_path: Path, manifest: Path, tensors: dict[str, npt.NDArray[Any]]) -> None:
    """What only one side has is a warning, and an error where all is required."""
    del tensors["c"]
    after = saved(tmp_path / "after", {**tensors, "d": np.ones(3), "e": np.ones(4)})
    assert kinds(after, manifest) == {"not-in-manifest": ("WARNING", 2), "not-in-checkpoint": ("WARNING", 1)}
    assert verify(after, manifest=manifest).is_ok
    required = kinds(after, manifest, require_all=True)
    assert required == {"not-in-manifest": ("ERROR", 2), "not-in-checkpoint": ("ERROR", 1)}


def test_nothing_in_common(tmp_path: Path, manifest: Path) -> None:
    """A manifest of something else proves nothing, which is an error."""
    found = kinds(saved(tmp_path / "after", {"x": np.ones(3)}), manifest)
    assert found == {"not-in-manifest": ("ERROR", 1), "not-in-checkpoint": ("ERROR", 3)}


def test_prefixes(tmp_path: Path, manifest: Path, tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Known wrappers are seen through, other prefixes are taken off when asked."""
    wrapped = saved(tmp_path / "wrapped", {f"module.{name}": array for name, array in tensors.items()})
    assert kinds(wrapped, manifest, require_all=True) == {}
    own = saved(tmp_path / "own", {f"policy.net.{name}": array for name, array in tensors.items()})
    assert kinds(own, manifest, require_all=True, strip_prefixes=["policy.net."]) == {}
    assert set(kinds(own, manifest)) == {"not-in-manifest", "not-in-checkpoint"}


@pytest.mark.parametrize("kind", ["crc32", "sha256"])
def test_rot_outside_tensors(tmp_path: Path, kind: str) -> None:
    """A byte of metadata that changes no tensor is found by the file's own sum; so is a file that is gone."""
    copy = tmp_path / "copy"
    shutil.copytree(FIXTURES / "torch/hf_sharded/ckpt", copy)
    put(copy, {"config.json": b"{}"})
    write_manifest(digests(copy, files=kind), tmp_path / "m.json")
    assert kinds(copy, tmp_path / "m.json") == {}
    put(copy, {"config.json": b"[]"})
    assert kinds(copy, tmp_path / "m.json") == {"file-mismatch": ("ERROR", 1)}
    (copy / "config.json").unlink()
    assert kinds(copy, tmp_path / "m.json") == {"file-mismatch": ("ERROR", 1)}


def test_sha256_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHA-256 is that of the file's bytes, read block by block."""
    monkeypatch.setattr("ckpt_tool.api.digest._BLOCK_BYTES", 100)
    path = tmp_path / "model.safetensors"
    save_file({"w": np.arange(99, dtype=np.float32)}, path)
    (found,) = digests(path, files="sha256").files
    assert (found.nbytes, found.sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def test_damaged_parts_do_not_hide_others(tmp_path: Path) -> None:
    """A file that is gone makes its tensors unreadable; the others are compared."""
    copy = tmp_path / "copy"
    shutil.copytree(FSDP, copy)
    write_manifest(digests(copy), tmp_path / "m.json")
    (copy / "__2_0.distcp").unlink()
    report = verify(copy, manifest=tmp_path / "m.json")
    found = {group.kind: group.count for group in report.groups()}
    assert found["unreadable"] > 50
    said = next(finding.message for finding in report.findings if finding.kind == "digests-compared")
    assert int(said.partition(" ")[0]) + found["unreadable"] == 134
    with pytest.raises((NotFound, CoverageError)):
        digests(copy)


def test_selected(tmp_path: Path) -> None:
    """Digests of a part."""
    assert set(digests(FSDP, include=["*lm_head*"], section="model").tensors) == {"model.lm_head.weight"}


def test_usage(tmp_path: Path, manifest: Path) -> None:
    """A manifest cannot be compared without reading, nor without being there."""
    with pytest.raises(UsageError, match="quick"):
        verify(tmp_path / "before", level="quick", manifest=manifest)
    with pytest.raises(NotFound) as error:
        verify(tmp_path / "before", manifest=tmp_path / "none.json")
    assert "--write-manifest" in (error.value.hint or "")


def test_file_is_small_and_readable(tmp_path: Path, manifest: Path, tensors: dict[str, npt.NDArray[Any]]) -> None:
    """A line for each tensor, and JSON."""
    lines = manifest.read_text().splitlines()
    assert sum('"fqn"' in line for line in lines) == 3
    assert sorted(row["fqn"] for row in json.loads(manifest.read_text())["tensors"]) == ["a", "b", "c"]
    assert load_file(tmp_path / "before/model.safetensors").keys() == tensors.keys()


def test_padded_rows(tmp_path: Path, manifest: Path, tensors: dict[str, npt.NDArray[Any]]) -> None:
    """Rows at the end, as of a padded vocabulary, are nobody's content; what is before them is compared."""
    padded = {**tensors, "a": np.concatenate([tensors["a"], np.full((3, 16), 7, "f4")])}
    report = verify(saved(tmp_path / "longer", padded), manifest=manifest, require_all=True)
    said = [finding.message for finding in report.findings if finding.kind == "padded-rows"]
    assert said == ["a has 11 rows, the first 8 with the recorded content; the others are padding"]
    assert report.is_ok
    padded["a"][2, 3] += 1
    assert kinds(saved(tmp_path / "other", padded), manifest) == {"digest-mismatch": ("ERROR", 1)}
    write_manifest(digests(tmp_path / "longer"), tmp_path / "long.json")
    assert kinds(tmp_path / "before", tmp_path / "long.json") == {"digest-mismatch": ("ERROR", 1)}
    zeros = {**tensors, "a": np.concatenate([tensors["a"], np.zeros((3, 16), "f4")])}
    write_manifest(digests(saved(tmp_path / "zeros", zeros)), tmp_path / "zeros.json")
    assert kinds(tmp_path / "before", tmp_path / "zeros.json", require_all=True) == {}
