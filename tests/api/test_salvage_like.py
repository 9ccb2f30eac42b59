"""Another step tells names and places where they are lost; values are this step's own, and nothing is guessed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.edit import NameChanges, edit
from ckpt_tool.api.trust.salvage import SalvageResult, salvage
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.cli.app import main
from ckpt_tool.errors import FormatError, NotFound
from tests.formats.dcp.build import Checkpoint
from tests.formats.dcp.build import saved as in_file
from tests.formats.megatron.places import CHECKPOINTS
from tests.reports.made import as_bytes, put

FIXTURES = Path(__file__).parents[2] / "fixtures"
HF = FIXTURES / "torch/hf_sharded/ckpt"
DCP = FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt"


def saved_at(step: int, *, rows: int = 8, note: str = "") -> dict[str, bytes]:
    """Two ranks' files: tensors that are alike, others, and an object whose length differs from step to step."""
    made = Checkpoint()
    for rank in (0, 1):
        for name in ("a", "b"):
            values = torch.arange(rows * 4.0).reshape(rows, 4) + step + 100 * rank + ord(name)
            made.tensor(f"model.{name}{rank}", [2 * rows, 4], [(rank, [0, 0], values), (rank, [rows, 0], -values)])
        made.stored(
            "train" if rank == 0 else f"loader{rank}", rank, None, None, in_file({"step": step, "note": note * step})
        )
        made.tensor(f"optim.exp_avg{rank}", [rows], [(rank, [0], torch.arange(float(rows)) + step)])
    return dict(made.files())


def saved(source: Path, target: Path, like: Path) -> SalvageResult:
    """A salvage that does not wait for the disk."""
    return salvage(source, target, like=like, durable=False)


def test_lost_metadata(tmp_path: Path) -> None:
    """Names, shapes and places come from the other step though items lie elsewhere there; the bytes are this step's."""
    other = put(tmp_path / "step-10", saved_at(10, note="x"))
    whole = put(tmp_path / "whole", saved_at(20, note="long text "))
    here = put(tmp_path / "step-20", saved_at(20, note="long text "))
    (here / ".metadata").unlink()
    done = saved(here, tmp_path / "out", other)
    assert as_bytes(tmp_path / "out") == as_bytes(whole)
    assert done.is_all
    with open_checkpoint(tmp_path / "out") as found, open_checkpoint(whole) as expected:
        assert found.objects() == expected.objects()
    (said,) = done.borrowed
    assert "12 items in 2 files" in said
    assert "8 of them have a twin in their file" in said
    assert json.loads((tmp_path / "out.salvage.json").read_text())["borrowed"] == [said]


def test_damaged_metadata_and_a_cut_file(tmp_path: Path) -> None:
    """A metadata file that cannot be read is as none; of a cut file the first items keep their names."""
    other = put(tmp_path / "step-10", saved_at(10))
    whole = put(tmp_path / "whole", saved_at(20))
    here = put(tmp_path / "step-20", saved_at(20))
    (here / ".metadata").write_bytes(b"\0" * 50)
    path = here / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-2000])
    done = saved(here, tmp_path / "out", other)
    kept, expected = as_bytes(tmp_path / "out"), as_bytes(whole)
    assert kept == {fqn: expected[fqn] for fqn in kept}
    assert {"model.a0", "model.b0", "model.a1", "optim.exp_avg0"} <= set(kept)
    assert {each.fqn for each in done.lost} == {*expected, "train", "loader1"} - {*kept, "train"}
    assert any("items are left, the first ones" in text for text in done.borrowed)


def test_another_structure_is_refused(tmp_path: Path) -> None:
    """Sizes that differ, or files that are called otherwise: no name is given, and it is said where they differ."""
    here = put(tmp_path / "step-20", saved_at(20))
    (here / ".metadata").unlink()
    other = put(tmp_path / "other", saved_at(10, rows=6))
    with pytest.raises(FormatError, match=r"its item 0 is float32\[8, 4\], and there float32\[6, 4\] of 'model.a0'"):
        saved(here, tmp_path / "out", other)
    with pytest.raises(FormatError, match="nothing here has the structure"):
        saved(here, tmp_path / "out", FIXTURES / "torch/dcp_zstd/ckpt")
    assert not (tmp_path / "out").exists()


