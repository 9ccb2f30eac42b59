"""Salvage keeps exactly what is wholly readable, bit for bit, and says what is lost; nothing damaged comes along."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.trust.salvage import SalvageResult, salvage
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CkptError, NotFound
from tests.reports.made import as_bytes

FIXTURES = Path(__file__).parents[2] / "fixtures"
DCP = FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt"
HF = FIXTURES / "torch/hf_sharded/ckpt"
BIN = FIXTURES / "torch/hf_pytorch_bin/ckpt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, Any]]:
    """A file of torch.save, and what it holds."""
    generator = torch.Generator().manual_seed(1)
    state = {f"layers.{i}.w": torch.randn((7, i + 3), generator=generator) for i in range(9)}
    state["half"] = torch.ones(33, dtype=torch.bfloat16)
    path = tmp_path_factory.mktemp("whole") / "a.pt"
    torch.save({"model": state, "step": 5}, path)
    return path.read_bytes(), as_bytes(path)


def saved(source: Path, target: Path, **options: Any) -> SalvageResult:
    """A salvage that does not wait for the disk."""
    return salvage(source, target, durable=False, **options)


@pytest.mark.parametrize("keep", [0.3, 0.4, 0.5, 0.7, 0.85, 0.95, -1, -100])
def test_cut_zip(tmp_path: Path, whole: tuple[bytes, dict[str, Any]], keep: float) -> None:
    """R47: every storage that ends before the cut is kept, and its CRC-32 was held against the one behind it."""
    raw, expected = whole
    n = int(len(raw) * keep) if 0 < keep < 1 else len(raw) + int(keep)
    (tmp_path / "a.pt").write_bytes(raw[:n])
    done = saved(tmp_path / "a.pt", tmp_path / "b.pt")
    kept = as_bytes(tmp_path / "b.pt")
    assert kept == {fqn: expected[fqn] for fqn in kept}
    held = sum(data in raw[:n] for _, _, data in expected.values())
    assert len(kept) == held
    assert {each.fqn for each in done.lost} == set(expected) - set(kept)
    loaded = torch.load(tmp_path / "b.pt", weights_only=True)
    assert loaded["step"] == 5
    report = json.loads((tmp_path / "b.pt.salvage.json").read_text())
    assert {each["fqn"] for each in report["lost"]} == set(expected) - set(kept)
    assert verify(tmp_path / "b.pt", manifest=tmp_path / "b.pt.digests.json").is_ok


def test_cut_before_anything(tmp_path: Path, whole: tuple[bytes, dict[str, Any]]) -> None:
    """A file that ends within its ``data.pkl`` gives nothing."""
    (tmp_path / "a.pt").write_bytes(whole[0][:300])
    with pytest.raises(CkptError):
        saved(tmp_path / "a.pt", tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bytes(tmp_path: Path, whole: tuple[bytes, dict[str, Any]], seed: int) -> None:
    """Tensors whose bytes were changed are lost, those beside them are kept."""
    raw, expected = whole
    rng = random.Random(seed)
    name, (_, _, data) = rng.choice(sorted(expected.items()))
    at = raw.index(data) + rng.randrange(len(data))
    changed = bytearray(raw)
    changed[at] ^= 1 << rng.randrange(8)
    cut = rng.random() < 0.5
    (tmp_path / "a.pt").write_bytes(changed[: len(raw) - 30] if cut else changed)
    done = saved(tmp_path / "a.pt", tmp_path / "b.pt")
    assert as_bytes(tmp_path / "b.pt") == {fqn: value for fqn, value in expected.items() if fqn != name}
    (lost,) = done.lost
    assert lost.fqn == name
    assert "CRC-32" in lost.why


def test_missing_file_of_dcp(tmp_path: Path) -> None:
    """A DCP checkpoint without one rank's file: what other ranks hold whole."""
    expected = as_bytes(DCP)
    shutil.copytree(DCP, tmp_path / "d")
    (tmp_path / "d/__1_0.distcp").unlink()
    done = saved(tmp_path / "d", tmp_path / "out")
    kept = as_bytes(tmp_path / "out")
    assert 0 < len(kept) < len(expected)
    assert kept == {fqn: expected[fqn] for fqn in kept}
    assert {each.fqn for each in done.lost} >= set(expected) - set(kept)
    assert not done.is_all
    with open_checkpoint(DCP) as source, open_checkpoint(tmp_path / "out") as target:
        fqns = {blob.fqn for blob in target.manifest.blobs}
        assert fqns <= {blob.fqn for blob in source.manifest.blobs}


def test_dcp_without_metadata(tmp_path: Path) -> None:
    """Items without the file that names them: each box of each tensor is there, under its file and number."""
    shutil.copytree(DCP, tmp_path / "d")
    (tmp_path / "d/.metadata").unlink()
    done = saved(tmp_path / "d", tmp_path / "out")
    kept = as_bytes(tmp_path / "out")
    with open_checkpoint(DCP) as checkpoint:
        manifest = checkpoint.resolve()
        boxes = [manifest.chunks.record(row, manifest.tensors, manifest.files) for row in range(len(manifest.chunks))]
        raw = checkpoint.source.store.fetch([box.where for box in boxes])
    missing = [box.fqn for box, data in zip(boxes, raw, strict=True) if data not in {v[2] for v in kept.values()}]
    assert missing == []
    assert any("names, whole shapes and places" in text for text in done.unknown)
    assert not done.is_all


