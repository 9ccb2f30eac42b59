"""Consolidated files, written: the same as fairscale's layers saved on two ranks, whatever they were read from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export, prepare_export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats.consolidated.writer import WRITER
from ckpt_tool.geometry.box import Box
from tests.formats.conformance import FIXTURES
from tests.formats.torch_save.laid_out import request_of
from tests.formats.zoo import CHECKPOINTS
from tests.reports.made import as_bytes

TORCHTITAN = FIXTURES / "deepspeed/torchtitan_dp2tp2/ckpt/checkpoint/step-3"
LLAMA_2 = """
[[rule]]
match = 'tok_embeddings\\.weight'
kind = "row"
"""


def states(folder: Path) -> list[dict[str, torch.Tensor]]:
    """What ``torch.load`` gives for each file."""
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("consolidated.*.pth"))]


def assert_same(found: Path, expected: Path) -> None:
    """Both have the same files with the same entries, bit for bit."""
    ours, theirs = states(found), states(expected)
    assert [list(state) for state in ours] == [list(state) for state in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert [fqn for fqn in one if one[fqn].dtype != other[fqn].dtype or not torch.equal(one[fqn], other[fqn])] == []


@pytest.mark.parametrize("name", ["consolidated_llama2", "consolidated_llama3"])
def test_as_fairscale_cuts_it(name: str, tmp_path: Path) -> None:
    """Joined to one file, then cut again: embeddings by rows as Llama 3 has them, or by columns where rules say so."""
    source = CHECKPOINTS / name / "ckpt"
    export(source, tmp_path / "one", to="consolidated", names="source", durable=False)
    assert [path.name for path in sorted((tmp_path / "one").iterdir())] == ["consolidated.00.pth", "params.json"]
    (tmp_path / "llama2.toml").write_text(LLAMA_2, "utf-8")
    rules = tmp_path / "llama2.toml" if name.endswith("2") else None
    reshard(
        tmp_path / "one", tmp_path / "two", to="consolidated", tp=2, rules=rules, default="replicate", durable=False
    )
    assert_same(tmp_path / "two", source)
    said = json.loads((tmp_path / "two/params.json").read_text("utf-8"))
    assert said == json.loads((source / "params.json").read_text("utf-8"))
    assert as_bytes(tmp_path / "two") == as_bytes(source)
    assert verify(tmp_path / "two", level="full").is_ok


def test_from_a_training_state(tmp_path: Path) -> None:
    """The weights of torchtitan's DCP, which has Meta's names; its optimizer and objects are left out, and said so."""
    options: dict[str, Any] = {"tp": 2, "default": "replicate", "durable": False}
    result = reshard(TORCHTITAN, tmp_path / "there", to="consolidated", **options)
    weights = {
        fqn: one for fqn, one in as_bytes(TORCHTITAN).items() if not fqn.startswith(("optimizer.", "lr_", "train"))
    }
    dropped = {one.fqn for one in result.dropped}
    assert any(fqn.startswith("optimizer.") for fqn in dropped)
    assert "no params.json" in result.notes[-1]
    first, second = states(tmp_path / "there")
    assert first.keys() == second.keys() == weights.keys()
    for fqn, (_, shape, data) in weights.items():
        dim = next((d for d, n in enumerate(shape) if first[fqn].shape[d] != n), None)
        whole = first[fqn] if dim is None else torch.cat([first[fqn], second[fqn]], dim)
        assert whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes() == data, fqn
        assert (dim is None) == ("norm" in fqn)


def test_one_file_of_a_training_state(tmp_path: Path) -> None:
    """An export under its own names."""
    export(TORCHTITAN, tmp_path / "one", to="consolidated", names="source", durable=False)
    with open_checkpoint(tmp_path / "one") as found:
        assert found.format == "consolidated"
        assert "layers.0.attention.wq.weight" in found


def test_names_of_another_library_are_refused(tmp_path: Path) -> None:
    """Nobody's program would find them."""
    with pytest.raises(Unsupported, match=r"has one of Meta's names: model\.") as caught:
        prepare_export(FIXTURES / "deepspeed/hf_st_tied/ckpt", tmp_path / "x", to="consolidated", names="source")
    assert "--names source" in (caught.value.hint or "")


def test_other_ranks_are_refused(tmp_path: Path) -> None:
    """Files are those of tensor-parallel ranks, each with one part of every weight."""
    source = CHECKPOINTS / "consolidated_llama3/ckpt"
    with pytest.raises(LayoutError, match=r"the target has dp 2"):
        reshard(source, tmp_path / "x", to="consolidated", mesh="dp=2,tp=2", default="replicate")
    kind, shape = DTYPES["float32"], (4, 2)
    request = request_of({("output.weight",): (kind, shape)}, [(0, Box.whole(shape), 0)], world_size=2, mesh={"tp": 2})
    with pytest.raises(LayoutError, match=r"output\.weight: rank 1 has 0 boxes"):
        WRITER.lay_out(request)
