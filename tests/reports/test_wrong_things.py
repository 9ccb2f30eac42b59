"""What people give by mistake is called what it is, with what to type or fetch instead; on every command."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ckpt_tool.formats._content import what_is
from ckpt_tool.formats._folder import folder_content
from tests.formats.megatron.places import CHECKPOINTS
from tests.reports.conftest import FIXTURES, Ckpt
from tests.reports.made import put

DCP = FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt"
HF = FIXTURES / "torch/hf_sharded/ckpt"
VERL = FIXTURES / "torch/verl_2d/ckpt"
COMMANDS = (
    ["inspect"], ["verify"], ["export", "@", "OUT"], ["reshard", "@", "OUT"], ["cat", "@", "w"], ["diff", "@", str(HF)],
    ["edit", "@", "OUT", "--drop", "x"], ["verify", "@", "--salvage", "OUT"], ["plan"],
)  # fmt: skip


def tarred(folder: Path) -> bytes:
    """A tar archive of a folder."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.add(folder, "ckpt")
    return data.getvalue()


def zipped(folder: Path) -> bytes:
    """A zip archive of a folder."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, f"ckpt/{path.name}")
    return data.getvalue()


ST = b"\x40\0\0\0\0\0\0\0" + b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'.ljust(64) + bytes(4)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1234567\n"
FILES: dict[str, tuple[str, Callable[[], bytes], str, str]] = {
    "lfs": ("model.safetensors", lambda: LFS, "a git-LFS pointer", "git lfs pull"),
    "html": ("model.bin", lambda: b"<!DOCTYPE html><html>login</html>", "an HTML page", "fetch it again"),
    "xml": ("a.pt", lambda: b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "an XML error", "token"),
    "empty": ("a.pt", lambda: b"", "an empty file", "did not finish"),
    "zeros": ("a.pt", lambda: bytes(4096), "only zero bytes", "cut"),
    "json": ("config.json", lambda: b'{"hidden_size": 8}', "JSON text", "name the folder"),
    "tar": ("a.tar", lambda: tarred(HF), "its folders hold some", "a.tar/ckpt"),
    "tar called pt": ("a.pt", lambda: tarred(HF), "a tar archive", "tar -x"),
    "zip": ("a.zip", lambda: zipped(HF), "a zip", ""),
    "gzip": ("a.pt", lambda: b"\x1f\x8b\x08\0" + bytes(60), "a gzip file", "gunzip"),
    "icloud": ("a.safetensors", lambda: b"bplist00" + bytes(60), "iCloud", "downloaded"),
    "text": ("a.ckpt", lambda: b"epoch 3 loss 1.2\n", "plain text", ""),
    "lfs with a mark": ("a.pt", lambda: b"\xef\xbb\xbf" + LFS, "a git-LFS pointer", "git lfs pull"),
    "annex": ("a.pt", lambda: b"/annex/objects/SHA256E-s4--ab.pt\n", "a git-annex pointer", "git annex get"),
    "dvc": ("a.safetensors", lambda: b"outs:\n- md5: ab\n  path: a\n", "a DVC pointer", "dvc pull"),
    "xet": ("a.safetensors", lambda: b"# xet version 0\nfilesize = 3\n", "a Xet pointer", "hf download"),
    "not found": ("a.safetensors", lambda: b"Entry not found", "an error reply of a server", "fetch it again"),
    "forbidden": ("a.ckpt", lambda: b"ERROR 403: Forbidden\n", "an error reply of a server", "with a token"),
    "gated": ("a.bin", lambda: b"Access to model a/b is restricted.", "an error reply of a server", "with a token"),
    "error as JSON": ("a.pt", lambda: b'{"error":"Repository not found"}', "an error reply of a server", "a token"),
    "rar": ("a.pt", lambda: b"Rar!\x1a\x07\x01\0" + bytes(60), "a RAR archive", "unrar"),
    "noise": ("a.pt", lambda: bytes(range(1, 200)), "its first bytes are those of nothing known", "ckpt formats"),
}


@pytest.mark.parametrize("case", FILES.values(), ids=FILES)
def test_files(tmp_path: Path, ckpt: Ckpt, case: tuple[str, Callable[[], bytes], str, str]) -> None:
    """A file that is something else."""
    name, data, what, fix = case
    put(tmp_path, {name: data()})
    ran = ckpt("verify", tmp_path / name)
    assert ran.status == 3
    assert what in ran.text
    assert fix in ran.text


FOLDERS: dict[str, tuple[dict[str, bytes], str, str]] = {
    "tokenizer": ({"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}, "a tokenizer without a model", "weights"),
    "config only": ({"config.json": b"{}", "README.md": b"x"}, "2 describing files without tensors", "weights"),
    "unfinished": ({"config.json": b"{}", "model.safetensors.incomplete": b"x"}, "did not end: 1 unfinished", "again"),
    "cache": ({"blobs/abc.incomplete": b"x"}, "did not end: 1 unfinished file (blobs/abc.incomplete)", "again"),
    "placeholder": ({".model.safetensors.icloud": b"bplist00"}, "1 placeholder of files", "downloaded"),
    "archive": ({"ckpt.tar.gz": b"\x1f\x8b"}, "1 archive (ckpt.tar.gz)", "unpack it"),
    "empty files": ({"a.pt": b"", "b.pt": b""}, "2 empty files where tensors should be", "fetch them again"),
    "code": ({"train.py": b"", "a.so": b"\x7fELF"}, "no known checkpoint format among 1 .so, 1 .py", "ckpt formats"),
    "fetched twice": ({"a.safetensors.1": ST}, "a.safetensors.1 is a safetensors file", "name it .safetensors"),
    "nothing": ({}, "an empty folder", ""),
    "lfs bin": ({"pytorch_model.bin": LFS, "config.json": b"{}"}, "pytorch_model.bin is a git-LFS pointer", "lfs pull"),
    "lfs dcp": ({".metadata": LFS, "__0_0.distcp": LFS}, ".metadata is a git-LFS pointer; 1 other file", "lfs pull"),
    "html pt": ({"a/model.pt": b"<html>", "readme": b"x"}, "a/model.pt is an HTML page", "fetch it again"),
    "zeros": ({"m.gguf": bytes(4096)}, "m.gguf is only zero bytes", "fetch or save"),
}


@pytest.mark.parametrize("case", FOLDERS.values(), ids=FOLDERS)
def test_folders(tmp_path: Path, ckpt: Ckpt, case: tuple[dict[str, bytes], str, str]) -> None:
    """A folder that holds something else."""
    files, what, fix = case
    (tmp_path / "x").mkdir()
    put(tmp_path / "x", files)
    ran = ckpt("inspect", tmp_path / "x")
    assert ran.status == 3
    assert what in ran.text
    assert fix in ran.text
    assert len(ran.text) < 600


@pytest.mark.parametrize("words", COMMANDS, ids="-".join)
def test_every_command(tmp_path: Path, ckpt: Ckpt, words: list[str]) -> None:
    """A pointer, a page and a run's folder get the same answer from every command, and nothing is written."""
    put(tmp_path / "lfs", {"model.safetensors": LFS})
    shutil.copytree(DCP, tmp_path / "run/step-5")
    shutil.copytree(DCP, tmp_path / "run/step-10")
    for name, what in (("lfs", "a git-LFS pointer"), ("run", "give one of them, such as")):
        places = {"@": str(tmp_path / name), "OUT": str(tmp_path / "out")}
        argv = [places.get(word, word) for word in words] + ([] if "@" in words else [places["@"]])
        ran = ckpt(*argv)
        assert ran.status == 3, ran
        assert what in ran.text
        assert not (tmp_path / "out").exists()


