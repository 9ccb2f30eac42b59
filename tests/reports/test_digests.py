"""Checksums as users missed them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.reports.conftest import FIXTURES, Ckpt

SHARDED = FIXTURES / "torch/hf_sharded/ckpt"
DCP = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"


def test_r94_what_has_no_digest_is_told(tmp_path: Path, ckpt: Ckpt) -> None:
    """R94: a tensor that no digest was recorded for is not accepted silently, and fails where all is required."""
    manifest = tmp_path / "m.json"
    save_file({"a": np.ones(4)}, tmp_path / "one.safetensors")
    save_file({"a": np.ones(4), "b": np.ones(4)}, tmp_path / "two.safetensors")
    assert ckpt("verify", tmp_path / "one.safetensors", "--write-manifest", manifest).status == 0
    ran = ckpt("verify", tmp_path / "two.safetensors", "--manifest", manifest)
    assert ran.status == 0
    assert "b has no recorded digest, so that nothing proves its content" in ran.text
    assert "1 of 1 recorded tensor is here with the recorded content" in ran.text
    assert ckpt("verify", tmp_path / "two.safetensors", "--manifest", manifest, "--require-all").status == 1
    assert ckpt("verify", tmp_path / "two.safetensors", "--manifest", manifest, "--strict").status == 1


def test_r94_no_manifest_at_all(tmp_path: Path, ckpt: Ckpt) -> None:
    """R94: a manifest that is not there, or is empty, is no success."""
    assert ckpt("verify", SHARDED, "--manifest", tmp_path / "none.json").status == 3
    (tmp_path / "empty.json").write_bytes(b"")
    ran = ckpt("verify", SHARDED, "--manifest", tmp_path / "empty.json")
    assert ran.status == 3
    assert "got no JSON" in ran.text


def test_r110_data_replaced_under_the_same_metadata(tmp_path: Path, ckpt: Ckpt) -> None:
    """R110: payload of another model under unchanged names, shapes and sizes: only the manifest can tell."""
    copy = tmp_path / "copy"
    shutil.copytree(SHARDED, copy)
    assert ckpt("verify", copy, "--write-manifest", tmp_path / "m.json").status == 0
    shard = min(copy.glob("*.safetensors"))
    data = shard.read_bytes()
    payload = 8 + int.from_bytes(data[:8], "little")
    names = {fqn for fqn in json.loads(data[8:payload]) if fqn != "__metadata__"}
    shard.write_bytes(data[:payload] + bytes(len(data) - payload))
    assert ckpt("verify", copy).status == 0
    ran = ckpt("verify", copy, "--manifest", tmp_path / "m.json", "--json")
    assert ran.status == 1
    named = {finding["fqn"] for finding in ran.json["findings"] if finding["kind"] == "digest-mismatch"}
    assert named <= names
    assert len(named) > 5
    assert [f["file"] for f in ran.json["findings"] if f["kind"] == "file-mismatch"] == [shard.name]


def test_w4_copies_of_other_layouts(tmp_path: Path, ckpt: Ckpt) -> None:
    """A layout-independent manifest: one small file proves a TP2 copy and an export."""
    manifest = tmp_path / "m.json"
    assert ckpt("verify", DCP, "--write-manifest", manifest).status == 0
    assert manifest.stat().st_size < 25_000
    assert ckpt("reshard", DCP, tmp_path / "tp2", "--tp", "2", "--default", "shard0").status == 0
    assert ckpt("export", DCP, tmp_path / "hf").status == 0
    assert ckpt("verify", tmp_path / "tp2", "--manifest", manifest, "--require-all").status == 0
    assert "37 of 134 recorded tensors" in ckpt("verify", tmp_path / "hf", "--manifest", manifest).text
