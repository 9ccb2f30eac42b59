"""The root of the control tree ends a save only where all ranks have done the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tool.engine.save.coordinator import Coordinator
from ckpt_tool.engine.save.rounds import Report
from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.registry import joint_writer
from ckpt_tool.storage.local.shared_folder import SharedFolder


@pytest.mark.parametrize(
    ("url", "format_name", "words"),
    [
        ("/other", "dcp", "ranks save to different places: rank 0 to /one as dcp, rank 1 to /other as dcp"),
        (
            "/one",
            "safetensors",
            "ranks save in different formats: rank 0 to /one as dcp, rank 1 to /one as safetensors",
        ),
    ],
)
def test_ranks_that_do_not_save_together(tmp_path: Path, url: str, format_name: str, words: str) -> None:
    """Nothing is committed, and what each rank did is said."""
    done = [{"rank": 1, "url": url, "format": format_name}, {"rank": 0, "url": "/one", "format": "dcp"}]
    target = SharedFolder(str(tmp_path / "s"), "01234567", overwrite=True, durable=True)
    with pytest.raises(LayoutError, match=words):
        Coordinator(2).commit(Report(done=done), target, joint_writer("dcp"))
    assert not list(tmp_path.iterdir())