@pytest.mark.parametrize("source", [HF, BIN], ids=["safetensors", "bin"])
def test_lost_index(tmp_path: Path, source: Path) -> None:
    """Numbered files of Hugging Face without their index hold everything."""
    shutil.copytree(source, tmp_path / "h")
    next((tmp_path / "h").glob("*.index.json")).unlink()
    done = saved(tmp_path / "h", tmp_path / "out")
    assert done.is_all
    assert {k: v[2] for k, v in as_bytes(tmp_path / "out").items()} == {k: v[2] for k, v in as_bytes(source).items()}


def test_lost_shard(tmp_path: Path) -> None:
    """The index tells what a file that is gone held; without it, nobody knows."""
    shutil.copytree(HF, tmp_path / "h")
    gone = min((tmp_path / "h").glob("*.safetensors"))
    index = json.loads((tmp_path / "h/model.safetensors.index.json").read_text())["weight_map"]
    gone.unlink()
    done = saved(tmp_path / "h", tmp_path / "out")
    assert {each.fqn for each in done.lost} == {fqn for fqn, path in index.items() if path == gone.name}
    assert set(as_bytes(tmp_path / "out")) == {fqn for fqn, path in index.items() if path != gone.name}
    (tmp_path / "h/model.safetensors.index.json").unlink()
    done = saved(tmp_path / "h", tmp_path / "out2")
    assert done.unknown == (f"{gone.name} is missing: what it held is not known",)


def test_one_damaged_file_of_several(tmp_path: Path) -> None:
    """A file of rank files that was cut gives what it still holds, the others all."""
    source = FIXTURES / "torch/verl_2d/ckpt"
    expected = as_bytes(source)
    shutil.copytree(source, tmp_path / "v")
    path = max((tmp_path / "v").glob("*.pt"))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.6)])
    assert not verify(tmp_path / "v").is_ok
    saved(tmp_path / "v", tmp_path / "out")
    kept = as_bytes(tmp_path / "out")
    assert kept == {fqn: expected[fqn] for fqn in kept}


def test_replica(tmp_path: Path) -> None:
    """Of a box that is stored twice the copy that is not damaged is taken."""
    tensor = torch.arange(64.0)
    run = tmp_path / "run"
    run.mkdir()
    for rank in range(2):
        torch.save({"w": tensor, "b": tensor + rank * 0}, run / f"model_world_size_2_rank_{rank}.pt")
    path = run / "model_world_size_2_rank_0.pt"
    raw = bytearray(path.read_bytes())
    raw[raw.index(tensor.numpy().tobytes()) + 9] ^= 4
    path.write_bytes(raw)
    done = saved(run, tmp_path / "out")
    assert as_bytes(tmp_path / "out")["w"][2] == tensor.numpy().tobytes()
    assert done.is_all or not done.lost


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_two_checkpoints_in_one(tmp_path: Path, damage: str) -> None:
    """A damaged file of an optimizer's folder costs what it held, and nothing of the model's folder."""
    source = FIXTURES / "deepspeed/accelerate_fsdp2/ckpt"
    expected = as_bytes(source)
    shutil.copytree(source, tmp_path / "c")
    path = next((tmp_path / "c").glob("optimizer_0/__1_0.distcp"))
    raw = path.read_bytes()
    half = len(raw) // 2
    path.write_bytes(raw[:half] if damage == "cut" else raw[:half] + bytes(b ^ 255 for b in raw[half : half + 6000])
                     + raw[half + 6000 :])  # fmt: skip
    report = verify(tmp_path / "c", level="full")
    assert {finding.where.path for finding in report.findings if finding.where and finding.severity > 1} == {
        "optimizer_0/__1_0.distcp"
    }
    done = saved(tmp_path / "c", tmp_path / "out")
    kept = as_bytes(tmp_path / "out")
    assert kept == {fqn: expected[fqn] for fqn in kept}
    lost = {each.fqn for each in done.lost} & set(expected)
    assert lost == set(expected) - set(kept)
    assert lost
    assert all(fqn.startswith("optimizer") for fqn in lost)


@pytest.mark.parametrize("is_there", [True, False])
def test_metadata_of_one_of_two(tmp_path: Path, is_there: bool) -> None:
    """Where one of two checkpoints that belong together does not read, the other one is not the whole."""
    shutil.copytree(FIXTURES / "deepspeed/accelerate_fsdp2/ckpt", tmp_path / "c")
    path = tmp_path / "c/optimizer_0/.metadata"
    raw = path.read_bytes()
    path.unlink()
    if is_there:
        path.write_bytes(b"?" + raw[1:])
    (found,) = [finding for finding in verify(tmp_path / "c").findings if finding.severity > 1]
    assert (found.kind, found.where and found.where.path) == ("missing-file", "optimizer_0/.metadata")


def test_nothing_left(tmp_path: Path) -> None:
    """What is no checkpoint is no salvage either, and nothing is written."""
    (tmp_path / "a").mkdir()
    with pytest.raises(NotFound):
        saved(tmp_path / "a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_beside_what_is_damaged(tmp_path: Path, whole: tuple[bytes, dict[str, Any]]) -> None:
    """A name in the directory and a tensor's bytes are wrong at once: checksums are held against bytes all the same."""
    raw, expected = whole
    name, (_, _, data) = max(expected.items(), key=lambda item: len(item[1][2]))
    changed = bytearray(raw)
    changed[raw.index(data) + 3] ^= 16
    at = raw.rindex(b".data/serialization_id")
    changed[at + 8] ^= 1
    (tmp_path / "a.pt").write_bytes(changed)
    done = saved(tmp_path / "a.pt", tmp_path / "b.pt")
    assert as_bytes(tmp_path / "b.pt") == {fqn: value for fqn, value in expected.items() if fqn != name}
    assert [each.fqn for each in done.lost] == [name]
    assert {f.kind for f in verify(tmp_path / "a.pt", level="full").findings} >= {"crc-mismatch", "container-damage"}
