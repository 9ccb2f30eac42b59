"""Checksums as users missed them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
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


def test_w4_a_container_without_the_type(tmp_path: Path, ckpt: Ckpt) -> None:
    """W4: numpy knows bfloat16 by its width alone; the digests that an export wrote hold for what it wrote."""
    torch.save({"w": torch.arange(6).bfloat16(), "v": torch.ones(2)}, tmp_path / "a.pt")
    assert ckpt("export", tmp_path / "a.pt", tmp_path / "b.npz").status == 0
    checked = ckpt("verify", tmp_path / "b.npz", "--manifest", tmp_path / "b.npz.digests.json", "--require-all")
    assert (checked.status, "w has the recorded bytes; V2 is no type" in checked.text) == (0, True)
    differ = ckpt("diff", tmp_path / "a.pt", tmp_path / "b.npz")
    assert (differ.status, "why: every byte is the same; V2 names no type" in differ.text) == (1, True)
    raw = (tmp_path / "b.npz").read_bytes()
    at = raw.index(torch.arange(6).bfloat16().view(torch.int16).numpy().tobytes())
    (tmp_path / "c.npz").write_bytes(raw[:at] + b"\1" + raw[at + 1 :])
    checked = ckpt("verify", tmp_path / "c.npz", "--manifest", tmp_path / "b.npz.digests.json")
    assert (checked.status, "digest-mismatch" in checked.out) == (1, True)
    assert "untyped" not in ckpt("diff", tmp_path / "a.pt", tmp_path / "c.npz").text
