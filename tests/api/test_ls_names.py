"""Names of steps that stand beside numbers, and trackers that name none."""

from __future__ import annotations

from pathlib import Path

from ckpt_tool.api.runs.ls import RunListing, ls
from tests.api.runs import titan


def latest(found: RunListing) -> str | None:
    """Path of the newest complete step."""
    return None if found.latest is None else found.latest.path


def test_numbers_beside_a_name(tmp_path: Path) -> None:
    """Orbax and others call steps by numbers alone, and one of them ``best``: that hides none of the numbers."""
    found = ls(titan(tmp_path, "90", "100", "best"))
    assert [step.path for step in found.steps] == ["best", "90", "100"]
    assert latest(found) == "100"


def test_trackers_that_hold_something_else(tmp_path: Path) -> None:
    """Two lines, nothing, UTF-16 of a shell: passed over, and said so; a tag may be a path."""
    run = titan(tmp_path, "iter_0000010", "my/tag")
    for text in (b"10\n20\n", b"", "10".encode("utf-16")):
        (run / "latest_checkpointed_iteration.txt").write_bytes(text)
        found = ls(run)
        assert "latest_checkpointed_iteration.txt holds no name of a step and was passed over" in found.notes
        assert latest(found) == "iter_0000010"
    (run / "latest_checkpointed_iteration.txt").unlink()
    (run / "latest").write_text("my/tag")
    found = ls(run)
    assert [tracker.says for tracker in found.trackers] == [None]
    assert {step.path for step in found.steps} == {"iter_0000010", "my/tag"}
