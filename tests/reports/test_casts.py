"""Casts to another type, of section A of the collected reports: asked for, counted, and said."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.formats.dcp.build import Checkpoint
from tests.reports.conftest import Ckpt
from tests.reports.made import as_bytes, dcp


def test_r13_casts_are_asked_for_and_reported(ckpt: Ckpt, tmp_path: Path) -> None:
    """R13: bytes stay what they are; a cast happens on request only, and says how much it changed."""
    w, small = torch.tensor([1.0, 1 + 2**-20, 3.0]), torch.tensor([0.0, 1e-40, 2e-4 + 1e-9])

    def add(made: Checkpoint) -> None:
        made.tensor("w", (3,), [(0, (0,), w)])
        made.tensor("small", (3,), [(0, (0,), small)])

    source = dcp(tmp_path / "source", add)
    assert ckpt("reshard", source, tmp_path / "same", "--dp", "2").status == 0
    assert as_bytes(tmp_path / "same") == as_bytes(source)
    done = ckpt("reshard", source, tmp_path / "cast", "--dp", "2", "--dtype", "bf16", "--json")
    casts = {cast["fqn"]: cast for cast in done.json["report"]["casts"]}
    for fqn, exact in (("w", w.double()), ("small", small.double())):
        errors = (exact - exact.bfloat16().double()).abs()
        assert casts[fqn]["max_abs_error"] == errors.max()
        assert casts[fqn]["max_rel_error"] == (errors / exact.abs())[errors > 0].max()
        assert casts[fqn]["n_changed"] == int((errors > 0).sum())
    done = ckpt("reshard", source, tmp_path / "again", "--dp", "2", "--dtype", "BF16")
    largest = f"{casts['small']['max_rel_error']:.3g}"
    assert (
        "cast: 2 tensors from float32 to bfloat16: w, small; 3 values changed, by 9.54e-07 at most (in w), "
        f"relatively by {largest} (in small)" in done.text
    )
    assert as_bytes(tmp_path / "cast")["w"][0] == "bfloat16"


def test_r13_values_too_large_for_the_type(ckpt: Ckpt, tmp_path: Path) -> None:
    """R13: values that a narrower type cannot hold are counted apart, with the tensors that they are in."""
    w = torch.tensor([1.0, 1e6, -1e9, torch.inf, torch.nan])
    source = dcp(tmp_path / "source", lambda made: made.tensor("w", (5,), [(0, (0,), w)]))
    done = ckpt("export", source, tmp_path / "out", "--dtype", "fp16")
    assert "2 values too large for float16, no longer finite (in w)" in done.text
    (cast,) = ckpt("export", source, tmp_path / "out", "--dtype", "fp16", "--overwrite", "--json").json["report"][
        "casts"
    ]
    assert (cast["n_changed"], cast["n_overflowed"]) == (2, 2)
