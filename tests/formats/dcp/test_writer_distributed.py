"""Jobs of other layouts load what the DCP writer laid out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.formats.dcp.writer import WRITER
from tests.formats.dcp.load_worker import MESHES, run
from tests.formats.dcp.test_writer import bits
from tests.formats.dcp.written import numbers, row_boxes, table, write
from tests.ranks import start_ranks


@pytest.mark.dist
def test_other_layouts_load_it(tmp_path: Path) -> None:
    """Written as rows of three ranks, loaded as columns of two, or as blocks of a 2x2 mesh, bit for bit."""
    tensors = table(w=(7, 5), bias=(5,), scalar=(), narrow=(1, 17))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    write(WRITER.lay_out(WriteRequest(tensors, row_boxes(tensors, 3), 3)), numbers(tensors), checkpoint)
    shapes = {t.fqn: t.shape for t in tensors}
    start_ranks(run, (str(tmp_path), str(checkpoint), shapes), max(MESHES))
    expected = {fqn: t.data for fqn, t in numbers(tensors).items()}
    for world_size in MESHES:
        whole = torch.load(tmp_path / f"whole-{world_size}.pt", weights_only=True)
        assert {fqn: bits(value) for fqn, value in whole.items()} == expected
