"""Folders of diffusers and transformers that hold one model several times: as float16, as an average of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.reports.conftest import Ckpt
from tests.reports.made import as_bytes, put, safetensors_bytes, saved

_WIDE = safetensors_bytes({"a": ("F32", [2], bytes(8)), "b": ("F32", [1], bytes(4))})
_NARROW = safetensors_bytes({"a": ("F16", [2], bytes(4)), "b": ("F16", [1], bytes(2))})
_A, _B = (safetensors_bytes({fqn: ("F32", [2], bytes(8))}) for fqn in "ab")
_HALF_A, _HALF_B = (safetensors_bytes({fqn: ("F16", [2], bytes(4))}) for fqn in "ab")
_WIDE_BIN, _NARROW_BIN = (
    saved({"a": torch.ones(2, dtype=dtype), "b": torch.ones(1, dtype=dtype)})
    for dtype in (torch.float32, torch.float16)
)


def _index(a: str, b: str) -> bytes:
    return f'{{"metadata": {{}}, "weight_map": {{"a": "{a}", "b": "{b}"}}}}'.encode()


_SHARDS = ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors")
_HALF_SHARDS = ("m.fp16-00001-of-00002.safetensors", "m.fp16-00002-of-00002.safetensors")
_INDEXED = {
    "m.safetensors.index.json": _index(*_SHARDS),
    "m.safetensors.index.fp16.json": _index(*_HALF_SHARDS),
    **dict(zip((*_SHARDS, *_HALF_SHARDS), (_A, _B, _HALF_A, _HALF_B), strict=True)),
}


@pytest.mark.parametrize(
    "files",
    [
        {"model.safetensors": _WIDE, "model.fp16.safetensors": _NARROW, "model.non_ema.safetensors": _WIDE},
        {"diffusion_pytorch_model.bin": _WIDE_BIN, "diffusion_pytorch_model.fp16.bin": _NARROW_BIN},
        {"pytorch_model.bin": _WIDE_BIN, "pytorch_model.fp16.bin": _NARROW_BIN},
        _INDEXED,
        {name: data for name, data in _INDEXED.items() if not name.endswith(".json")},
        {_SHARDS[0]: _A, _SHARDS[1]: _B, "m.fp16.safetensors": _NARROW},
    ],
)
def test_the_plain_name_counts(ckpt: Ckpt, tmp_path: Path, files: Mapping[str, bytes]) -> None:
    """As libraries load it; the others are said to be left out, and are no strays."""
    put(tmp_path / "unet", files)
    assert {dtype for dtype, _, _ in as_bytes(tmp_path / "unet").values()} == {"float32"}
    ran = ckpt("verify", tmp_path / "unet", "--full")
    assert ran.status == 0
    assert "stray-file" not in ran.text
    assert "not checked: 'm" in ran.text.replace("'diffusion_pytorch_m", "'m").replace("'pytorch_m", "'m")
    assert "left out; name a file, or its index" in ckpt("inspect", tmp_path / "unet").text


def test_a_variant_that_is_named(ckpt: Ckpt, tmp_path: Path) -> None:
    """By its file, or by its index; beside it the plain files are no strays."""
    put(tmp_path / "one", {"model.safetensors": _WIDE, "model.fp16.safetensors": _NARROW})
    put(tmp_path / "shards", _INDEXED)
    for name in ("one/model.fp16.safetensors", "shards/m.safetensors.index.fp16.json"):
        assert {dtype for dtype, _, _ in as_bytes(tmp_path / name).values()} == {"float16"}
        assert "stray-file" not in ckpt("verify", tmp_path / name).text


def test_names_alone_are_not_believed(ckpt: Ckpt, tmp_path: Path) -> None:
    """What has other tensors is a part, and of what has them in part nothing tells which counts."""
    parts = put(tmp_path / "parts", {"model.safetensors": _A, "model.extra.safetensors": _B})
    assert sorted(as_bytes(parts)) == ["a", "b"]
    more = put(tmp_path / "more", {"model.safetensors": _A, "model.ema.safetensors": _WIDE})
    ran = ckpt("inspect", more)
    assert ran.status == 3
    assert "'a' is in model.ema.safetensors and in model.safetensors" in ran.text
    two = put(tmp_path / "two", {"model.fp16.safetensors": _HALF_A, "model.bf16.safetensors": _HALF_A})
    assert ckpt("inspect", two).status == 3


def test_files_of_one_checkpoint_each(ckpt: Ckpt, tmp_path: Path) -> None:
    """A folder of models is none itself: its files are named, and one of them to type."""
    put(tmp_path, {"best.pt": _WIDE_BIN, "last.pt": _NARROW_BIN, "log.txt": b"x"})
    ran = ckpt("inspect", tmp_path)
    assert ran.status == 3
    assert "files that are one each: best.pt (torch-save), last.pt (torch-save)" in ran.text
    assert f'hint: give one of them, such as "{tmp_path}/last.pt"' in ran.text


def test_many_files_of_one_checkpoint_each(ckpt: Ckpt, tmp_path: Path) -> None:
    """Of many, the likeliest are looked at, and the others are counted."""
    put(tmp_path, {f"exp{n}.pt": saved({"w": torch.ones(2)}) for n in range(20)} | {"model.pt": saved({})})
    ran = ckpt("inspect", tmp_path)
    assert "exp19.pt (torch-save), model.pt (torch-save); 13 more files were not looked at" in ran.text
    assert f'give one of them, such as "{tmp_path}/model.pt"' in ran.text
    assert "exp2.pt" not in ran.text
