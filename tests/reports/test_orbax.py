"""JAX checkpoints as users met them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from ckpt_tool.formats.orbax import reader
from tests.formats.zoo import CHECKPOINTS
from tests.reports.conftest import Ckpt
from tests.reports.made import as_bytes

STEP = CHECKPOINTS / "orbax_files/ckpt/3"


@pytest.mark.parametrize("name", ["orbax_zarr2", "orbax_zarr3", "orbax_files"])
def test_r107_no_devices_are_needed(name: str, tmp_path: Path, ckpt: Ckpt) -> None:
    """R107: a sharding over 64 devices is only told; any machine reads metadata and arrays, and converts them."""
    step = shutil.copytree(CHECKPOINTS / name / "ckpt/3", tmp_path / "3")
    said = json.loads((step / "_sharding").read_text())
    for key, text in said.items():
        one = json.loads(text)
        one["shape"] = [1, 64]
        one["device_mesh"] = {"mesh": [[{"id": i} for i in range(64)]]}
        said[key] = json.dumps(one)
    (step / "_sharding").write_text(json.dumps(said))
    ran = ckpt("inspect", step)
    assert ran.status == 0
    assert "mesh dp=1 tp=64" in ran.text
    truth = as_bytes(CHECKPOINTS / name / "ckpt/3")
    assert as_bytes(step) == truth
    for to in ("dcp", "orbax"):
        assert ckpt("export", step, tmp_path / to, "--to", to, "--all", "--names", "source").status == 0
        assert as_bytes(tmp_path / to) == truth
    assert "jax" not in sys.modules


def test_r109_very_many_files(ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """R109: arrays in files of their own and in a database are both listed; very many files are told of."""
    names = [row["fqn"] for row in ckpt("inspect", STEP, "--json").json["tensors"]]
    assert names == [
        row["fqn"] for row in ckpt("inspect", CHECKPOINTS / "orbax_zarr2/ckpt/3", "--json").json["tensors"]
    ]
    assert "many-files" not in ckpt("verify", STEP, "--json").text
    monkeypatch.setattr(reader, "_MANY_FILES", 50)
    ran = ckpt("verify", STEP)
    assert ran.status == 0
    assert "files; Orbax with use_ocdbt=True writes a few" in " ".join(ran.text.split())


def test_r110_data_replaced_under_the_same_metadata(tmp_path: Path, ckpt: Ckpt) -> None:
    """R110: ``_METADATA`` stays and a chunk is another array's: the tree fits, only the digests do not."""
    step = shutil.copytree(STEP, tmp_path / "3")
    assert ckpt("verify", step, "--write-manifest", tmp_path / "m.json").status == 0
    other = (step / "opt_state.0.mu.layers_0.kernel/0.0").read_bytes()
    (step / "params.layers_0.kernel/0.0").write_bytes(other)
    assert ckpt("verify", step, "--full").status == 0
    ran = ckpt("verify", step, "--manifest", tmp_path / "m.json", "--json")
    assert ran.status == 1
    found = {finding["fqn"] for finding in ran.json["findings"] if finding["kind"] == "digest-mismatch"}
    assert found == {"params.layers_0.kernel"}
