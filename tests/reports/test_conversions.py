"""Conversions and comparisons as people missed them: plans that are what runs, runs that are killed, NaN, weights."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.manifest_file import read_manifest
from ckpt_tool.cli.app import main
from ckpt_tool.storage.local.target import LocalTarget
from tests.reports.conftest import FIXTURES, Ckpt
from tests.reports.made import as_bytes

DCP = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
RESHARD = ("--tp", "2", "--to", "rank-files", "--default", "shard0", "--workers", "1", "--memory", "64KiB")


def contents(folder: Path) -> dict[str, bytes]:
    """Files by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_r106_urls_are_not_paths(ckpt: Ckpt, tmp_path: Path) -> None:
    """R106: a URL whose slashes were folded is told; one that is right is kept, and ends as a whole or not at all."""
    ran = ckpt("inspect", "s3:/bucket/step-5")
    assert ran.status == 3
    assert "a URL has two slashes: s3://bucket/step-5" in ran.text
    ran = ckpt("export", DCP, "memory://r106/deep/out", "--json")
    assert ran.status == 0
    assert ran.json["target_url"] == "memory://r106/deep/out"
    weights = {fqn.removeprefix("model."): v for fqn, v in as_bytes(DCP).items() if not fqn.startswith("optim")}
    assert set(as_bytes("memory://r106/deep/out").values()) <= set(weights.values())


def test_r112_the_plan_is_what_runs(ckpt: Ckpt, tmp_path: Path) -> None:
    """R112: every read and write can be listed before; the same command lists the same, and executes it."""
    dry, run = tmp_path / "dry.jsonl", tmp_path / "run.jsonl"
    assert ckpt("reshard", DCP, tmp_path / "out", *RESHARD, "--dry-run", "--plan-json", dry).status == 0
    assert not (tmp_path / "out").exists()
    assert ckpt("reshard", DCP, tmp_path / "out", *RESHARD, "--plan-json", run).status == 0
    assert dry.read_text() == run.read_text()
    plan = json.loads(dry.read_text())
    written: dict[str, int] = {}
    for tile in plan["tiles"]:
        for path, _, length in tile["writes"]:
            written[path] = written.get(path, 0) + length
    assert sum(written.values()) == plan["stats"]["written_nbytes"]
    assert set(written) <= set(contents(tmp_path / "out"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a conversion makes that nobody stops."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["reshard", str(DCP), str(folder / "whole"), *RESHARD, "--no-fsync", "--quiet"]) == 0
    return folder / "whole"


@pytest.mark.parametrize("seed", range(10))
def test_r113_killed_at_any_write(
    ckpt: Ckpt, tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """R113: stopped at a random write, nothing has the final name; --resume ends with the same bytes and digests."""
    left = [random.Random(seed).randrange(1, 90)]
    write = LocalTarget.write

    def failing(self: LocalTarget, path: str, offset: int, buffer: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        write(self, path, offset, buffer)

    monkeypatch.setattr(LocalTarget, "write", failing)
    monkeypatch.setattr("ckpt_tool.engine.moving._JOURNAL_BYTES", 1)
    monkeypatch.setattr("ckpt_tool.api.checkpoint._UNIT_BYTES", 4096)
    stopped = ckpt("reshard", DCP, tmp_path / "out", *RESHARD).status
    monkeypatch.undo()
    assert stopped not in (0, 1)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("ckpt_tool.api.checkpoint._UNIT_BYTES", 4096)
    assert ckpt("reshard", DCP, tmp_path / "out", *RESHARD, "--resume").status == 0
    assert contents(tmp_path / "out") == contents(whole)
    assert read_manifest(tmp_path / "out.digests.json").tensors == read_manifest(f"{whole}.digests.json").tensors


def test_r115_nan_is_itself(ckpt: Ckpt, tmp_path: Path) -> None:
    """R115: NaN of the same bits are equal; other values are told by ulp, absolute and relative distance."""
    values = np.array([1, np.nan, 3, np.inf], "f4")
    other = values.copy()
    other[2] = np.nextafter(np.float32(3), np.float32(4))
    for name, array in (("a", values), ("b", values.copy()), ("c", other)):
        save_file({"w": array}, tmp_path / f"{name}.safetensors")
    assert ckpt("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors").status == 0
    ran = ckpt("diff", tmp_path / "a.safetensors", tmp_path / "c.safetensors", "--json")
    assert ran.status == 1
    (row,) = ran.json["tensors"]
    assert (row["differing"], row["max_ulp"], row["first"]["index"]) == (1, 1, [2])


def test_r116_one_nan(ckpt: Ckpt, tmp_path: Path) -> None:
    """R116: one NaN at flat index 12,345 in the third file: tensor, index, file and byte are named."""
    for number in range(1, 4):
        array = np.ones((200, 100), "f4")
        if number == 3:
            array.reshape(-1)[12_345] = np.nan
        save_file({f"layers.{number}.w": array}, tmp_path / f"model-0000{number}-of-00003.safetensors")
    ran = ckpt("verify", tmp_path, "--full", "--json")
    assert ran.status == 1
    (found,) = [finding for finding in ran.json["findings"] if finding["kind"] == "nan"]
    path = tmp_path / "model-00003-of-00003.safetensors"
    start = path.stat().st_size - 80_000
    assert (found["fqn"], found["file"], found["offset"]) == ("layers.3.w", path.name, start + 12_345 * 4)
    assert "index [123, 45]" in found["message"]


def test_r118_weights_alone(ckpt: Ckpt, tmp_path: Path) -> None:
    """R118: weights come out of a training checkpoint without a byte of the optimizer being read."""
    with open_checkpoint(DCP) as checkpoint:
        tensors = checkpoint.manifest.tensors
        model = sum(int(n) for fqn, n in zip(tensors.fqns, tensors.nbytes, strict=True) if not fqn.startswith("optim"))
        everything = int(tensors.nbytes.sum())
    ran = ckpt("export", DCP, tmp_path / "out", "--dry-run", "--json")
    assert ran.json["read_nbytes"] <= model < everything / 2
    ran = ckpt("edit", DCP, tmp_path / "weights", "--drop-optimizer", "--json")
    assert ran.status == 0
    assert ran.json["taken_over"]["copied_nbytes"] < 0.6 * sum(map(len, contents(DCP).values()))
