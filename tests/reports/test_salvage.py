"""Damaged checkpoints, as people met them: what is kept, what to fetch again, what another copy says."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from ckpt_tool.api.checkpoint import open_checkpoint
from tests.reports.conftest import FIXTURES, Ckpt

DCP = FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt"
HF = FIXTURES / "torch/hf_sharded/ckpt"


def test_command(tmp_path: Path, ckpt: Ckpt) -> None:
    """Status 1 when something is lost; the list is in the result."""
    torch.save({f"w{i}": torch.full((9, 9), float(i)) for i in range(6)}, tmp_path / "whole.pt")
    raw = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(raw[:-200])
    assert ckpt("verify", tmp_path / "whole.pt", "--salvage", tmp_path / "c.pt").status == 0
    ran = ckpt("verify", tmp_path / "a.pt", "--salvage", tmp_path / "b.pt", "--json")
    assert ran.status == 0
    assert ran.json["lost"] == []
    (tmp_path / "a.pt").write_bytes(raw[:2500])
    ran = ckpt("verify", tmp_path / "a.pt", "--salvage", tmp_path / "d.pt")
    assert ran.status == 1
    assert "lost: " in ran.text
    assert ckpt("verify", tmp_path / "a.pt", "--salvage", tmp_path / "b.pt").status == 2


def test_plan_fetch(tmp_path: Path, ckpt: Ckpt) -> None:
    """Missing files whole, a wrong payload by its bytes, a cut file from where it ends; nothing if nothing is wrong."""
    shutil.copytree(DCP, tmp_path / "d")
    assert ckpt("verify", tmp_path / "d", "--plan-fetch", "--full", "--quiet").out == ""
    (tmp_path / "d/__1_0.distcp").unlink()
    cut = tmp_path / "d/__2_0.distcp"
    cut.write_bytes(cut.read_bytes()[:5000])
    with open_checkpoint(DCP) as checkpoint:
        manifest = checkpoint.resolve()
        chunks = [manifest.chunks.record(row, manifest.tensors, manifest.files) for row in range(len(manifest.chunks))]
    where = next(c.where for c in chunks if c.where.path == "__3_0.distcp" and c.where.length > 100)
    path = tmp_path / "d" / where.path
    raw = bytearray(path.read_bytes())
    raw[where.offset] ^= 1
    path.write_bytes(raw)
    ran = ckpt("verify", tmp_path / "d", "--full", "--plan-fetch")
    assert ran.status == 1
    assert ran.out.splitlines() == [
        "__1_0.distcp", "__2_0.distcp 5000-", f"__3_0.distcp {where.offset}-{where.end - 1}",
    ]  # fmt: skip
    listed = ckpt("verify", tmp_path / "d", "--full", "--plan-fetch", "--json").json["fetch"]
    assert listed[0] == {"file": "__1_0.distcp", "offset": None, "length": None}
    assert listed[1] == {"file": "__2_0.distcp", "offset": 5000, "length": None}


def test_against(tmp_path: Path, ckpt: Ckpt) -> None:
    """A copy in another format is held against its source; one other element is an error that names it."""
    assert ckpt("export", HF, tmp_path / "out.pt", "--names", "source").status == 0
    assert ckpt("verify", tmp_path / "out.pt", "--against", HF).status == 0
    save_file({"a": np.zeros(4, "f4"), "b": np.zeros(2, "f4")}, tmp_path / "one.safetensors")
    save_file({"a": np.array([0, 0, 3, 0], "f4"), "c": np.zeros(2, "f4")}, tmp_path / "two.safetensors")
    ran = ckpt("verify", tmp_path / "one.safetensors", "--against", tmp_path / "two.safetensors", "--json")
    assert ran.status == 1
    found = {finding["kind"]: finding for finding in ran.json["findings"]}
    assert found["differs"]["fqn"] == "a"
    assert "in 1 of 4 elements, the first at [2]" in found["differs"]["message"]
    assert {found["only-here"]["severity"], found["only-there"]["severity"]} == {"warning"}
    assert ckpt("verify", tmp_path / "one.safetensors", "--against", HF, "--quick").status == 2


def test_cut_files_of_every_kind(tmp_path: Path, ckpt: Ckpt) -> None:
    """A safetensors file and a stream of torch before 1.6 that were cut: what lies before the cut is kept."""
    tensors = {f"w{i}": torch.full((9, 9), float(i)) for i in range(6)}
    save_file({name: each.numpy() for name, each in tensors.items()}, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    for name in ("a.safetensors", "a.pt"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-400])
        assert "--salvage OUT" in ckpt("verify", path).text
        out = tmp_path / f"out-{name}"
        ran = ckpt("verify", path, "--salvage", out, "--json")
        assert ran.status == 1
        kept = dict.fromkeys(ran.json["kept"])
        assert len(kept) == 4
        assert {each["fqn"] for each in ran.json["lost"]} == set(tensors) - set(kept)
        with open_checkpoint(out) as checkpoint:
            assert all(np.array_equal(checkpoint[fqn][:], tensors[fqn].numpy()) for fqn in kept)


def test_metadata_made_of_blobs(tmp_path: Path, ckpt: Ckpt) -> None:
    """Safetensors blobs in DCP's files say names and places: all is back, and what cannot be known is said."""
    source = FIXTURES / "torch/dcp_safetensors/ckpt"
    shutil.copytree(source, tmp_path / "d", ignore=shutil.ignore_patterns(".metadata"))
    ran = ckpt("verify", tmp_path / "d", "--salvage", tmp_path / "out")
    assert ran.status == 1
    assert "no whole shapes" in ran.text
    assert ckpt("diff", source, tmp_path / "out").status == 0
    cut = tmp_path / "d/__2_0.distcp"
    cut.write_bytes(cut.read_bytes()[:-500])
    ran = ckpt("verify", tmp_path / "d", "--salvage", tmp_path / "less", "--json")
    assert 0 < len(ran.json["lost"]) < len(ran.json["kept"])
