"""Which objects go along with the tensors of a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.conversion import ConversionResult, Dropped
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import NotFound


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two tensors and three objects."""
    torch.save({"net": {"w": torch.ones(4), "b": torch.ones(2)}, "note": "x", "run": {"seed": 1, "step": 2}},
               tmp_path / "c.pt")  # fmt: skip
    return tmp_path / "c.pt"


def exported(source: Path, **options: Any) -> ConversionResult:
    """With all that it holds."""
    return export(source, source.parent / "out", to="dcp", everything=True, names="source", durable=False, **options)


def resharded(source: Path, **options: Any) -> ConversionResult:
    """On one rank."""
    return reshard(source, source.parent / "out", durable=False, **options)


@pytest.mark.parametrize("convert", [exported, resharded])
@pytest.mark.parametrize(
    ("exclude", "tensors", "objects"),
    [
        ((), {"net.w", "net.b"}, {"note", "run.seed", "run.step"}),
        (("run.*",), {"net.w", "net.b"}, {"note"}),
        (("*b*", "note"), {"net.w"}, {"run.seed", "run.step"}),
        (("re:^n",), None, None),
        (("dtype:f16",), None, None),
    ],
)
def test_patterns_leave_objects_out(
    source: Path, convert: Any, exclude: tuple[str, ...], tensors: set[str] | None, objects: set[str] | None
) -> None:
    """--exclude means what it names, be it a tensor or not; what fits nothing, or leaves no tensor, is an error."""
    if tensors is None or objects is None:
        with pytest.raises(NotFound):
            convert(source, exclude=exclude)
        return
    result = convert(source, exclude=exclude)
    with open_checkpoint(source.parent / "out") as found:
        assert (set(found), set(found.objects())) == (tensors, objects)
    left = {"net.w", "net.b", "note", "run.seed", "run.step"} - tensors - objects
    assert set(result.dropped) == {Dropped(fqn, "not selected") for fqn in left}


def test_patterns_choose_tensors(source: Path) -> None:
    """--include narrows the tensors, and objects go along."""
    exported(source, include=["*.w"])
    with open_checkpoint(source.parent / "out") as found:
        assert (set(found), set(found.objects())) == ({"net.w"}, {"note", "run.seed", "run.step"})