def test_dcp_without_metadata(tmp_path: Path, ckpt: Ckpt) -> None:
    """Data files alone: what is missing, and what can be had without it."""
    shutil.copytree(DCP, tmp_path / "d")
    (tmp_path / "d/.metadata").unlink()
    ran = ckpt("inspect", tmp_path / "d")
    assert ran.status == 3
    assert ".distcp files without .metadata" in ran.text
    assert "see whether" not in ran.text
    assert f"ckpt verify {tmp_path / 'd'} --salvage OUT" in ran.text


def test_one_file_of_many(ckpt: Ckpt) -> None:
    """One rank's file, one file of a DCP checkpoint."""
    ran = ckpt("inspect", min(DCP.glob("*.distcp")))
    assert ran.status == 3
    assert f'give the folder: "{DCP}"' in ran.text
    ran = ckpt("inspect", min(VERL.glob("*.pt")))
    assert ran.status == 3 or "rank" in ran.text


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("b.pt", b"", "is an empty file"),
        ("page.bin", b"<!DOCTYPE html><html>login</html>", "is an HTML page"),
        ("c.tar.gz", b"\x1f\x8b\x08\0" + bytes(60), "tar -xf"),
        ("d.pt.aria2", b"x" * 60, "did not end"),
    ],
)
def test_a_file_beside_others(tmp_path: Path, ckpt: Ckpt, name: str, data: bytes, what: str) -> None:
    """A file that is nothing is called so, also where its folder looks like a checkpoint that does not read."""
    put(tmp_path, {"1.safetensors": LFS, "2.safetensors": LFS, name: data})
    ran = ckpt("inspect", tmp_path / name)
    assert ran.status == 3
    assert what in ran.text


