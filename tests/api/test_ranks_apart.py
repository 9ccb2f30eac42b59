"""Tensors that ranks saved differently, though nothing places them: nobody takes the first rank's for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt_tool
from ckpt_tool.api.digest import digests
from ckpt_tool.api.manifest_file import write_manifest
from ckpt_tool.errors import IntegrityError, UsageError


def save(folder: Path, *, of_second: float, n_ranks: int = 2) -> Path:
    """Files of ranks: one tensor is the same on all, one is of each rank's own."""
    folder.mkdir()
    for rank in range(n_ranks):
        own = torch.full((4,), of_second if rank else 0.0)
        torch.save({"same": torch.ones(3), "own": own}, folder / f"model_rank_{rank}.pt")
    return folder


def test_a_diff_compares_what_each_rank_has(tmp_path: Path) -> None:
    """Only the second rank's differs, which the first one's would not show; copies stay one tensor."""
    one, other = save(tmp_path / "one", of_second=1.0), save(tmp_path / "other", of_second=2.0)
    report = ckpt_tool.diff(one, other)
    assert {tensor.fqn: tensor.status for tensor in report.tensors} == {
        "same": "same", "own@rank0": "same", "own@rank1": "differs"
    }  # fmt: skip
    assert ckpt_tool.diff(one, save(tmp_path / "again", of_second=1.0)).is_same


def test_digests_are_of_each_rank(tmp_path: Path) -> None:
    """So a manifest sees what changed on a rank that is not the first."""
    one, other = save(tmp_path / "one", of_second=1.0), save(tmp_path / "other", of_second=2.0)
    first, second = digests(one).tensors, digests(other).tensors
    assert {*first} == {"same", "own@rank0", "own@rank1"}
    assert {fqn for fqn in first if first[fqn] != second[fqn]} == {"own@rank1"}
    write_manifest(digests(one), tmp_path / "m.json")
    found = ckpt_tool.verify(other, manifest=tmp_path / "m.json").findings
    assert [finding.fqn for finding in found if finding.kind == "digest-mismatch"] == ["own@rank1"]


def test_cat_shows_one_ranks(tmp_path: Path) -> None:
    """Nobody is shown the first rank's as if it were all there is; each can be named, with a slice too."""
    source = save(tmp_path / "one", of_second=1.0)
    with pytest.raises(IntegrityError, match="'own' is another one on each of 2 ranks") as caught:
        ckpt_tool.cat(source, "own")
    assert caught.value.hint == "name one of them: own@rank0, own@rank1"
    assert ckpt_tool.cat(source, "own@rank1").array.tolist() == [1.0] * 4
    assert ckpt_tool.cat(source, "own@rank1[:2]").array.tolist() == [1.0] * 2
    assert ckpt_tool.cat(source, "same").array.tolist() == [1.0] * 3


def test_a_load_stops(tmp_path: Path) -> None:
    """It would fill every rank with the first one's values; what ranks have alike is loaded."""
    source = save(tmp_path / "one", of_second=1.0)
    state = {"same": torch.zeros(3)}
    ckpt_tool.load(state, source, strict=False)
    assert state["same"].tolist() == [1.0, 1.0, 1.0]
    both = {"same": torch.zeros(3), "own": torch.full((4,), 7.0)}
    with pytest.raises(IntegrityError, match=r"1 tensor differs between ranks and nothing says how they join \(own\)"):
        ckpt_tool.load(both, source)
    assert both["own"].tolist() == [7.0] * 4
    ckpt_tool.load(both, source, unequal="first")
    assert both["own"].tolist() == [0.0] * 4
    with pytest.raises(UsageError, match="unequal must be"):
        ckpt_tool.load(both, source, unequal="last")  # type: ignore[arg-type]


def test_equal_copies_are_one_tensor_everywhere(tmp_path: Path) -> None:
    """Where ranks hold the same, nothing is told apart, and nothing stops."""
    source = save(tmp_path / "one", of_second=0.0)
    assert {*digests(source).tensors} == {"same", "own"}
    state = {"same": torch.zeros(3), "own": torch.ones(4)}
    ckpt_tool.load(state, source)
    assert state["own"].tolist() == [0.0] * 4
