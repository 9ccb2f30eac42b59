"""Real Megatron checkpoints of one model, in whatever layout and format, have one table of digests."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tool.api.digest import digests
from ckpt_tool.api.manifest_file import write_manifest
from ckpt_tool.api.runs.ls import ls
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.manifest.digest import ContentDigest
from tests.api.runs import copied
from tests.formats.megatron.places import CHECKPOINTS
from tests.reports.made import put

SAME = (
    ("legacy_t2p2", "legacy_nodist_t2", "old012_fsms_t2p1d2", "old012_zarr_t2p1d1", "td_dpr_t2p2d2", "td_dpzero_t2p2",
     "td_full_t2p2d2", "td_nodist_t2"),
    ("legacy_moe_e2", "moe_dpr_e2", "moe_seq_e2", "td_dpzero_moe_e2"),
    ("dpr_uneven_p2", "dpr_vpp_p2", "legacy_uneven_p2", "legacy_vpp_p2v2", "old012_fsms_t1d3"),
)  # fmt: skip


def weights(name: str) -> dict[str, ContentDigest]:
    """Digests of the model's weights."""
    found = digests(CHECKPOINTS / name / "ckpt", section="model", wide=True).tensors
    return {fqn: digest for fqn, digest in found.items() if "_extra_state" not in fqn}


@pytest.mark.parametrize("names", SAME, ids=lambda names: names[0])
def test_layouts_of_one_model(names: tuple[str, ...]) -> None:
    """Files of ranks, shards, zarr and buckets, TP, PP, EP and virtual stages: the digests are the same."""
    expected = weights(names[0])
    assert len(expected) > 5
    for name in names[1:]:
        assert weights(name) == expected, name


def test_tensor_parallel_copy_and_legacy_files(tmp_path: Path) -> None:
    """A manifest of a distributed checkpoint proves the weights of the files that ranks wrote."""
    write_manifest(digests(CHECKPOINTS / "td_full_t2p2d2/ckpt", section="model"), tmp_path / "m.json")
    report = verify(CHECKPOINTS / "legacy_t2p2/ckpt", manifest=tmp_path / "m.json")
    kinds = {finding.kind for finding in report.findings}
    assert "digests-compared" in kinds
    assert "digest-mismatch" not in kinds


@pytest.mark.parametrize(
    ("name", "lost", "why"),
    [
        ("legacy_t2p2", "mp_rank_01_001/model_optim_rng.pt", "1 of 4 files mp_rank_#_#/model_optim_rng.pt are missing"),
        ("td_full_t2p2d2", "__3_0.distcp", "__3_0.distcp is missing; it holds"),
        ("td_full_t2p2d2", ".metadata", "no .metadata: its save did not end"),
        ("td_full_t2p2d2", "metadata.json", "metadata.json is missing beside common_state/shard_0_1"),
    ],
)
def test_iterations(tmp_path: Path, name: str, lost: str, why: str) -> None:
    """A run of Megatron: an iteration that lacks a rank's file, or the metadata, is not the newest good one."""
    source = CHECKPOINTS / name / "ckpt/iter_0000010"
    copied(source, tmp_path / "iter_0000010", tmp_path / "iter_0000020")
    put(tmp_path, {"latest_checkpointed_iteration.txt": b"20"})
    (tmp_path / "iter_0000020" / lost).unlink()
    found = ls(tmp_path)
    assert found.latest is not None
    assert found.latest.path == "iter_0000010"
    assert found.steps[1].problems[0].startswith(why)
    assert (found.trackers[0].says or "").startswith("names 20, which is not complete: ")