def test_part_of_a_folder_above(tmp_path: Path, ckpt: Ckpt) -> None:
    """A rank's folder, or its file, is a part: nothing is taken for a whole, and what holds it is named."""
    for rank in range(2):
        folder = tmp_path / f"it/mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        args = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
        model = {"decoder.final_layernorm.weight": torch.ones(4)}
        torch.save({"args": args, "iteration": 1, "model": model}, folder / "model_optim_rng.pt")
    for given in ("mp_rank_01", "mp_rank_01/model_optim_rng.pt"):
        for command in (["inspect"], ["export", tmp_path / "out"]):
            ran = ckpt(command[0], tmp_path / "it" / given, *command[1:])
            assert ran.status == 3
            assert "not the whole" in ran.text
            assert f'"{tmp_path / "it"}"' in ran.text
    assert not (tmp_path / "out").exists()


def test_links_to_nothing(tmp_path: Path, ckpt: Ckpt) -> None:
    """A snapshot whose files were not fetched says what its links lack."""
    (tmp_path / "s").mkdir()
    put(tmp_path / "s", {"config.json": b"{}"})
    (tmp_path / "s/model.safetensors").symlink_to("../../blobs/ab")
    ran = ckpt("inspect", tmp_path / "s")
    assert ran.status == 3
    assert "model.safetensors is a link to '../../blobs/ab', which does not exist" in ran.text


def test_an_archive_in_an_archive(tmp_path: Path, ckpt: Ckpt) -> None:
    """The inner one is called what it is, in one line."""
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo("x")
        inner = tarred(HF)
        member.size = len(inner)
        archive.addfile(member, io.BytesIO(inner))
    ran = ckpt("inspect", tmp_path / "a.tar")
    assert ran.status == 3
    assert "(x is a tar archive)" in ran.text


def test_renamed(tmp_path: Path, ckpt: Ckpt) -> None:
    """A torch file called ``.pth.tar`` or ``.safetensors``, a safetensors file called ``.bin``: content tells."""
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pth.tar")
    assert ckpt("inspect", tmp_path / "model.pth.tar").status == 0
    shutil.copy(tmp_path / "model.pth.tar", tmp_path / "model.safetensors")
    ran = ckpt("inspect", tmp_path / "model.safetensors")
    assert ran.status == 0 or "a torch.save file" in ran.text
    save_file({"w": np.ones(2)}, tmp_path / "a.bin")
    assert ckpt("inspect", tmp_path / "a.bin").status == 0


