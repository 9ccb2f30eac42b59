"""What a conversion records on its way is what a look at the target finds, and at the source under its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.digest import digests
from ckpt_tool.api.manifest_file import manifest_beside, read_manifest
from ckpt_tool.api.trust.diff import diff
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.engine import moving
from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.engine.worker import Worker
from tests.formats.megatron.places import CHECKPOINTS

FIXTURES = Path(__file__).parents[2] / "fixtures"
FSDP = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
SMALL: dict[str, Any] = {"memory_budget_bytes": 1 << 15, "durable": False}

RESHARDS = {
    "rank-files": {"tp": 2, "dp": 2, "to": "rank-files"},
    "dcp, columns": {"tp": 4, "to": "dcp"},
    "every replica": {"tp": 2, "dp": 2, "to": "torch-ranks", "dp_mode": "replicate", "replicas": "all"},
    "one file": {"to": "torch-save"},
    "cast": {"tp": 2, "dp": 2, "to": "dcp", "dtype": "bf16"},
}


@pytest.mark.parametrize("options", RESHARDS.values(), ids=RESHARDS)
def test_reshards(tmp_path: Path, options: dict[str, Any]) -> None:
    """Pieces of rows, of columns, repeated, cast: the sums on the way are those of the tensors as written."""
    result = reshard(FSDP, tmp_path / "out", default="shard0", **options, **SMALL)
    assert result.manifest_url == str(tmp_path / "out.digests.json")
    recorded = read_manifest(result.manifest_url)
    assert recorded.format == result.format
    assert recorded.tensors == digests(tmp_path / "out").tensors
    assert not recorded.originals


def test_source_names(tmp_path: Path) -> None:
    """Two small files prove a tensor-parallel copy of Megatron's and a Hugging Face export of the same run equal."""
    source = CHECKPOINTS / "td_full_t2p2d2/ckpt"
    export(source, tmp_path / "hf", **SMALL)
    reshard(source, tmp_path / "tp4", tp=4, to="megatron-dist", **SMALL)
    exported = read_manifest(tmp_path / "hf.digests.json")
    assert exported.tensors == digests(tmp_path / "hf").tensors
    assert {row.fqn: row.digest for row in exported.originals} == digests(source, section="model").tensors
    two = [manifest_beside(tmp_path / name) for name in ("hf", "tp4")]
    report = diff(*two, section="model")
    assert report.is_same
    assert report.counts["same"] + sum(row.is_accepted for row in report.tensors) == len(exported.originals) == 9
    assert diff(two[0], tmp_path / "tp4", section="model").is_same
    assert diff(CHECKPOINTS / "legacy_t2p2/ckpt", two[0], section="model").is_same
    checked = verify(CHECKPOINTS / "legacy_t2p2/ckpt", manifest=two[0])
    assert any(f.message.startswith("9 of 9 recorded tensors are here") for f in checked.findings)
    other = diff(CHECKPOINTS / "legacy_uneven_p2/ckpt", two[0], section="model")
    assert not other.is_same


def test_dropped_padding(tmp_path: Path) -> None:
    """An export without the padded rows of the vocabulary is equal where these are zeros, and only there."""
    rows = np.arange(8, dtype="f4").reshape(4, 2)
    padded = np.concatenate([rows, np.zeros((3, 2), "f4")])
    for name, table in (("short", rows), ("padded", padded), ("other", padded + np.float32(1))):
        save_file({"embed.weight": table}, tmp_path / f"{name}.safetensors")
        reshard(tmp_path / f"{name}.safetensors", tmp_path / name, **SMALL)
    report = diff(tmp_path / "short.digests.json", tmp_path / "padded.digests.json")
    assert report.is_same
    (only,) = report.tensors
    assert only.reason is not None
    assert only.reason.text == "4 rows are the same, and 3 behind them are zeros"
    assert not diff(tmp_path / "short.digests.json", tmp_path / "other.digests.json").is_same


def test_differences_of_manifests(tmp_path: Path) -> None:
    """Other bits, another type, another shape and what only one side has are told by the files alone."""
    base = {"a": np.ones(6, "f4"), "b": np.ones(6, "f4"), "c": np.ones(6, "f4"), "d": np.ones((2, 3), "f4")}
    changed = {**base, "a": np.full(6, 2, "f4"), "b": np.ones(6, "i4"), "d": np.ones((3, 2), "f4"), "e": np.ones(1)}
    del changed["c"]
    for name, tensors in (("one", base), ("two", changed)):
        save_file(tensors, tmp_path / f"{name}.safetensors")
        export(tmp_path / f"{name}.safetensors", tmp_path / name, **SMALL)
    report = diff(tmp_path / "one.digests.json", tmp_path / "two.digests.json")
    assert {t.fqn: t.status for t in report.tensors} == {
        "a": "differs", "b": "dtype", "c": "only-a", "d": "shape", "e": "only-b",
    }  # fmt: skip
    assert diff(tmp_path / "one.digests.json", tmp_path / "two.digests.json", include=["a"], quick=True).is_same


def test_nowhere_elsewhere_and_remote(tmp_path: Path) -> None:
    """No file where none is wanted; one at a path or URL of choice, which verify and diff read."""
    assert export(FSDP, tmp_path / "none", digest=None, **SMALL).manifest_url is None
    assert not (tmp_path / "none.digests.json").exists()
    export(FSDP, "memory://digests/hf", **SMALL)
    export(FSDP, tmp_path / "hf", digest="memory://digests/elsewhere.json", **SMALL)
    names = {path.rsplit("/", 1)[-1] for path in fsspec.filesystem("memory").find("/digests")}
    assert {"hf.digests.json", "elsewhere.json"} <= names
    assert diff("memory://digests/hf.digests.json", "memory://digests/elsewhere.json").is_same
    assert verify(tmp_path / "hf", manifest="memory://digests/hf.digests.json", require_all=True).is_ok


class _Stopped(Exception):
    pass


@pytest.mark.parametrize("n_units", [1, 3])
def test_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_units: int) -> None:
    """A run that was stopped and goes on ends with the digests of all units."""
    monkeypatch.setattr(moving, "_JOURNAL_BYTES", 1)
    monkeypatch.setattr("ckpt_tool.api.checkpoint._UNIT_BYTES", 4096)
    monkeypatch.setattr("ckpt_tool.api.checkpoint._TILE_BYTES", 4096)
    run_unit = Worker.run_unit
    left = [n_units]

    def stopping(self: Worker, unit: int, progress: Any) -> UnitRecord:
        if not left[0]:
            raise _Stopped
        left[0] -= 1
        return run_unit(self, unit, progress)

    options: dict[str, Any] = {
        "to": "dcp",
        "tp": 2,
        "default": "shard0",
        "memory_budget_bytes": 1 << 15,
        "n_workers": 1,
    }
    monkeypatch.setattr(Worker, "run_unit", stopping)
    with pytest.raises(_Stopped):
        reshard(FSDP, tmp_path / "out", **options)
    monkeypatch.setattr(Worker, "run_unit", run_unit)
    result = reshard(FSDP, tmp_path / "out", resume=True, **options)
    assert result.report.resumed_nbytes > 0
    assert read_manifest(tmp_path / "out.digests.json").tensors == digests(tmp_path / "out").tensors
