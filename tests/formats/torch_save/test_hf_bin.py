"""Sharded ``pytorch_model.bin``: the reader's contract, and an index that is wrong."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import NotFound
from ckpt_tool.formats.torch_save.hf_bin import READER
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import FIXTURES, Case, ReaderTests, source_of, stored_bytes, truth_of

TORCH = FIXTURES / "torch/hf_pytorch_bin"
UNTIED = FIXTURES / "deepspeed/hf_bin_untied"
A, B = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
INDEX = "pytorch_model.bin.index.json"


class TestHfBin(ReaderTests):
    """Two and three files with their index."""

    reader = READER
    reader_import = "ckpt_tool.formats.torch_save.hf_bin:READER"
    cases = (
        Case("hf_pytorch_bin", TORCH / "ckpt", truth_of(TORCH), max_read_requests=10),
        Case("hf_bin_untied", UNTIED / "ckpt", truth_of(UNTIED), max_read_requests=8),
    )


def saved(**tensors: Any) -> bytes:
    """A torch.save file of some tensors."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


def model(
    weight_map: dict[str, str], files: dict[str, bytes] | None = None, *, total_size: int = 20
) -> dict[str, bytes]:
    """Two files and an index over them."""
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    return {A: saved(a=torch.zeros(2)), B: saved(b=torch.zeros(3)), INDEX: json.dumps(index).encode(), **(files or {})}


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (model({"a": A, "b": B}), None),
        (model({"a": A, "b": B}, total_size=21), "total-size"),
        (model({"a": A, "b": A}), "index-wrong-file"),
        (model({"a": A, "b": B, "ghost": B}), "index-ghost-tensor"),
        (model({"a": A, "b": B}, {"pytorch_model_old.bin": saved(a=torch.zeros(2))}), "stray-file"),
        (model({"a": A, "b": B, "c": "pytorch_model-00003-of-00003.bin"}), "missing-file"),
        (model({"a": A, "b": B}, {B: saved(a=torch.zeros(2), b=torch.zeros(3))}), "duplicate-tensor"),
        (model({"b": B, "a": A}, {A: saved(a=torch.zeros(2), more=torch.zeros(0))}), "not-in-index"),
    ],
    ids=["sound", "size", "wrong-file", "ghost", "stray", "missing", "duplicate", "unlisted"],
)
def test_contradictions_are_found(files: dict[str, bytes], kind: str | None) -> None:
    """Each way in which an index can be wrong is a finding of its own, and the rest stays readable."""
    source = source_of(MemoryStore(files))
    manifest = READER.read(source)
    kinds = {finding.kind for finding in READER.check(source, manifest)}
    assert (kind is None and not kinds) or kind in kinds
    assert "b" in manifest.tensors.fqns


@pytest.mark.parametrize("is_one", [False, True])
def test_the_config_beside_the_files_is_read_and_goes_along(is_one: bool, tmp_path: Path) -> None:
    """What ``config.json`` says is held against ``.bin`` files as against safetensors, and an export has it too."""
    files = model({"a": A, "b": B}) if not is_one else {"pytorch_model.bin": saved(a=torch.zeros(2))}
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    settings = {"config.json": json.dumps(config).encode(), "generation_config.json": b'{"top_k": 7}'}
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in (files | settings).items():
        (folder / name).write_bytes(data)
    report = verify(folder)
    assert [f.kind for f in report.findings if f.severity is Severity.WARNING] == ["config-dtype"]
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.manifest.info["config"] == config
    out = tmp_path / "out"
    export(folder, out, durable=False)
    assert {path.name: path.read_bytes() for path in out.glob("*.json")} == settings
    cast = tmp_path / "cast"
    export(folder, cast, durable=False, dtype="float16")
    assert json.loads((cast / "config.json").read_text()) == {**config, "torch_dtype": "float16"}


def test_a_tensor_in_two_files_is_taken_from_the_one_that_the_index_names() -> None:
    """With two copies, the index decides which bytes count."""
    files = model({"a": A, "b": B}, {B: saved(a=torch.ones(2), b=torch.zeros(3))})
    manifest = READER.read(source_of(MemoryStore(files)))
    (row,) = manifest.chunks.rows_of(manifest.tensor_id("a"))
    assert manifest.files.paths[manifest.chunks.file[row]] == A


def test_tied_tensors_count_once() -> None:
    """Transformers 4 lists both names of a tied tensor and counts its bytes once."""
    weight = torch.zeros(5)
    files = {
        A: saved(embed=weight, head=weight),
        INDEX: json.dumps({"metadata": {"total_size": 20}, "weight_map": {"embed": A, "head": A}}).encode(),
    }
    source = source_of(MemoryStore(files))
    assert [f.kind for f in READER.check(source, READER.read(source))] == ["tied-tensors"]


def test_missing_files_are_listed() -> None:
    """A file that was not copied is in ``info``; its tensors are missing and named."""
    files = stored_bytes(UNTIED / "ckpt")
    del files["pytorch_model-00001-of-00002.bin"]
    source = source_of(MemoryStore(files))
    manifest = READER.read(source)
    assert manifest.info["missing_files"] == ["pytorch_model-00001-of-00002.bin"]
    (finding,) = [f for f in READER.check(source, manifest) if f.kind == "missing-file"]
    assert finding.severity is Severity.ERROR
    assert "tensors are in no other file" in finding.message


def test_an_index_alone_is_no_model() -> None:
    """Only the index was copied."""
    with pytest.raises(NotFound, match="none of the 2 files"):
        READER.read(source_of(MemoryStore({INDEX: model({"a": A, "b": B})[INDEX]})))
