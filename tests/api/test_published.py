"""Experts that are one tensor in memory go out under the names that the model is published with, and come back in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tool
from ckpt_tool.errors import LayoutError, UsageError
from tests.api.published import model


def saved(folder: Path, tensors: dict[str, torch.Tensor], model_type: str | None) -> Path:
    """A folder of transformers with these tensors."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    return folder


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether names and bits are equal."""
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_names_tell_the_model(kind: str, tmp_path: Path) -> None:
    """Without a config, a model whose names no other has is exported as published, below a trainer's key as well."""
    memory, published = model(kind)
    torch.save({"model": memory, "step": 3}, tmp_path / "a.pt")
    result = ckpt_tool.export(tmp_path / "a.pt", tmp_path / "out")
    assert same(load_file(tmp_path / "out/model.safetensors"), published)
    assert any("as the model is published: names are those that" in note for note in result.notes)


def test_the_config_tells_the_model(tmp_path: Path) -> None:
    """Where names would do for several models nothing is guessed, and said so; the config or the user tells it."""
    memory, published = model("glm4_moe")
    result = ckpt_tool.export(saved(tmp_path / "a", memory, None), tmp_path / "kept")
    assert same(load_file(tmp_path / "kept/model.safetensors"), memory)
    [note] = [each for each in result.notes if "experts are one tensor in each layer" in each]
    assert "nothing tells which model it is: their names are kept; --family qwen_moe or mixtral" in note
    result = ckpt_tool.export(saved(tmp_path / "b", memory, "glm4_moe"), tmp_path / "told")
    assert same(load_file(tmp_path / "told/model.safetensors"), published)
    assert any("model_type is glm4_moe in config.json" in each for each in result.notes)
    ckpt_tool.export(tmp_path / "a", tmp_path / "asked", family="qwen_moe")
    assert same(load_file(tmp_path / "asked/model.safetensors"), published)
    result = ckpt_tool.export(saved(tmp_path / "c", memory, "other_moe"), tmp_path / "unknown")
    assert same(load_file(tmp_path / "unknown/model.safetensors"), memory)
    assert any("nothing is known of other_moe" in each for each in result.notes)


def test_names_that_are_kept(tmp_path: Path) -> None:
    """gpt-oss is published as it is in memory; names that are asked to stay do; facts that nobody needs are refused."""
    memory, published = model("gpt_oss")
    result = ckpt_tool.export(saved(tmp_path / "a", memory, None), tmp_path / "out")
    assert same(load_file(tmp_path / "out/model.safetensors"), published)
    assert not any("experts" in note for note in result.notes)
    memory, _ = model("mixtral")
    folder = saved(tmp_path / "b", memory, "mixtral")
    ckpt_tool.export(folder, tmp_path / "kept", names="source")
    ckpt_tool.export(folder, tmp_path / "too", family="none")
    for name in ("kept", "too"):
        assert same(load_file(tmp_path / name / "model.safetensors"), memory)
    with pytest.raises(UsageError, match="heads=4"):
        ckpt_tool.export(folder, tmp_path / "facts", facts={"heads": 4})


def test_a_training_state_keeps_its_names(tmp_path: Path) -> None:
    """With the optimizer along, weights and their state stay under one name."""
    memory, _ = model("qwen3_moe")
    state = {name: {"exp_avg": 2 * tensor} for name, tensor in memory.items()}
    torch.save({"model": memory, "optimizer": {"state": state}}, tmp_path / "a.pt")
    ckpt_tool.export(tmp_path / "a.pt", tmp_path / "out.pt", everything=True, names="hf")
    assert ckpt_tool.diff(tmp_path / "out.pt", tmp_path / "a.pt", everything=True).is_same


def test_diff_pairs_them(tmp_path: Path) -> None:
    """Both spellings are compared with ``names="hf"``, which the hint says; optimizer state goes along."""
    memory, published = model("glm4_moe")
    one = tmp_path / "a.pt"
    torch.save({"model": memory, "optimizer": {"state": {n: {"exp_avg": 2 * t} for n, t in memory.items()}}}, one)
    other = saved(tmp_path / "b", published, "glm4_moe")
    plain = ckpt_tool.diff(one, other)
    assert not plain.is_same
    assert "experts of a layer in one tensor" in (plain.hint or "")
    assert "--names hf" in (plain.hint or "")
    found = ckpt_tool.diff(one, other, names="hf", section="model")
    assert found.is_same
    assert found.counts["same"] == len(published)
    published["model.layers.1.mlp.experts.2.up_proj.weight"][3, 4] += 1
    found = ckpt_tool.diff(one, saved(tmp_path / "c", published, "glm4_moe"), names="hf", section="model")
    [wrong] = [row for row in found.tensors if row.status != "same"]
    assert wrong.fqn.endswith("layers.1.mlp.experts.2.up_proj.weight")
    everything = ckpt_tool.diff(one, one, names="hf", family="qwen_moe", everything=True)
    assert everything.is_same
    assert everything.counts["same"] == 2 * len(published)


@pytest.mark.parametrize("model_type", ["told", None])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_load_puts_them_together(kind: str, model_type: str | None, tmp_path: Path) -> None:
    """A published model loads straight into the state of a live one, in the same bytes, with nothing left over."""
    memory, published = model(kind)
    folder = saved(tmp_path / "a", published, None if model_type is None else kind)
    state = {name: torch.zeros_like(tensor) for name, tensor in memory.items()}
    report = ckpt_tool.load({"model": state}, folder)
    assert same(state, memory)
    assert report.unexpected == ()
    assert report.read_nbytes == sum(4 * tensor.numel() for tensor in memory.values())
    apart = {name: torch.zeros_like(tensor) for name, tensor in published.items()}
    ckpt_tool.load(apart, folder)
    assert same(apart, published)


def test_a_load_misses_an_expert(tmp_path: Path) -> None:
    """An expert that is not there is said, and nothing is filled."""
    memory, published = model("qwen3_moe")
    del published["model.layers.1.mlp.experts.1.up_proj.weight"]
    state = {name: torch.zeros_like(tensor) for name, tensor in memory.items()}
    with pytest.raises(LayoutError, match=r"layers\.1\.mlp\.experts\.gate_up_proj.*'up' is missing"):
        ckpt_tool.load(state, saved(tmp_path / "a", published, "qwen3_moe"))
    assert not any(tensor.any() for tensor in state.values())
