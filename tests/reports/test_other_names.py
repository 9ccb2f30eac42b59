"""A file that is missing often lies beside its place under the name that a download, a copy or a system gave it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.reports.conftest import FIXTURES, Ckpt
from tests.reports.made import put

DCP = FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt"
HF = FIXTURES / "torch/hf_sharded/ckpt"
SHARD = "model-00002-of-00003.safetensors"
NAMES = {
    "browser": ("model-00002-of-00003 (1).safetensors", "may be it under another name: mv -n"),
    "windows": ("model-00002-of-00003 - Copy.safetensors", "may be it under another name: mv -n"),
    "macos": ("model-00002-of-00003 copy 2.safetensors", "may be it under another name: mv -n"),
    "wget": (f"{SHARD}.1", "may be it under another name: mv -n"),
    "query": (f"{SHARD}?download=true", "may be it under another name: mv -n"),
    "case": (SHARD.upper(), "may be it under another name: mv -n"),
    "folder": (f"sub/{SHARD}", "may be it under another name: mv -n"),
    "rsync": (f".{SHARD}.aB3dE9", "a copy of it that did not end"),
    "chrome": (f"{SHARD}.crdownload", "a copy of it that did not end"),
    "aws": (f"{SHARD}.6eF0a1B2", "a copy of it that did not end"),
    "rclone": (f"{SHARD}.1f2e3d4c.partial", "a copy of it that did not end"),
    "gzip": (f"{SHARD}.gz", "may be it, compressed"),
    "gpg": (f"{SHARD}.gpg", "may be it, encrypted"),
    "icloud": (f".{SHARD}.icloud", "which lies elsewhere"),
    "dvc": (f"{SHARD}.dvc", "which lies elsewhere"),
}


@pytest.mark.parametrize(("name", "said"), NAMES.values(), ids=NAMES)
def test_a_shard(tmp_path: Path, ckpt: Ckpt, name: str, said: str) -> None:
    """``verify`` calls it missing and names what lies there instead; ``export`` and ``ls`` name it too."""
    run = tmp_path / "step-1"
    shutil.copytree(HF, run)
    (run / name).parent.mkdir(exist_ok=True)
    (run / SHARD).rename(run / name)
    ran = ckpt("verify", run)
    assert ran.status == 1
    assert f"{name} (11,504 bytes) {'is a download or ' if 'did not' in said else ''}" in ran.text
    assert said in ran.text
    assert said in ckpt("export", run, tmp_path / "out").text
    assert said in ckpt("ls", tmp_path).text


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors.json", "model-00002-of-00004.safetensors"])
def test_others(tmp_path: Path, ckpt: Ckpt, name: str) -> None:
    """What describes the file, or is another one, is not taken for it."""
    run = tmp_path / "step-1"
    shutil.copytree(HF, run)
    (run / SHARD).rename(run / name)
    ran = ckpt("verify", run)
    assert ran.status == 1
    assert "may be it" not in ran.text
    assert "did not end" not in ran.text


def test_each_is_told_once(tmp_path: Path, ckpt: Ckpt) -> None:
    """Of a file of DCP that holds parts of many tensors the finding about the file says it, not that of each tensor."""
    shutil.copytree(DCP, tmp_path / "d")
    (tmp_path / "d/__2_0.distcp").rename(tmp_path / "d/__2_0.DISTCP")
    ran = ckpt("verify", tmp_path / "d", "--limit", "0")
    assert ran.status == 1
    assert ran.text.count("may be it under another name") == 1
    assert ran.text.count("lost-data") == 1


@pytest.mark.parametrize("name", ["snapshot_metadata", ".snapshot_metadata.bak", ".snapshot_metadata (1)"])
def test_metadata(tmp_path: Path, ckpt: Ckpt, name: str) -> None:
    """A folder that no reader knows for want of the file that tells of the others; browsers drop the dot."""
    put(tmp_path / "t/replicated/app", {"w": bytes(16)})
    put(tmp_path / "t", {name: b"manifest: {}"})
    ran = ckpt("inspect", tmp_path / "t")
    assert ran.status == 3
    assert ".snapshot_metadata is missing" in ran.text
    assert f"{name} (12 bytes) may be it under another name: mv -n" in ran.text


def test_a_list_of_what_is_not_fetched(tmp_path: Path, ckpt: Ckpt) -> None:
    """aria2 gives a file its length at once: what it has not fetched is zeros, though all fits."""
    shutil.copytree(HF, tmp_path / "d")
    (tmp_path / f"d/{SHARD}.aria2").write_bytes(b"\0\1")
    ran = ckpt("verify", tmp_path / "d")
    assert ran.status == 1
    assert f"the download of {SHARD} has not ended" in ran.text
    assert ckpt("verify", tmp_path / "d", "--plan-fetch").out.split() == [SHARD]


def test_attributes_of_macos(tmp_path: Path, ckpt: Ckpt) -> None:
    """What macOS puts beside files is no shard and no index: nobody sees it, and who names it is told."""
    for source in (HF, DCP):
        run = tmp_path / source.parent.name
        shutil.copytree(source, run / "step-1")
        put(run / "step-1", {f"._{path.name}": b"\0\5\x16\7" + bytes(4092) for path in source.iterdir()})
        put(run / "step-1/__MACOSX", {f"._{path.name}": b"\0\5\x16\7" + bytes(4092) for path in source.iterdir()})
        ran = ckpt("verify", run / "step-1")
        assert ran.status == 0, ran
        assert "._" not in ran.text
        assert "incomplete" not in ckpt("ls", run).text
        ran = ckpt("export", run / "step-1", tmp_path / "out" / source.parent.name)
        assert ran.status == 0, ran
        assert "._" not in ran.text
    ran = ckpt("inspect", tmp_path / f"hf_sharded/step-1/._{SHARD}")
    assert ran.status == 3
    assert "what macOS keeps beside a file" in ran.text
