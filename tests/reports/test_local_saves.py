"""Reports R10 and R25 together: each rank saved for itself, with metadata of its own (``use_collectives=False``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.formats.dcp.build import Checkpoint
from tests.reports.conftest import Ckpt
from tests.reports.made import put, values

WHOLE = torch.arange(24.0).reshape(6, 4)


def local_saves(folder: Path, own: str = "model.own", dtype: torch.dtype = torch.float32) -> Path:
    """Three ranks: ``w`` in three parts, ``same`` as three equal copies, and ``own``, which is each rank's number."""
    for rank in range(3):
        made = Checkpoint()
        made.tensor("model.w", (6, 4), [(rank, (2 * rank, 0), WHOLE[2 * rank : 2 * rank + 2].clone())])
        made.tensor("model.same", (3,), [(rank, (0,), torch.ones(3))])
        made.tensor(own, (2,), [(rank, (0,), torch.full((2,), rank, dtype=dtype))])
        files = made.files()
        put(folder, {f"__{rank}.metadata" if path == ".metadata" else path: data for path, data in files.items()})
    return folder


def test_what_ranks_hold_differently_is_asked_for(ckpt: Ckpt, tmp_path: Path) -> None:
    """A tensor that each rank has of its own passed for a replica, and the other ranks' values were gone."""
    source = local_saves(tmp_path / "source")
    found = ckpt("verify", source)
    said = "'model.own' [0:2]: 3 ranks hold it, with 3 different contents, such as rank 0 and rank 1"
    assert (found.status, said in found.text) == (1, True)
    for command in (["reshard", source, tmp_path / "out", "--dp", "2"], ["export", source, tmp_path / "out"]):
        refused = ckpt(*command)
        assert (refused.status, said in refused.err, "--unequal first" in refused.err) == (3, True, True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("rule", "expected"), [("first", [0.0, 0.0]), ("*own=concat:0", [0.0, 0.0, 1.0, 1.0, 2.0, 2.0])]
)
def test_ways_to_go_on(ckpt: Ckpt, tmp_path: Path, rule: str, expected: list[float]) -> None:
    """As told; what ranks share is there once."""
    source = local_saves(tmp_path / "source")
    assert ckpt("reshard", source, tmp_path / "out", "--dp", "2", "--unequal", rule).status == 0
    assert values(tmp_path / "out", "model.own") == expected
    assert values(tmp_path / "out", "model.same") == [1.0] * 3
    assert values(tmp_path / "out", "model.w") == WHOLE.tolist()


def test_random_states_are_nobodys_weights(ckpt: Ckpt, tmp_path: Path) -> None:
    """State of ranks that differs is a warning, and stops no conversion."""
    source = local_saves(tmp_path / "source", "rng_state", torch.uint8)
    found = ckpt("verify", source)
    assert (found.status, "warning different-replicas" in found.text) == (0, True)
    assert ckpt("reshard", source, tmp_path / "out", "--dp", "2").status == 0
