"""Stretches that stand twice, and what looks like them and is none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ckpt_tool.manifest.finding import Finding, Severity
from tests.checks.synthetic import stored
from tests.checks.test_content import report_of

RANDOM = np.random.default_rng(7)
WIDE = RANDOM.normal(size=(128, 256)).astype("f4")


def found_in(tensors: dict[str, npt.NDArray[np.float32]], n_files: int = 1) -> list[Finding]:
    """The repeats in tensors of these values."""
    manifest, files = stored(tensors, n_files=n_files)
    return [finding for finding in report_of(manifest, files).findings if finding.kind == "repeated-block"]


def repeated(rows: int, behind: int) -> npt.NDArray[np.float32]:
    """Rows that stand a second time in the same tensor."""
    values = WIDE.copy()
    values[behind : behind + rows] = values[:rows]
    return values


@pytest.mark.parametrize(("rows", "behind"), [(8, 64), (60, 64), (16, 20)])
def test_rows_that_stand_twice(rows: int, behind: int) -> None:
    """One warning, with both places, confirmed byte by byte."""
    [found] = found_in({"model.w": repeated(rows, behind), "model.v": WIDE + 1})
    assert (found.severity, found.fqn) == (Severity.WARNING, "model.w")
    assert f"from index [0, 0] on stand a second time, from index [{behind}, 0] on" in found.message
    assert found.where is not None
    assert 4096 <= found.where.length <= rows * 1024


def test_a_part_of_another_tensor() -> None:
    """What belongs to one tensor stands in another one, at any distance within the file that pages have."""
    other = RANDOM.normal(size=(64, 256)).astype("f4")
    other[32:48] = WIDE[8:24]
    [found] = found_in({"model.w": WIDE, "model.v": other})
    assert found.severity is Severity.WARNING
    assert "a second time, from index" in found.message
    assert {"model.w", "model.v"} == {found.fqn, found.message.split("of '")[1].partition("'")[0]}


@pytest.mark.parametrize(
    "tensors",
    [
        {"model.w": WIDE, "model.v": WIDE[:64] + 1},
        {"model.w": WIDE, "ema.w": WIDE},
        {"model.qkv": WIDE, "model.q": WIDE[:32], "model.k": WIDE[32:64]},
        {"model.w": np.ones((64, 256), "f4")},
        {"model.w": np.tile(WIDE[:1], (64, 1))},
    ],
    ids=["random", "a copy", "fused and apart", "ones", "equal rows"],
)
def test_what_is_none(tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    """Copies under other names, fused tensors, and rows that are all the same."""
    assert found_in(tensors, n_files=2) == []


def test_untrained_rows_of_a_vocabulary() -> None:
    """They are said, and are no fault."""
    [found] = found_in({"model.embed_tokens.weight": repeated(8, 64), "lm_head.weight": WIDE + 1})
    assert found.severity is Severity.INFO