def test_step_instead_of_run(ckpt: Ckpt) -> None:
    """``ckpt ls`` of a single checkpoint says that it is one."""
    ran = ckpt("ls", DCP)
    assert ran.status == 0
    assert "it is one checkpoint, no run with steps" in ran.text


def test_a_partial_download_of_one_file(tmp_path: Path, ckpt: Ckpt) -> None:
    """A safetensors file that is still being fetched is told as cut, not as damaged."""
    save_file({"w": np.ones(500)}, tmp_path / "m.safetensors")
    raw = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors.incomplete").write_bytes(raw[:-700])
    ran = ckpt("inspect", tmp_path / "m.safetensors.incomplete")
    assert ran.status == 3
    assert "700 missing" in ran.text
    assert "cut" in ran.text


def test_index_alone(tmp_path: Path, ckpt: Ckpt) -> None:
    """The index was copied, the files that it names were not."""
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    put(tmp_path, {"model.safetensors.index.json": json.dumps(index).encode()})
    ran = ckpt("inspect", tmp_path)
    assert ran.status == 3
    assert "only the index was copied" in ran.text


@pytest.mark.parametrize(
    "stand_in", [LFS, b"Entry not found", b"<html>", bytes(300)], ids=["lfs", "text", "html", "zeros"]
)
@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        ("torch/dcp_fsdp2_4r_fp32", "__3_0.distcp"),
        ("deepspeed/accelerate_fsdp2", "optimizer_0/__2_0.distcp"),
        ("torch/dcp_safetensors", "__1_0.distcp"),
    ],
)
def test_one_item_file_is_something_else(tmp_path: Path, ckpt: Ckpt, fixture: str, name: str, stand_in: bytes) -> None:
    """R86: metadata are small enough to be cloned or fetched, payload is not: not cut, but no payload at all."""
    shutil.copytree(FIXTURES / fixture / "ckpt", tmp_path / "in")
    (tmp_path / "in" / name).write_bytes(stand_in)
    what = what_is(stand_in)
    checked = ckpt("verify", tmp_path / "in", "--quick")
    assert (checked.status, f"{name} is {what} (" in checked.text) == (1, True)
    assert f"{name} is {what} (" in ckpt("ls", tmp_path / "in").text
    assert name in ckpt("verify", tmp_path / "in", "--plan-fetch").out.splitlines()


@pytest.mark.parametrize("stand_in", [LFS, b"404: Not Found", bytes(900)], ids=["lfs", "text", "zeros"])
def test_one_object_is_something_else(tmp_path: Path, ckpt: Ckpt, stand_in: bytes) -> None:
    """R86: of a file with one object nothing tells the size, its first bytes do."""
    shutil.copytree(CHECKPOINTS / "old012_zarr_t2p1d1/ckpt/iter_0000010", tmp_path / "in")
    name = "rng_state/shard_0.1_1.2.pt"
    (tmp_path / "in" / name).write_bytes(stand_in)
    checked = ckpt("verify", tmp_path / "in")
    assert (checked.status, f"{name} is {what_is(stand_in)} (" in checked.text) == (1, True)
    assert ckpt("verify", tmp_path / "in", "--plan-fetch").out == f"{name}\n"


@pytest.mark.parametrize(
    ("name", "is_it"),
    [
        (".metadata.tmp", True), ("metadata", True), (".metadata (1)", True), (".METADATA", True), (".metadata~", True),
        ("metadata.json", False), ("._.metadata", False), ("metadata_of_run.txt", False), ("metadata.d/a", False),
    ],
)  # fmt: skip
def test_metadata_under_another_name(name: str, is_it: bool) -> None:
    """A save that was killed before its last rename, or what copies make of names, is there still."""
    found = folder_content({"__0_0.distcp": 9, name: 9})
    assert found is not None
    assert found.fix is not None
    assert (f"see whether {name!r} is it, and copy it to .metadata; else fetch .metadata" in found.fix) == is_it