def test_one_file_of_another_structure(tmp_path: Path) -> None:
    """What does not fit gets no name and is lost; the rest is kept."""
    other = put(tmp_path / "step-10", saved_at(10))
    files = {**saved_at(20), "__1_0.distcp": saved_at(20, rows=6)["__1_0.distcp"]}
    here = put(tmp_path / "step-20", files)
    (here / ".metadata").unlink()
    done = saved(here, tmp_path / "out", other)
    assert set(as_bytes(tmp_path / "out")) == {"model.a0", "model.b0", "optim.exp_avg0"}
    assert {each.fqn for each in done.lost} == {"model.a1", "model.b1", "optim.exp_avg1", "loader1"}
    assert any(text.startswith("__1_0.distcp: no names, its item 0 is float32[6, 4]") for text in done.borrowed)


def test_torchs_own_files(tmp_path: Path) -> None:
    """What FSDP2 and tensor parallelism wrote comes back whole under the names of a copy of its structure."""
    shutil.copytree(DCP, tmp_path / "d")
    (tmp_path / "d/.metadata").unlink()
    done = saved(tmp_path / "d", tmp_path / "out", DCP)
    assert as_bytes(tmp_path / "out") == as_bytes(DCP)
    assert done.is_all


def test_index_and_shard(tmp_path: Path) -> None:
    """With index and a shard of Hugging Face lost, the other step tells what the shard held."""
    shutil.copytree(HF, tmp_path / "h")
    (tmp_path / "h/model.safetensors.index.json").unlink()
    gone = max((tmp_path / "h").glob("*.safetensors"))
    held = set(as_bytes(gone))
    gone.unlink()
    done = saved(tmp_path / "h", tmp_path / "out", HF)
    assert {each.fqn for each in done.lost} == held
    assert done.borrowed == (f"model.safetensors.index.json is that of {HF}",)


def test_what_only_the_other_step_has(tmp_path: Path) -> None:
    """A single file in which a tensor is not there, which nothing in it can tell."""
    shutil.copytree(HF, tmp_path / "h")
    edit(tmp_path / "h", tmp_path / "less", changes=NameChanges(drop=["model.norm.weight"]), durable=False)
    done = saved(tmp_path / "less", tmp_path / "out", HF)
    (lost,) = done.lost
    assert (lost.fqn, lost.why) == ("model.norm.weight", f"not here; {HF} has it: bfloat16[24]")


@pytest.mark.parametrize("name", ["old012_fsms_t2p1d2", "old012_zarr_t2p1d1"])
def test_megatron(tmp_path: Path, name: str) -> None:
    """Of mcore's descriptions nothing is left: weights and moments come back, values of the common state do not."""
    whole = CHECKPOINTS / name / "ckpt/iter_0000010"
    here = Path(shutil.copytree(whole, tmp_path / "iter"))
    (here / "metadata.json").unlink()
    described = {f.kind for f in verify(here).findings if f.severity > 1} if (here / ".metadata").exists() else set()
    assert described == ({"missing-metadata"} if (here / ".metadata").exists() else set())
    if not described:
        with pytest.raises(NotFound, match=r"metadata.json is missing .*: mcore writes it last"):
            verify(here)
    (here / "common.pt").unlink()
    (here / ".metadata").unlink(missing_ok=True)
    done = saved(here, tmp_path / "out", whole)
    kept, expected = as_bytes(tmp_path / "out"), as_bytes(whole)
    assert kept == {fqn: expected[fqn] for fqn in kept}
    assert {fqn for fqn in expected if "exp_avg" in fqn or fqn.startswith("model.")} <= set(kept)
    assert any("optimizer" in each.fqn for each in done.lost)
    assert f"common.pt is that of {whole}" in done.borrowed


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line: what was borrowed and why is printed; without --salvage it is a usage error."""
    other = put(tmp_path / "step-10", saved_at(10))
    here = put(tmp_path / "step-20", saved_at(20))
    (here / ".metadata").unlink()
    assert main(["verify", str(here), "--salvage", str(tmp_path / "out"), "--like", str(other)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "borrowed: names, whole shapes and places of 12 items" in said
    assert "nothing is lost" in said
    assert main(["verify", str(here), "--like", str(other)]) == 2
